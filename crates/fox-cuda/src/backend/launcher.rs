//! Launching the ops' kernels: which variant, which grid.

use std::sync::Arc;

use fox_tensor::DType;

use super::{Cuda, int};
use crate::launch::Arg;
use crate::{Error, Result, Source};

/// What the ops' kernels are specialised on; see the heads of the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Variant {
    pub(super) bf16: bool,
    /// Elements per access.
    pub(super) vec: usize,
    /// Threads of a row: warps (norm) or lanes (heads); 0 where it does not apply.
    pub(super) lanes: usize,
    /// Pieces of a row per thread; 0 where it does not apply.
    pub(super) chunks: usize,
    /// Taps of a filter; 0 where it does not apply.
    pub(super) taps: usize,
}

impl Variant {
    /// For kernels that work element by element on rows of `width`.
    pub(super) fn plain(dtype: DType, width: usize) -> Self {
        let vec = if width.is_multiple_of(8) { 8 } else { 1 };
        Variant { bf16: dtype == DType::Bf16, vec, lanes: 0, chunks: 0, taps: 0 }
    }

    /// For the norms: warps to a row, such that a thread has at most two pieces, which with their gradients
    /// and sums leave registers for enough rows at once; and as few idle threads as possible.
    pub(super) fn rows(dtype: DType, width: usize) -> Self {
        let plain = Variant::plain(dtype, width);
        let pieces = width.div_ceil(plain.vec);
        let enough = |w: &usize| pieces <= w * 32 * 2;
        let fits = |w: &usize| enough(w) && pieces.is_multiple_of(w * 32);
        let warps = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];
        let warps = warps.iter().find(|w| fits(w)).or(warps.iter().find(|w| enough(w)));
        let warps = *warps.unwrap_or(&32);
        Variant { lanes: warps, chunks: rounded(pieces.div_ceil(32 * warps)), ..plain }
    }

    /// For heads of `width`: lanes of one warp to a head.
    pub(super) fn heads(dtype: DType, width: usize) -> Self {
        let plain = Variant::plain(dtype, width);
        let pieces = width.div_ceil(plain.vec);
        let lanes = pieces.next_power_of_two().min(32);
        Variant { lanes, chunks: rounded(pieces.div_ceil(lanes)), ..plain }
    }

    /// For filters of `taps` over heads of `width`: smaller pieces, because a thread holds many of them.
    pub(super) fn filters(dtype: DType, width: usize, taps: usize) -> Self {
        let vec = if width.is_multiple_of(4) { 4 } else { 1 };
        let pieces = width.div_ceil(vec);
        let lanes = pieces.next_power_of_two().min(32);
        Variant {
            lanes,
            chunks: rounded(pieces.div_ceil(lanes)),
            taps,
            vec,
            ..Variant::plain(dtype, width)
        }
    }

    fn defines(self, source: Source) -> Vec<String> {
        let mut defines =
            vec![format!("BF16={}", i32::from(self.bf16)), format!("VEC={}", self.vec)];
        if self.lanes > 0 {
            let name = if source == Source::NORM { "WARPS" } else { "LANES" };
            defines.push(format!("{name}={}", self.lanes));
            defines.push(format!("CHUNKS={}", self.chunks));
        }
        if self.taps > 0 {
            defines.push(format!("TAPS={}", self.taps));
        }
        defines
    }
}

/// Few sizes, few compilations.
fn rounded(chunks: usize) -> usize {
    if chunks <= 4 { chunks.max(1) } else { chunks.next_power_of_two() }
}

/// Typical variants of the ops' kernels, for compilation checks: source and defines.
pub fn op_variants() -> Vec<(Source, Vec<String>)> {
    let mut variants = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for width in [768, 1536, 203] {
            variants.push((Source::NORM, Variant::rows(dtype, width).defines(Source::NORM)));
        }
        for head_dim in [64, 96, 128, 29] {
            for source in [Source::HEADS, Source::GATED] {
                variants.push((source, Variant::heads(dtype, head_dim).defines(source)));
            }
        }
        for (head_dim, taps) in [(128, 4), (4, 4), (29, 3)] {
            let variant = Variant::filters(dtype, head_dim, taps);
            variants.push((Source::CONV, variant.defines(Source::CONV)));
        }
        for source in
            [Source::ELEMENTWISE, Source::LOSS, Source::COLUMNS, Source::BASELINE, Source::PAGED]
        {
            variants.extend([8, 1].map(|w| (source, Variant::plain(dtype, w).defines(source))));
        }
    }
    let update = Variant::plain(DType::F32, 1).defines(Source::UPDATE);
    variants.push((Source::UPDATE, update));
    variants.extend(super::baseline::scan_add_variants());
    variants.extend(super::baseline::delta_variants());
    variants.extend([768, 1536, 3584].map(|width| (Source::THIN, super::thin::defines(width))));
    variants.extend(super::decode::variants().into_iter().map(|defines| (Source::DECODE, defines)));
    variants
}

/// A launch of one of the ops' kernels.
pub(super) struct Op<'a> {
    pub(super) source: Source,
    pub(super) entry: &'static str,
    pub(super) variant: Variant,
    pub(super) grid: [usize; 2],
    pub(super) block: usize,
    pub(super) shared: usize,
    pub(super) args: &'a [Arg],
}

impl Cuda {
    /// Launches a kernel.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    pub(super) unsafe fn launch(&self, op: &Op<'_>) -> Result<()> {
        let kernel = self.kernel(op)?;
        let grid = [grid(op.grid[0])?, grid(op.grid[1])?, 1];
        let launch = kernel.launch(grid, op.block as u32).shared(op.shared as u32);
        // SAFETY: the caller's promise.
        unsafe { launch.args(op.args).run(|| format!("{:?}", op.variant)) }
    }

    pub(super) fn kernel(&self, op: &Op<'_>) -> Result<Arc<crate::Kernel>> {
        self.variant_kernel(op.source, op.entry, op.variant)
    }

    pub(super) fn variant_kernel(
        &self,
        source: Source,
        entry: &'static str,
        variant: Variant,
    ) -> Result<Arc<crate::Kernel>> {
        self.gpu.bind()?;
        self.kernels.get((source, entry, variant), || {
            self.gpu.kernel(source, &variant.defines(source), entry)
        })
    }

    /// Launches a kernel over `count` elements in pieces of the variant's width.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    pub(super) unsafe fn launch_flat(
        &self,
        source: Source,
        entry: &'static str,
        variant: Variant,
        count: usize,
        args: &[Arg],
    ) -> Result<()> {
        let blocks = count.div_ceil(variant.vec * 256).min(self.gpu.processors() as usize * 16);
        let op = Op { source, entry, variant, grid: [blocks, 1], block: 256, shared: 0, args };
        // SAFETY: the caller's promise.
        unsafe { self.launch(&op) }
    }
}

fn grid(blocks: usize) -> Result<u32> {
    if blocks > i32::MAX as usize {
        return Err(Error::argument("cuda", format!("a grid of {} blocks", int(blocks))));
    }
    Ok(blocks as u32)
}
