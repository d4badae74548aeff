//! The kernels of decode steps and their tile sizes.

use super::params::{
    DecodeAttentionParams, DecodeBlocked, DecodeHeads, DecodeMatmul, DecodeMatrix, DecodeMerge,
    DecodeNorm, DecodeSample, DecodeTable, DecodeToken, DrawParams,
};
use super::weights::STEP;
use crate::gpu::ModuleKey;
use crate::launch::Kernel;
use crate::ops::paged::Page;
use crate::params::MAX_KV_SPLITS;
use crate::source::source;
use crate::{Generation, Gpu, Result, Source};

const MATMUL: Source = source!("decode_matmul", ["decode.cuh"], [DecodeMatrix, DecodeMatmul]);
const MATMUL_TILED: Source =
    source!("decode_matmul_tiled", ["decode.cuh"], [DecodeMatrix, DecodeMatmul]);
const MATMUL_SM90: Source =
    source!("decode_matmul_sm90", ["decode.cuh"], [DecodeMatrix, DecodeMatmul]);
const ROWS: Source = source!(
    "decode_rows",
    ["decode.cuh", "decode_heads.cuh"],
    [Page, DecodeToken, DecodeTable, DecodeNorm, DecodeBlocked, DecodeHeads, DecodeMerge]
);
const ATTENTION: Source = source!(
    "decode_attention",
    ["decode.cuh", "decode_pages.cuh"],
    [Page, DecodeToken, DecodeTable, DecodeAttentionParams]
);
const ATTEND: Source = source!(
    "decode_attend",
    ["decode.cuh", "decode_heads.cuh", "decode_pages.cuh", "decode_attend.cuh"],
    [Page, DecodeToken, DecodeTable, DecodeHeads, DecodeAttentionParams, DecodeMerge]
);
const ATTEND_FEW: Source = source!(
    "decode_attend_few",
    ["decode.cuh", "decode_heads.cuh", "decode_pages.cuh", "decode_attend.cuh"],
    [Page, DecodeToken, DecodeTable, DecodeHeads, DecodeAttentionParams, DecodeMerge]
);
const SAMPLE: Source = source!("decode_sample", ["decode.cuh"], [DrawParams, DecodeSample]);

/// Threads of a block.
pub(super) const ROW_THREADS: usize = 256;
pub(super) const ATTENTION_THREADS: usize = 128;
/// Warps of a thread block of `decode_attend`, each with a head.
const ATTEND_WARPS: usize = 4;
/// Warps of a thread block of `decode_attend_few`, which takes a head.
const ATTEND_FEW_WARPS: usize = 8;
pub(super) const SAMPLE_THREADS: usize = 1024;
/// Columns that a thread block of `decode_norm` handles per iteration.
const ITEM: usize = 4 * ROW_THREADS;

/// Numbers of rows that a step is padded to.
pub(super) const BUCKETS: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// Largest number of rows of a step.
pub(super) const MAX_ROWS: usize = 256;

/// Columns of a slab of the wgmma kernel.
const SLAB: usize = 64;
/// Largest number of rows for which weights go to registers instead of shared memory.
pub(super) const FEW_ROWS: usize = 16;

/// The index of the bucket of a step of `rows` rows.
pub(super) fn bucket_of(rows: usize) -> usize {
    BUCKETS.iter().position(|&bucket| rows <= bucket).unwrap_or(BUCKETS.len() - 1)
}

/// KV splits of a sequence whose newest key is at `position`; the kernels' `KvSplits`.
pub(super) fn kv_splits(position: usize) -> usize {
    let pages = position / fox_tensor::PAGE + 1;
    let mut each = 4;
    while each * MAX_KV_SPLITS < pages {
        each *= 2;
    }
    pages.div_ceil(each)
}

/// The instructions of a matmul. Bits are the same; activations have different layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// `mma`, since Ampere.
    Mma,
    /// `wgmma`, on Hopper.
    Wgmma,
}

impl Family {
    /// The fastest one for matmuls of `rows` rows with these numbers of columns.
    pub(super) fn of(gpu: &Gpu, rows: usize, widths: &[usize]) -> Self {
        // K splits must begin at the same columns in both families.
        let fits = |&width: &usize| width.is_multiple_of(SLAB * k_splits_of(width));
        match gpu.generation().has_wgmma() && rows > FEW_ROWS && widths.iter().all(fits) {
            true => Family::Wgmma,
            false => Family::Mma,
        }
    }
}

/// K splits of a matmul with `width` columns.
fn k_splits_of(width: usize) -> usize {
    if width > 2048 { 8 } else { 4 }
}

/// The tile sizes of a matmul. Only `k_splits` affects bits, and it depends on the number of columns alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tiling {
    /// Weights go to registers; one warp per K split of 16 weight rows, with deep prefetch.
    Few {
        /// Tiles of 8 rows.
        nt: usize,
        k_splits: usize,
        /// Steps of 32 weight columns that a warp prefetches.
        depth: usize,
        /// Largest number of steps of a K split.
        steps: usize,
        glu: bool,
    },
    /// Tiles of `bm` weight rows and `bn` rows go through shared memory.
    Many {
        bm: usize,
        bn: usize,
        /// Warps along the weights and along the rows.
        warps: [usize; 2],
        k_splits: usize,
        stages: usize,
        glu: bool,
        /// Whether a thread block takes one K split; the consumer then adds the partial sums.
        split: bool,
    },
    /// The same with wgmma; one warpgroup per 64 weight rows, and a warp that copies.
    Wgmma { bm: usize, bn: usize, k_splits: usize, stages: usize, glu: bool, split: bool },
}

impl Tiling {
    pub(super) fn new(family: Family, rows: usize, width: usize, glu: bool) -> Self {
        let k_splits = k_splits_of(width);
        if family == Family::Wgmma {
            // Stages in flight must cover the memory latency. There are hardly more thread blocks than multiprocessors, so
            // one takes all shared memory.
            let (bm, bn, stages) = match rows {
                ..=32 => (64, 32, 16),
                33..=64 => (64, 64, 12),
                65..=128 => (64, 128, 8),
                _ => (128, 128, 6),
            };
            return Tiling::Wgmma { bm, bn, k_splits, stages, glu, split: false };
        }
        let many = |bm, bn, warps, stages| Tiling::Many {
            bm,
            bn,
            warps,
            k_splits,
            stages,
            glu,
            split: false,
        };
        let steps = (width / STEP).div_ceil(k_splits).max(1);
        match rows {
            // Few enough registers for four resident thread blocks per multiprocessor, which is a whole matmul.
            ..=8 => Tiling::Few { nt: 1, k_splits, depth: steps.min(6), steps, glu },
            9..=16 => Tiling::Few { nt: 2, k_splits, depth: steps.min(4), steps, glu },
            17..=32 => many(64, 32, [4, 1], 8),
            33..=64 => many(64, 64, [2, 2], 6),
            65..=128 => many(64, 128, [2, 4], 4),
            _ => many(128, 128, [2, 4], 3),
        }
    }

    /// The variant for a matrix with too few outputs to occupy the GPU with whole tiles: split-K.
    pub(super) fn split(self) -> Self {
        match self {
            Tiling::Many { bm, bn, warps, k_splits, stages, glu, .. } => {
                Tiling::Many { bm, bn, warps, k_splits, stages, glu, split: true }
            }
            // More and smaller thread blocks: two per multiprocessor, except for the largest tiles.
            Tiling::Wgmma { bm, bn, k_splits, stages, glu, .. } => {
                let stages = if bm > 64 { stages } else { stages / 2 };
                Tiling::Wgmma { bm, bn, k_splits, stages, glu, split: true }
            }
            // Hardly one thread block per multiprocessor: prefetches a whole K split, if registers allow.
            Tiling::Few { nt, k_splits, depth, glu, steps } => {
                Tiling::Few { nt, k_splits, depth: depth.max(steps.min(14 / nt)), glu, steps }
            }
        }
    }

    /// Whether pairs of weight rows become one output.
    pub(super) fn is_glu(self) -> bool {
        match self {
            Tiling::Few { glu, .. } | Tiling::Many { glu, .. } | Tiling::Wgmma { glu, .. } => glu,
        }
    }

    /// Whether the kernel reads int8 weights in place.
    pub(super) fn reads_int8(self) -> bool {
        matches!(self, Tiling::Few { .. })
    }

    /// Partial sums that the consumer adds up.
    pub(super) fn k_splits(self) -> usize {
        match self {
            Tiling::Many { k_splits, split: true, .. }
            | Tiling::Wgmma { k_splits, split: true, .. } => k_splits,
            _ => 1,
        }
    }

    pub(super) fn threads(self) -> usize {
        match self {
            Tiling::Few { k_splits, .. } => 32 * k_splits,
            Tiling::Many { warps, .. } => 32 * warps[0] * warps[1],
            Tiling::Wgmma { bm, .. } => 2 * bm + 32,
        }
    }

    /// Dynamic shared memory in bytes; 99 KiB per thread block exist on every GPU, 227 KiB on Hopper.
    pub(super) fn shared(self) -> usize {
        match self {
            Tiling::Few { .. } => 0,
            // Two steps of 32 bf16 columns.
            Tiling::Many { bm, bn, stages, .. } => stages * (bm + bn) * 2 * STEP * 2,
            // And two barriers per stage.
            Tiling::Wgmma { bm, bn, stages, .. } => stages * ((bm + bn) * SLAB * 2 + 16),
        }
    }

    /// Thread blocks for a matrix with `results` outputs.
    pub(super) fn blocks(self, results: usize) -> usize {
        let (weights, glu) = match self {
            Tiling::Few { glu, .. } => (16, glu),
            Tiling::Many { bm, glu, .. } | Tiling::Wgmma { bm, glu, .. } => (bm, glu),
        };
        results.div_ceil(if glu { weights / 2 } else { weights })
    }

    /// Of the tensor of a matrix that TMA reads, `[1 or with GLU 2][outputs][K]`, the rows and outputs of a box.
    pub(super) fn weight_box(self) -> Option<[usize; 2]> {
        match self {
            Tiling::Wgmma { glu: true, .. } => Some([2, 8]),
            Tiling::Wgmma { bm, .. } => Some([1, bm]),
            Tiling::Few { .. } | Tiling::Many { .. } => None,
        }
    }

    /// Thread blocks for `rows` rows.
    pub(super) fn row_blocks(self, rows: usize) -> usize {
        rows.div_ceil(self.rows())
    }

    /// Rows per thread block.
    fn rows(self) -> usize {
        match self {
            Tiling::Few { nt, .. } => 8 * nt,
            Tiling::Many { bn, .. } | Tiling::Wgmma { bn, .. } => bn,
        }
    }

    fn source(self) -> (Source, &'static str) {
        match self {
            Tiling::Few { .. } => (MATMUL, "decode_matmul"),
            Tiling::Many { .. } => (MATMUL_TILED, "decode_matmul_tiled"),
            Tiling::Wgmma { .. } => (MATMUL_SM90, "decode_matmul_sm90"),
        }
    }

    fn defines(self) -> Vec<String> {
        let values = match self {
            Tiling::Few { nt, k_splits, depth, glu, .. } => {
                vec![("NT", nt), ("K_SPLITS", k_splits), ("DEPTH", depth), ("GLU", glu.into())]
            }
            Tiling::Many { bm, bn, warps: [wm, wn], k_splits, stages, glu, split } => vec![
                ("BM", bm),
                ("BN", bn),
                ("WM", wm),
                ("WN", wn),
                ("K_SPLITS", k_splits),
                ("STAGES", stages),
                ("GLU", glu.into()),
                ("SPLIT", split.into()),
            ],
            Tiling::Wgmma { bm, bn, k_splits, stages, glu, split } => vec![
                ("BM", bm),
                ("BN", bn),
                ("K_SPLITS", k_splits),
                ("STAGES", stages),
                ("GLU", glu.into()),
                ("SPLIT", split.into()),
            ],
        };
        values.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }
}

/// `int8`: whether some matrices have int8 weights.
fn product_defines(tiling: Tiling, int8: bool) -> Vec<String> {
    let mut defines = tiling.defines();
    if tiling.reads_int8() {
        defines.push(format!("INT8={}", u8::from(int8)));
    }
    defines
}

fn row_defines(family: Family, width: usize, head_dim: usize) -> Vec<String> {
    let slabs = u8::from(family == Family::Wgmma);
    let items = width.div_ceil(ITEM);
    vec![format!("HEAD_DIM={head_dim}"), format!("ITEMS={items}"), format!("SLABS={slabs}")]
}

/// Few rows need more loads in flight; many rows are many thread blocks, which need registers.
fn attention_defines(head_dim: usize, few: bool) -> [String; 2] {
    [format!("HEAD_DIM={head_dim}"), format!("ROWS_IN_FLIGHT={}", if few { 16 } else { 8 })]
}

/// Attention in one launch for steps of `rows` rows.
fn attend_source(rows: usize) -> (Source, &'static str) {
    match rows <= FEW_ROWS {
        true => (ATTEND_FEW, "decode_attend_few"),
        false => (ATTEND, "decode_attend"),
    }
}

/// Grid and threads of that launch.
pub(super) fn attend_grid(rows: usize, heads: usize) -> ([usize; 3], usize) {
    match rows <= FEW_ROWS {
        true => ([heads, rows, 1], 32 * ATTEND_FEW_WARPS),
        false => ([heads.div_ceil(ATTEND_WARPS), rows, 1], 32 * ATTEND_WARPS),
    }
}

fn attend_defines(family: Family, head_dim: usize, few: bool) -> Vec<String> {
    let slabs = u8::from(family == Family::Wgmma);
    let [head_dim, in_flight] = attention_defines(head_dim, few);
    vec![head_dim, in_flight, format!("SLABS={slabs}")]
}

/// Typical variants for compilation checks.
pub(in crate::ops) fn variants(generation: Generation) -> Vec<(Source, Vec<String>)> {
    let mut all = Vec::new();
    let families =
        if generation.has_wgmma() { &[Family::Mma, Family::Wgmma][..] } else { &[Family::Mma] };
    for &family in families {
        let own = |&rows: &usize| family == Family::Mma || rows > FEW_ROWS;
        for rows in BUCKETS.into_iter().filter(own) {
            let tiling = |width, glu| Tiling::new(family, rows, width, glu);
            for tiling in [tiling(1536, false), tiling(1536, true), tiling(4096, false).split()] {
                all.push((tiling.source().0, product_defines(tiling, false)));
                if tiling.reads_int8() {
                    all.push((tiling.source().0, product_defines(tiling, true)));
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
    if generation.has_wgmma() {
        for (family, head_dim) in families.iter().flat_map(|f| [64, 128].map(|d| (*f, d))) {
            all.push((ATTEND, attend_defines(family, head_dim, false)));
            if family == Family::Mma {
                all.push((ATTEND_FEW, attend_defines(family, head_dim, true)));
            }
        }
    }
    all.push((SAMPLE, Vec::new()));
    all
}

/// What [`product`] needs compiled.
pub(super) fn product_module(tiling: Tiling, int8: bool) -> ModuleKey {
    (tiling.source().0, product_defines(tiling, int8))
}

/// The kernel of a matmul.
pub(super) fn product(gpu: &Gpu, tiling: Tiling, int8: bool) -> Result<Kernel> {
    let (source, entry) = tiling.source();
    gpu.kernel(source, &product_defines(tiling, int8), entry)
}

/// The kernel that copies rows to the blocked layout.
pub(super) fn block_rows(gpu: &Gpu, family: Family) -> Result<Kernel> {
    gpu.kernel(ROWS, &row_defines(family, ITEM, 64), "decode_block")
}

/// The kernels of a step except matmuls.
pub(super) struct Kernels {
    pub(super) norm: Kernel,
    pub(super) heads: Kernel,
    pub(super) attention: Kernel,
    pub(super) merge: Kernel,
    pub(super) sample: Kernel,
    /// `heads`, `attention` and `merge` in one launch.
    pub(super) attend: Option<Kernel>,
}

impl Kernels {
    /// What [`Kernels::new`] needs compiled.
    pub(super) fn modules(
        family: Family,
        rows: usize,
        width: usize,
        head_dim: usize,
        attend: bool,
    ) -> Vec<ModuleKey> {
        let mut all = vec![
            (ROWS, row_defines(family, width, head_dim)),
            (ATTENTION, attention_defines(head_dim, rows <= FEW_ROWS).into()),
            (SAMPLE, Vec::new()),
        ];
        all.extend(
            attend.then(|| {
                (attend_source(rows).0, attend_defines(family, head_dim, rows <= FEW_ROWS))
            }),
        );
        all
    }

    /// For steps of `rows` rows.
    pub(super) fn new(
        gpu: &Gpu,
        family: Family,
        rows: usize,
        width: usize,
        head_dim: usize,
        attend: bool,
    ) -> Result<Self> {
        let defines = row_defines(family, width, head_dim);
        let heads = attention_defines(head_dim, rows <= FEW_ROWS);
        let (source, entry) = attend_source(rows);
        Ok(Kernels {
            norm: gpu.kernel(ROWS, &defines, "decode_norm")?,
            heads: gpu.kernel(ROWS, &defines, "decode_heads")?,
            merge: gpu.kernel(ROWS, &defines, "decode_merge")?,
            attention: gpu.kernel(ATTENTION, &heads, "decode_attention")?,
            sample: gpu.kernel(SAMPLE, &[], "decode_sample")?,
            attend: attend
                .then(|| {
                    gpu.kernel(source, &attend_defines(family, head_dim, rows <= FEW_ROWS), entry)
                })
                .transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::MAX_K_SPLITS;

    #[test]
    fn reduction_order_depends_on_width_alone() {
        let k_splits = |tiling: Tiling| match tiling {
            Tiling::Few { k_splits, .. }
            | Tiling::Many { k_splits, .. }
            | Tiling::Wgmma { k_splits, .. } => k_splits,
        };
        let families = [Family::Mma, Family::Wgmma];
        for (width, family) in
            [128, 1536, 2048, 2080, 4096].into_iter().flat_map(|w| families.map(|f| (w, f)))
        {
            let expected = k_splits(Tiling::new(family, 1, width, true));
            for rows in 1..=MAX_ROWS {
                let tiling = Tiling::new(family, rows, width, false);
                assert_eq!(
                    [k_splits(tiling), k_splits(tiling.split())],
                    [expected; 2],
                    "{rows} rows of {width}"
                );
            }
        }
    }

    #[test]
    fn buckets_and_tiles_fit_rows_and_shared_memory() {
        for rows in 1..=MAX_ROWS {
            let bucket = BUCKETS[bucket_of(rows)];
            assert!(bucket >= rows && (bucket == 8 || bucket < 2 * rows));
            let hopper = (Family::Wgmma, 227);
            for (family, shared) in
                [(Family::Mma, 99)].into_iter().chain((bucket > FEW_ROWS).then_some(hopper))
            {
                for width in [64, 1536, 4096] {
                    let tiling = Tiling::new(family, bucket, width, false);
                    assert_eq!(tiling.row_blocks(bucket) * tiling.rows(), bucket);
                    assert!(tiling.threads() <= 288 && tiling.shared() <= shared << 10);
                    assert!(tiling.split().k_splits() <= MAX_K_SPLITS);
                }
            }
        }
    }

    #[test]
    fn kv_splits_have_four_pages_at_first() {
        let key = |pages: usize| 64 * pages - 1;
        assert_eq!([0, key(4), key(5), key(256)].map(kv_splits), [1, 1, 2, 64]);
        assert_eq!([key(257), key(512), key(513)].map(kv_splits), [33, 64, 33]);
    }
}
