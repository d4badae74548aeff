//! Products of a few rows.

use super::{Cuda, Operand, Precision, int};
use crate::{KernelArg, Result, Source};

/// Rows of one launch, at most; the kernels' `BATCH`.
pub(super) const MAX_BATCH: usize = 8;
const THREADS: usize = 256;
/// Rows of weights in a matrix instruction.
const TILE: usize = 16;
/// Shared memory that every supported GPU gives to one block.
const SHARED: usize = 99 * 1024;

#[repr(C)]
#[derive(Clone, Copy)]
struct Product {
    x: u64,
    w: u64,
    y: u64,
    rows: i32,
    width: i32,
    batch: i32,
    wide: i32,
}

// SAFETY: mirrors the struct of the same name in thin.cu.
unsafe impl KernelArg for Product {}

/// Defines of the kernel for products of such a width.
pub(super) fn defines(width: usize) -> Vec<String> {
    let pieces = width.div_ceil(256);
    vec![format!("CHUNKS={}", pieces.div_ceil(pieces.div_ceil(8)))]
}

impl Cuda {
    /// Whether products of so many rows of this width go through the kernel for few rows.
    pub(super) fn is_thin(&self, rows: usize, width: usize) -> bool {
        self.precision == Precision::Bf16
            && (1..=MAX_BATCH).contains(&rows)
            && width.is_multiple_of(8)
            && 2 * rows * width <= SHARED
    }

    /// `y[R, N] = x[R, K] w[N, K]^T` for few rows.
    pub(super) fn thin_product(
        &self,
        x: &Operand<'_>,
        w: &Operand<'_>,
        y: u64,
        [rows, n, k]: [usize; 3],
        wide: bool,
    ) -> Result<()> {
        self.gpu.bind()?;
        let kernel = self
            .step_kernels
            .get(defines(k), || self.gpu.kernel(Source::THIN, &defines(k), "thin_product"))?;
        let product = Product {
            x: x.address(),
            w: w.address(),
            y,
            rows: int(n),
            width: int(k),
            batch: int(rows),
            wide: i32::from(wide),
        };
        // As many blocks as may run at once.
        let blocks = n.div_ceil(TILE).min(2 * self.gpu.processors() as usize);
        let launch = kernel.launch([blocks as u32, 1, 1], THREADS as u32);
        let launch = launch.shared((2 * rows * k) as u32);
        // Since Hopper a launch may begin before the one in front of it has ended.
        let launch = launch.overlapping(self.gpu.architecture().major >= 9);
        // SAFETY: parameters as declared in thin.cu; the operands have the sizes named.
        unsafe { launch.arg(&product).run(|| format!("{rows} rows of {k} to {n}")) }
    }
}
