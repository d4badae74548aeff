//! The kernels of decode steps, and how their work is divided.

use super::params::{
    StreamAttention, StreamBlocked, StreamChoice, StreamDraw, StreamHeads, StreamMerge, StreamNorm,
    StreamPart, StreamProduct, StreamTable, StreamToken,
};
use crate::launch::Kernel;
use crate::ops::paged::Page;
use crate::source::source;
use crate::{Gpu, Result, Source};

const PRODUCT: Source = source!("stream_product", ["stream.cuh"], [StreamPart, StreamProduct]);
const ROWS: Source = source!(
    "stream_rows",
    ["stream.cuh"],
    [Page, StreamToken, StreamTable, StreamNorm, StreamBlocked, StreamHeads, StreamMerge]
);
const ATTENTION: Source =
    source!("stream_attention", ["stream.cuh"], [Page, StreamToken, StreamTable, StreamAttention]);
const CHOICE: Source = source!("stream_choice", ["stream.cuh"], [StreamDraw, StreamChoice]);

/// Threads of a block of the kernels of `stream_rows`, and of the others.
pub(super) const ROW_THREADS: usize = 256;
pub(super) const ATTENTION_THREADS: usize = 128;
pub(super) const CHOICE_THREADS: usize = 1024;
/// Columns that a thread block of `stream_norm` takes at once.
const ITEM: usize = 4 * ROW_THREADS;

/// Rows that a step is filled up to.
pub(super) const BUCKETS: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// Rows of a step, at most.
pub(super) const MAX_ROWS: usize = 256;
/// Runs of pages that a sequence's keys are divided into, at most; the kernels' `MAX_RUNS`.
pub(super) const MAX_RUNS: usize = 64;

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

/// How a product is divided; only `parts` decides bits, and it follows from the width alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Tiles of 8 rows of a warp.
    nt: usize,
    /// Tiles of 16 weights of a warp.
    mt: usize,
    /// Warps that share the rows.
    groups: usize,
    /// Runs of columns, a warp for each.
    parts: usize,
    /// Steps of 32 columns of weights on their way to a warp.
    depth: usize,
    glu: bool,
}

impl Tiling {
    /// Few rows: many bytes on their way. Many rows: each weight and each row that is read is used often.
    pub(super) fn new(rows: usize, width: usize, glu: bool) -> Self {
        let parts = if width > 2048 { 8 } else { 4 };
        let (nt, mt, groups, depth) = match rows {
            ..=8 => (1, 1, 1, 12),
            9..=16 => (2, 1, 1, 8),
            17..=32 => (4, 1, 8 / parts, 4),
            33..=64 => (8, 2, 8 / parts, 2),
            _ => (16, 2, 8 / parts, 2),
        };
        Tiling { nt, mt, groups, parts, depth, glu }
    }

    pub(super) fn threads(self) -> usize {
        32 * self.parts * self.groups
    }

    /// Results of a thread block.
    fn results(self) -> usize {
        self.groups * self.mt * if self.glu { 8 } else { 16 }
    }

    /// Thread blocks for a matrix with so many results.
    pub(super) fn blocks(self, results: usize) -> usize {
        results.div_ceil(self.results())
    }

    /// Thread blocks side by side for so many rows.
    pub(super) fn row_blocks(self, rows: usize) -> usize {
        rows.div_ceil(8 * self.nt)
    }

    fn defines(self) -> Vec<String> {
        let Tiling { nt, mt, groups, parts, depth, glu } = self;
        vec![
            format!("NT={nt}"),
            format!("MT={mt}"),
            format!("GROUPS={groups}"),
            format!("PARTS={parts}"),
            format!("DEPTH={depth}"),
            format!("GLU={}", i32::from(glu)),
        ]
    }
}

fn row_defines(width: usize, head_dim: usize) -> Vec<String> {
    vec![format!("HEAD_DIM={head_dim}"), format!("ITEMS={}", width.div_ceil(ITEM))]
}

/// Typical variants, for compilation checks.
pub(in crate::ops) fn variants() -> Vec<(Source, Vec<String>)> {
    let mut all = Vec::new();
    for rows in BUCKETS.iter().filter(|rows| **rows < MAX_ROWS) {
        for (width, glu) in [(1536, false), (1536, true), (4096, false)] {
            all.push((PRODUCT, Tiling::new(*rows, width, glu).defines()));
        }
    }
    for (width, head_dim) in [(1536, 64), (1024, 128), (2560, 256)] {
        all.push((ROWS, row_defines(width, head_dim)));
        all.push((ATTENTION, vec![format!("HEAD_DIM={head_dim}")]));
    }
    all.push((CHOICE, Vec::new()));
    all
}

/// The kernel of a product.
pub(super) fn product(gpu: &Gpu, tiling: Tiling) -> Result<Kernel> {
    gpu.kernel(PRODUCT, &tiling.defines(), "stream_product")
}

/// The kernel that blocks rows.
pub(super) fn block_rows(gpu: &Gpu) -> Result<Kernel> {
    gpu.kernel(ROWS, &row_defines(ITEM, 64), "stream_block")
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
    pub(super) fn new(gpu: &Gpu, width: usize, head_dim: usize) -> Result<Self> {
        let rows = row_defines(width, head_dim);
        let heads = [format!("HEAD_DIM={head_dim}")];
        Ok(Kernels {
            norm: gpu.kernel(ROWS, &rows, "stream_norm")?,
            heads: gpu.kernel(ROWS, &rows, "stream_heads")?,
            merge: gpu.kernel(ROWS, &rows, "stream_merge")?,
            attention: gpu.kernel(ATTENTION, &heads, "stream_attention")?,
            choice: gpu.kernel(CHOICE, &[], "stream_choice")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_additions_depends_on_the_width_alone() {
        for width in [128, 1536, 2048, 2080, 4096] {
            let parts = |rows: usize, glu: bool| Tiling::new(rows, width, glu).parts;
            for rows in 1..=MAX_ROWS {
                assert_eq!(parts(rows, false), parts(1, true), "{rows} rows of {width}");
            }
        }
    }

    #[test]
    fn a_bucket_has_room_for_its_rows_and_blocks_fit() {
        for rows in 1..=MAX_ROWS {
            let bucket = BUCKETS[bucket_of(rows)];
            assert!(bucket >= rows && (bucket == 8 || bucket < 2 * rows));
            for width in [64, 1536, 4096] {
                let tiling = Tiling::new(bucket, width, false);
                assert_eq!(tiling.row_blocks(bucket) * 8 * tiling.nt, bucket);
                assert!(tiling.threads() <= 512);
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
