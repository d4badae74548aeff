//! Launches of the ops' kernels: variants and grids.

use fox_tensor::DType;

use super::Cuda;
use crate::params::KernelParams;
use crate::{Result, Source};

/// Threads of a block of [`Cuda::launch_flat`].
pub(crate) const FLAT_THREADS: usize = 256;

/// Compile-time parameters of the ops' kernels; see the heads of the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) bf16: bool,
    /// Elements per access.
    pub(crate) vec: usize,
    /// Warps per row; 0 if unused.
    pub(crate) warps: usize,
    /// Lanes per head; 0 if unused.
    pub(crate) lanes: usize,
    /// Vectors of a row per thread; 0 if unused.
    pub(crate) chunks: usize,
    /// Taps of a filter; 0 if unused.
    pub(crate) taps: usize,
}

impl Variant {
    /// For kernels that work element by element on rows of `width`.
    pub(crate) fn plain(dtype: DType, width: usize) -> Self {
        let vec = if width.is_multiple_of(8) { 8 } else { 1 };
        Variant { bf16: dtype == DType::Bf16, vec, warps: 0, lanes: 0, chunks: 0, taps: 0 }
    }

    /// For the norms: warps to a row, such that a thread has at most two vectors, which with their gradients
    /// and sums leave registers for enough rows at once; and as few idle threads as possible.
    pub(crate) fn rows(dtype: DType, width: usize) -> Self {
        let plain = Variant::plain(dtype, width);
        let vectors = width.div_ceil(plain.vec);
        let enough = |w: &usize| vectors <= w * 32 * 2;
        let fits = |w: &usize| enough(w) && vectors.is_multiple_of(w * 32);
        let warps = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];
        let warps = warps.iter().find(|w| fits(w)).or(warps.iter().find(|w| enough(w)));
        let warps = *warps.unwrap_or(&32);
        Variant { warps, chunks: rounded(vectors.div_ceil(32 * warps)), ..plain }
    }

    /// For heads of `width`: lanes of one warp to a head.
    pub(crate) fn heads(dtype: DType, width: usize) -> Self {
        let plain = Variant::plain(dtype, width);
        let vectors = width.div_ceil(plain.vec);
        let lanes = vectors.next_power_of_two().min(32);
        Variant { lanes, chunks: rounded(vectors.div_ceil(lanes)), ..plain }
    }

    /// For filters of `taps` over heads of `width`, in vectors of `vec`, which divides the width.
    pub(crate) fn filters(dtype: DType, width: usize, taps: usize, vec: usize) -> Self {
        let vectors = width.div_ceil(vec);
        let lanes = vectors.next_power_of_two().min(32);
        Variant {
            lanes,
            chunks: rounded(vectors.div_ceil(lanes)),
            taps,
            vec,
            ..Variant::plain(dtype, width)
        }
    }

    pub(crate) fn defines(self) -> Vec<String> {
        let mut defines =
            vec![format!("BF16={}", i32::from(self.bf16)), format!("VEC={}", self.vec)];
        let others = [
            ("WARPS", self.warps),
            ("LANES", self.lanes),
            ("CHUNKS", self.chunks),
            ("TAPS", self.taps),
        ];
        defines
            .extend(others.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name}={n}")));
        defines
    }
}

/// Few sizes, few compilations.
fn rounded(chunks: usize) -> usize {
    if chunks <= 4 { chunks.max(1) } else { chunks.next_power_of_two() }
}

/// Typical variants of a source whose kernels work element by element, for compilation checks.
pub(crate) fn plain_variants(source: Source) -> Vec<(Source, Vec<String>)> {
    let of = |dtype| [8, 1].map(|width| (source, Variant::plain(dtype, width).defines()));
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

/// A kernel and its launch configuration.
pub(crate) struct Op {
    pub(crate) source: Source,
    pub(crate) entry: &'static str,
    pub(crate) variant: Variant,
    pub(crate) grid: [usize; 2],
    pub(crate) block: usize,
    pub(crate) shared: usize,
}

impl Op {
    /// A launch without dynamic shared memory.
    pub(crate) fn new(
        source: Source,
        entry: &'static str,
        variant: Variant,
        grid: [usize; 2],
        block: usize,
    ) -> Self {
        Op { source, entry, variant, grid, block, shared: 0 }
    }
}

impl Cuda {
    /// Launches a kernel.
    ///
    /// # Safety
    /// As for [`crate::launch::Launch::run`].
    pub(crate) unsafe fn launch<P: KernelParams>(&self, op: &Op, params: P) -> Result<()> {
        let Op { source, entry, variant, grid: [x, y], block, shared } = *op;
        let kernel = self.gpu.cached_kernel(source, entry, variant, |variant| variant.defines())?;
        let launch = kernel.launch([x, y, 1], block).shared(shared).params(params)?;
        // SAFETY: the caller's promise.
        unsafe { launch.run(|| format!("{variant:?}")) }
    }

    /// Launches a kernel over `count` elements in vectors of the variant's width.
    ///
    /// # Safety
    /// As for [`crate::launch::Launch::run`].
    pub(crate) unsafe fn launch_flat<P: KernelParams>(
        &self,
        source: Source,
        entry: &'static str,
        variant: Variant,
        count: usize,
        params: P,
    ) -> Result<()> {
        let grid = [self.flat_blocks(count.div_ceil(variant.vec)), 1];
        let op = Op { source, entry, variant, grid, block: FLAT_THREADS, shared: 0 };
        // SAFETY: the caller's promise.
        unsafe { self.launch(&op, params) }
    }

    /// Thread blocks of a launch whose threads take `vectors` in turn.
    pub(crate) fn flat_blocks(&self, vectors: usize) -> usize {
        vectors.div_ceil(FLAT_THREADS).min(self.gpu.processors() as usize * 16)
    }
}
