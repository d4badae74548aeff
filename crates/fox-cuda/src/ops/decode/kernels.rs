//! The kernels of decode steps, and how their work is divided.

use super::model::STEP;
use super::params::{
    DecodeAttention, DecodeBlocked, DecodeSample, TokenDraw, DecodeHeads, DecodeMerge, DecodeNorm,
    DecodeMatrix, DecodeMatmul, DecodeTable, DecodeToken,
};
use crate::launch::Kernel;
use crate::ops::paged::Page;
use crate::source::source;
use crate::{Gpu, Result, Source};

const PRODUCT: Source = source!("decode_matmul", ["decode.cuh"], [DecodeMatrix, DecodeMatmul]);
const TILES: Source = source!("decode_matmul_tiled", ["decode.cuh"], [DecodeMatrix, DecodeMatmul]);
const HOPPER: Source = source!("decode_matmul_sm90", ["decode.cuh"], [DecodeMatrix, DecodeMatmul]);
const ROWS: Source = source!(
    "decode_rows",
    ["decode.cuh"],
    [Page, DecodeToken, DecodeTable, DecodeNorm, DecodeBlocked, DecodeHeads, DecodeMerge]
);
const ATTENTION: Source =
    source!("decode_attention", ["decode.cuh"], [Page, DecodeToken, DecodeTable, DecodeAttention]);
const CHOICE: Source = source!("decode_sample", ["decode.cuh"], [TokenDraw, DecodeSample]);

/// Threads of a block of the kernels of `decode_rows`, and of the others.
pub(super) const ROW_THREADS: usize = 256;
pub(super) const ATTENTION_THREADS: usize = 128;
pub(super) const CHOICE_THREADS: usize = 1024;
/// Columns that a thread block of `decode_norm` takes at once.
const ITEM: usize = 4 * ROW_THREADS;

/// Rows that a step is filled up to.
pub(super) const BUCKETS: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// Rows of a step, at most.
pub(super) const MAX_ROWS: usize = 256;
/// Runs of pages that a sequence's keys are divided into, at most; the kernels' `MAX_RUNS`.
pub(super) const MAX_RUNS: usize = 64;

/// Columns that Hopper's products take at once.
const SLAB: usize = 64;
/// Up to so many rows the weights go to registers.
pub(super) const FEW_ROWS: usize = 16;

/// Runs of columns of a product, at most.
pub(super) const MAX_PARTS: usize = 8;

/// The bucket of a step of so many rows, as an index.
pub(super) fn bucket_of(rows: usize) -> usize {
    BUCKETS.iter().position(|&bucket| rows <= bucket).unwrap_or(BUCKETS.len() - 1)
}

/// Runs of pages of a sequence whose newest key is at `position`; the kernels' `Runs`.
pub(super) fn runs(position: usize) -> usize {
    let pages = position / fox_tensor::PAGE + 1;
    let mut each = 4;
    while each * MAX_RUNS < pages {
        each *= 2;
    }
    pages.div_ceil(each)
}

/// Which kernels multiply. The bits are the same, but rows lie differently in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Portable,
    /// Products of warpgroups.
    Hopper,
}

impl Family {
    /// The best one for products of so many rows of these widths.
    pub(super) fn of(gpu: &Gpu, rows: usize, widths: &[usize]) -> Self {
        // Runs of columns must begin where those of the other family do.
        let fits = |&width: &usize| width.is_multiple_of(SLAB * parts_of(width));
        match gpu.architecture().is_hopper() && rows > FEW_ROWS && widths.iter().all(fits) {
            true => Family::Hopper,
            false => Family::Portable,
        }
    }
}

/// Runs that the columns of a product are divided into.
fn parts_of(width: usize) -> usize {
    if width > 2048 { 8 } else { 4 }
}

/// How a product is divided; only `parts`, the runs of columns, decides bits, and it follows from the width alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tiling {
    /// Weights go to registers, a warp for each run of columns of 16 of them; many bytes are on their way.
    Few {
        /// Tiles of 8 rows.
        nt: usize,
        parts: usize,
        /// Steps of 32 columns of weights on their way to a warp.
        depth: usize,
        /// Steps of a run, at most.
        steps: usize,
        glu: bool,
    },
    /// Tiles of `bm` weights and `bn` rows go through shared memory, so that each is used often.
    Many {
        bm: usize,
        bn: usize,
        /// Warps along the weights and along the rows.
        warps: [usize; 2],
        parts: usize,
        stages: usize,
        glu: bool,
        /// Whether a thread block does one run, and the runs are added up by whoever reads the results.
        split: bool,
    },
    /// The same by Hopper's products, a warpgroup for 64 weights.
    Hopper { bm: usize, bn: usize, parts: usize, stages: usize, glu: bool, split: bool },
}

impl Tiling {
    pub(super) fn new(family: Family, rows: usize, width: usize, glu: bool) -> Self {
        let parts = parts_of(width);
        if family == Family::Hopper {
            // What is on its way must outlast the way: there are hardly more thread blocks than multiprocessors, so one
            // takes all the memory there is.
            let (bm, bn, stages) = match rows {
                ..=32 => (64, 32, 16),
                33..=64 => (64, 64, 12),
                65..=128 => (64, 128, 8),
                _ => (128, 128, 6),
            };
            return Tiling::Hopper { bm, bn, parts, stages, glu, split: false };
        }
        let many = |bm, bn, warps, stages| Tiling::Many {
            bm,
            bn,
            warps,
            parts,
            stages,
            glu,
            split: false,
        };
        let steps = (width / STEP).div_ceil(parts).max(1);
        match rows {
            // So few registers that all thread blocks of a product are there at once, four on a multiprocessor.
            ..=8 => Tiling::Few { nt: 1, parts, depth: steps.min(6), steps, glu },
            9..=16 => Tiling::Few { nt: 2, parts, depth: steps.min(4), steps, glu },
            17..=32 => many(64, 32, [4, 1], 8),
            33..=64 => many(64, 64, [2, 2], 6),
            65..=128 => many(64, 128, [2, 4], 4),
            _ => many(128, 128, [2, 4], 3),
        }
    }

    /// The same for a matrix with so few results that its tiles would not occupy the GPU.
    pub(super) fn split(self) -> Self {
        match self {
            Tiling::Many { bm, bn, warps, parts, stages, glu, .. } => {
                Tiling::Many { bm, bn, warps, parts, stages, glu, split: true }
            }
            // More thread blocks with less to do: two share a multiprocessor, but for the largest.
            Tiling::Hopper { bm, bn, parts, stages, glu, .. } => {
                let stages = if bm > 64 { stages } else { stages / 2 };
                Tiling::Hopper { bm, bn, parts, stages, glu, split: true }
            }
            // Hardly one on a multiprocessor: all of a run at once, if registers allow.
            Tiling::Few { nt, parts, depth, glu, steps } => {
                Tiling::Few { nt, parts, depth: depth.max(steps.min(14 / nt)), glu, steps }
            }
        }
    }

    /// Whether pairs of rows of weights become one result.
    pub(super) fn is_glu(self) -> bool {
        match self {
            Tiling::Few { glu, .. } | Tiling::Many { glu, .. } | Tiling::Hopper { glu, .. } => glu,
        }
    }

    /// Whether the kernel can read matrices in 8 bits; the others read bf16 alone.
    pub(super) fn reads_int8(self) -> bool {
        matches!(self, Tiling::Few { .. })
    }

    /// Runs of columns that whoever reads the results adds up.
    pub(super) fn runs(self) -> usize {
        match self {
            Tiling::Many { parts, split: true, .. } | Tiling::Hopper { parts, split: true, .. } => {
                parts
            }
            _ => 1,
        }
    }

    pub(super) fn threads(self) -> usize {
        match self {
            Tiling::Few { parts, .. } => 32 * parts,
            Tiling::Many { warps, .. } => 32 * warps[0] * warps[1],
            Tiling::Hopper { bm, .. } => 2 * bm,
        }
    }

    /// Dynamic shared memory, in bytes; not every GPU has more than 99 KiB for a thread block, Hopper 227.
    pub(super) fn shared(self) -> usize {
        match self {
            Tiling::Few { .. } => 0,
            // Two steps of 32 columns in two bytes each.
            Tiling::Many { bm, bn, stages, .. } => stages * (bm + bn) * 2 * STEP * 2,
            // And a barrier for each stage.
            Tiling::Hopper { bm, bn, stages, .. } => stages * ((bm + bn) * SLAB * 2 + 8),
        }
    }

    /// Thread blocks for a matrix with so many results.
    pub(super) fn blocks(self, results: usize) -> usize {
        let (weights, glu) = match self {
            Tiling::Few { glu, .. } => (16, glu),
            Tiling::Many { bm, glu, .. } | Tiling::Hopper { bm, glu, .. } => (bm, glu),
        };
        results.div_ceil(if glu { weights / 2 } else { weights })
    }

    /// Thread blocks side by side for so many rows.
    pub(super) fn row_blocks(self, rows: usize) -> usize {
        rows.div_ceil(self.rows())
    }

    /// Rows of a thread block.
    fn rows(self) -> usize {
        match self {
            Tiling::Few { nt, .. } => 8 * nt,
            Tiling::Many { bn, .. } | Tiling::Hopper { bn, .. } => bn,
        }
    }

    fn source(self) -> (Source, &'static str) {
        match self {
            Tiling::Few { .. } => (PRODUCT, "decode_matmul"),
            Tiling::Many { .. } => (TILES, "decode_matmul_tiled"),
            Tiling::Hopper { .. } => (HOPPER, "decode_matmul_sm90"),
        }
    }

    fn defines(self) -> Vec<String> {
        let values = match self {
            Tiling::Few { nt, parts, depth, glu, .. } => {
                vec![("NT", nt), ("PARTS", parts), ("DEPTH", depth), ("GLU", glu.into())]
            }
            Tiling::Many { bm, bn, warps: [wm, wn], parts, stages, glu, split } => vec![
                ("BM", bm),
                ("BN", bn),
                ("WM", wm),
                ("WN", wn),
                ("PARTS", parts),
                ("STAGES", stages),
                ("GLU", glu.into()),
                ("SPLIT", split.into()),
            ],
            Tiling::Hopper { bm, bn, parts, stages, glu, split } => vec![
                ("BM", bm),
                ("BN", bn),
                ("PARTS", parts),
                ("STAGES", stages),
                ("GLU", glu.into()),
                ("SPLIT", split.into()),
            ],
        };
        values.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }
}

fn product_defines(tiling: Tiling, int8: bool) -> Vec<String> {
    let mut defines = tiling.defines();
    if tiling.reads_int8() {
        defines.push(format!("INT8={}", u8::from(int8)));
    }
    defines
}

fn row_defines(family: Family, width: usize, head_dim: usize) -> Vec<String> {
    let slabs = u8::from(family == Family::Hopper);
    let items = width.div_ceil(ITEM);
    vec![format!("HEAD_DIM={head_dim}"), format!("ITEMS={items}"), format!("SLABS={slabs}")]
}

/// Much is on its way for few rows; many rows are many thread blocks, which need registers.
fn attention_defines(head_dim: usize, few: bool) -> [String; 2] {
    [format!("HEAD_DIM={head_dim}"), format!("AT_ONCE={}", if few { 16 } else { 8 })]
}

/// Typical variants, for compilation checks.
pub(in crate::ops) fn variants(hopper: bool) -> Vec<(Source, Vec<String>)> {
    let mut all = Vec::new();
    let families =
        if hopper { &[Family::Portable, Family::Hopper][..] } else { &[Family::Portable] };
    for &family in families {
        let own = |&rows: &usize| family == Family::Portable || rows > FEW_ROWS;
        for rows in BUCKETS.into_iter().filter(own) {
            let tiling = |width, glu| Tiling::new(family, rows, width, glu);
            for tiling in [tiling(1536, false), tiling(1536, true), tiling(4096, false).split()] {
                for int8 in [false, true].into_iter().filter(|int8| tiling.reads_int8() || !int8) {
                    all.push((tiling.source().0, product_defines(tiling, int8)));
                }
            }
        }
        for (width, head_dim) in [(1536, 64), (1024, 128), (2560, 256)] {
            all.push((ROWS, row_defines(family, width, head_dim)));
        }
    }
    for (head_dim, few) in [64, 128, 256].into_iter().flat_map(|d| [(d, true), (d, false)]) {
        all.push((ATTENTION, attention_defines(head_dim, few).into()));
    }
    all.push((CHOICE, Vec::new()));
    all
}

/// The kernel of a product; `int8` where some of its matrices are in 8 bits.
pub(super) fn product(gpu: &Gpu, tiling: Tiling, int8: bool) -> Result<Kernel> {
    let (source, entry) = tiling.source();
    gpu.kernel(source, &product_defines(tiling, int8), entry)
}

/// The kernel that blocks rows.
pub(super) fn block_rows(gpu: &Gpu, family: Family) -> Result<Kernel> {
    gpu.kernel(ROWS, &row_defines(family, ITEM, 64), "decode_block")
}

/// The kernels of a model beside its products.
pub(super) struct Kernels {
    pub(super) norm: Kernel,
    pub(super) heads: Kernel,
    pub(super) attention: Kernel,
    pub(super) merge: Kernel,
    pub(super) choice: Kernel,
}

impl Kernels {
    /// For steps of so many rows.
    pub(super) fn new(
        gpu: &Gpu,
        family: Family,
        rows: usize,
        width: usize,
        head_dim: usize,
    ) -> Result<Self> {
        let defines = row_defines(family, width, head_dim);
        let heads = attention_defines(head_dim, rows <= FEW_ROWS);
        Ok(Kernels {
            norm: gpu.kernel(ROWS, &defines, "decode_norm")?,
            heads: gpu.kernel(ROWS, &defines, "decode_heads")?,
            merge: gpu.kernel(ROWS, &defines, "decode_merge")?,
            attention: gpu.kernel(ATTENTION, &heads, "decode_attention")?,
            choice: gpu.kernel(CHOICE, &[], "decode_sample")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_additions_depends_on_the_width_alone() {
        let parts = |tiling: Tiling| match tiling {
            Tiling::Few { parts, .. }
            | Tiling::Many { parts, .. }
            | Tiling::Hopper { parts, .. } => parts,
        };
        let families = [Family::Portable, Family::Hopper];
        for (width, family) in
            [128, 1536, 2048, 2080, 4096].into_iter().flat_map(|w| families.map(|f| (w, f)))
        {
            let expected = parts(Tiling::new(family, 1, width, true));
            for rows in 1..=MAX_ROWS {
                let tiling = Tiling::new(family, rows, width, false);
                assert_eq!(
                    [parts(tiling), parts(tiling.split())],
                    [expected; 2],
                    "{rows} rows of {width}"
                );
            }
        }
    }

    #[test]
    fn a_bucket_has_room_for_its_rows_and_blocks_fit() {
        for rows in 1..=MAX_ROWS {
            let bucket = BUCKETS[bucket_of(rows)];
            assert!(bucket >= rows && (bucket == 8 || bucket < 2 * rows));
            let hopper = (Family::Hopper, 227);
            for (family, shared) in
                [(Family::Portable, 99)].into_iter().chain((bucket > FEW_ROWS).then_some(hopper))
            {
                for width in [64, 1536, 4096] {
                    let tiling = Tiling::new(family, bucket, width, false);
                    assert_eq!(tiling.row_blocks(bucket) * tiling.rows(), bucket);
                    assert!(tiling.threads() <= 256 && tiling.shared() <= shared << 10);
                    assert!(tiling.split().runs() <= MAX_PARTS);
                }
            }
        }
    }

    #[test]
    fn runs_have_four_pages_until_there_are_too_many() {
        let key = |pages: usize| 64 * pages - 1;
        assert_eq!([0, key(4), key(5), key(256)].map(runs), [1, 1, 2, 64]);
        assert_eq!([key(257), key(512), key(513)].map(runs), [33, 64, 33]);
    }
}
