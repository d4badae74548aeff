//! Linear layers with up to 8 rows, for decoding.

use half::bf16;

use crate::backend::{Cuda, Operand, Precision};
use crate::params::{ConstPtr, Ptr, kernel_params};
use crate::source::source;
use crate::{Result, Source};

/// Maximum rows of a launch; the kernel's `BATCH`.
pub(crate) const MAX_BATCH: usize = 8;
const THREADS: usize = 256;
/// Weight rows of an mma.
const TILE: usize = 16;
/// Shared memory per block on every supported GPU.
const SHARED: usize = 99 * 1024;

const THIN: Source = source!("thin", [], [ThinProduct]);

kernel_params! {
    struct ThinProduct {
        /// `[batch, width]`.
        x: ConstPtr<bf16>,
        /// `[rows, width]`.
        w: ConstPtr<bf16>,
        /// `[batch, rows]`, f32 if `wide`, else bf16.
        y: Ptr<()>,
        rows: usize,
        width: usize,
        batch: usize,
        wide: bool,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    [768, 1536, 3584].map(|width| (THIN, defines(&chunks(width)))).into()
}

/// Chunks of 256 columns that a thread loads ahead, for products of this width.
fn chunks(width: usize) -> usize {
    let chunks = width.div_ceil(256);
    chunks.div_ceil(chunks.div_ceil(8))
}

fn defines(chunks: &usize) -> Vec<String> {
    vec![format!("CHUNKS={chunks}")]
}

impl Cuda {
    /// Whether products of `rows` rows of `width` use this kernel.
    pub(crate) fn is_thin(&self, rows: usize, width: usize) -> bool {
        self.precision == Precision::Bf16
            && (1..=MAX_BATCH).contains(&rows)
            && width.is_multiple_of(8)
            && 2 * rows * width <= SHARED
    }

    /// `y[R, N] = x[R, K] w[N, K]^T` for few rows, with sizes `[R, N, K]`.
    ///
    /// # Safety
    /// All three must be live matrices of these sizes.
    pub(crate) unsafe fn thin_product(
        &self,
        x: &Operand<'_>,
        w: &Operand<'_>,
        y: u64,
        [rows, n, k]: [usize; 3],
        wide: bool,
    ) -> Result<()> {
        let kernel = self.gpu.cached_kernel(THIN, "thin_product", chunks(k), defines)?;
        let product = ThinProduct {
            x: x.address().into(),
            w: w.address().into(),
            y: y.into(),
            rows: n,
            width: k,
            batch: rows,
            wide,
        };
        // Two resident blocks per multiprocessor.
        let blocks = n.div_ceil(TILE).min(2 * self.gpu.processors() as usize);
        let launch = kernel.launch([blocks, 1, 1], THREADS).shared(2 * rows * k).params(product)?;
        // Since Hopper a launch may begin before the one in front of it has ended, unless that one has just made the
        // weights.
        let made = matches!(w, Operand::Converted(_));
        let launch = launch.overlapping(self.gpu.generation().has_dependent_launch() && !made);
        // SAFETY: the caller's promise.
        unsafe { launch.run(|| format!("{rows} rows of {k} to {n}")) }
    }
}
