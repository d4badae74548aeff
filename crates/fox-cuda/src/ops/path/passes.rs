//! The passes of PaTH attention: kernels, shared memory and defines.

use super::params::PathParams;
use super::table::{PathBlock, PathSpan, PathTile};
use crate::source::source;
use crate::{Generation, Source};

const PREPARE: Source =
    source!("path_prepare", ["path.cuh"], [PathBlock, PathTile, PathSpan, PathParams]);
pub(super) const WALK: Source = source!(
    "path_walk",
    ["path.cuh", "path_queries.cuh"],
    [PathBlock, PathTile, PathSpan, PathParams]
);
const BACKWARD: Source =
    source!("path_bwd", ["path.cuh"], [PathBlock, PathTile, PathSpan, PathParams]);
const OLDER: Source = source!(
    "path_older",
    ["path.cuh", "path_queries.cuh"],
    [PathBlock, PathTile, PathSpan, PathParams]
);
const SPANS: Source =
    source!("path_spans", ["path.cuh"], [PathBlock, PathTile, PathSpan, PathParams]);

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PathShape {
    /// Head dim, rounded up.
    pub(super) width: usize,
    wide: bool,
}

/// The kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Pass {
    Prepare,
    Forward,
    Queries,
    BackWalk,
    Own,
    Keys,
    PrepareBackward,
    Spans,
    Merge,
    SpanQueries,
    SpanWalk,
    SpanProducts,
    SpanKeys,
    SpanBackward,
}

impl Pass {
    const ALL: [Pass; 14] = [
        Pass::Prepare,
        Pass::Forward,
        Pass::Queries,
        Pass::BackWalk,
        Pass::Own,
        Pass::Keys,
        Pass::PrepareBackward,
        Pass::Spans,
        Pass::Merge,
        Pass::SpanQueries,
        Pass::SpanWalk,
        Pass::SpanProducts,
        Pass::SpanKeys,
        Pass::SpanBackward,
    ];

    /// Source, entry and threads per block.
    pub(super) fn kernel(self) -> (Source, &'static str, usize) {
        match self {
            Pass::Prepare => (PREPARE, "path_prepare", 256),
            Pass::Forward => (WALK, "path_fwd", 128),
            Pass::Queries => (WALK, "path_queries", 128),
            Pass::BackWalk => (WALK, "path_bwd_walk", 128),
            Pass::Own => (BACKWARD, "path_bwd_own", 256),
            Pass::Keys => (BACKWARD, "path_bwd_keys", 256),
            Pass::PrepareBackward => (PREPARE, "path_bwd_prepare", 256),
            Pass::Spans => (SPANS, "path_spans", 256),
            Pass::Merge => (OLDER, "path_merge", 128),
            Pass::SpanQueries => (OLDER, "path_span_queries", 128),
            Pass::SpanWalk => (OLDER, "path_span_walk", 128),
            Pass::SpanProducts => (SPANS, "path_span_products", 256),
            Pass::SpanKeys => (SPANS, "path_span_keys", 256),
            Pass::SpanBackward => (SPANS, "path_span_bwd", 256),
        }
    }

    /// The name of its size of shared memory in the sources.
    fn define(self) -> &'static str {
        match self {
            Pass::Prepare => "PREPARE_BYTES",
            Pass::Forward => "FORWARD_BYTES",
            Pass::Queries => "QUERIES_BYTES",
            Pass::BackWalk => "BACK_WALK_BYTES",
            Pass::Own => "OWN_BYTES",
            Pass::Keys => "KEYS_BYTES",
            Pass::PrepareBackward => "PREPARE_BWD_BYTES",
            Pass::Spans => "SPANS_BYTES",
            Pass::Merge => "MERGE_BYTES",
            Pass::SpanQueries => "SPAN_QUERIES_BYTES",
            Pass::SpanWalk => "SPAN_WALK_BYTES",
            Pass::SpanProducts => "SPAN_PRODUCTS_BYTES",
            Pass::SpanKeys => "SPAN_KEYS_BYTES",
            Pass::SpanBackward => "SPAN_BWD_BYTES",
        }
    }
}

impl PathShape {
    pub(super) fn new(head_dim: usize, wide: bool) -> Self {
        PathShape { width: if head_dim <= 64 { 64 } else { 128 }, wide }
    }

    /// Blocks of keys in shared memory. Two where two thread blocks still fit an SM of Hopper.
    fn stages(self) -> usize {
        if self.width == 64 && !self.wide { 2 } else { 1 }
    }

    /// Bytes of shared memory.
    pub(super) fn shared(self, pass: Pass) -> usize {
        let (size, pad) = if self.wide { (4, 4) } else { (2, 8) };
        let tile = |rows: usize, columns: usize| rows * (columns + pad) * size;
        let (rows, square) = (tile(64, self.width), tile(64, 64));
        let e = tile(self.width, self.width);
        // Gates of a block; statistics of a tile.
        let (gates, statistics) = (64 * 8, 64 * 40);
        match pass {
            Pass::Prepare => 2 * rows + 3 * square + 2 * 64 * 68 * 4,
            Pass::Forward => self.stages() * (2 * rows + e + gates) + rows + 3 * square,
            Pass::Queries => 2 * rows + 2 * square + e,
            Pass::BackWalk => 5 * rows + square + gates,
            Pass::Own => 4 * rows + 5 * square + statistics,
            Pass::Keys => 5 * rows + 2 * square + statistics,
            Pass::PrepareBackward => 3 * rows + e + 3 * square,
            Pass::Spans => rows + 2 * e,
            Pass::Merge => 0,
            Pass::SpanQueries => 2 * rows + 2 * square + e + 64 * 4,
            Pass::SpanWalk => rows + e,
            Pass::SpanProducts => 4 * rows,
            Pass::SpanKeys => 2 * rows + e,
            Pass::SpanBackward => 2 * rows + 2 * e,
        }
    }

    pub(super) fn defines(self) -> Vec<String> {
        let mut defines = vec![
            format!("HEAD_DIM={}", self.width),
            format!("BF16={}", i32::from(!self.wide)),
            "VEC=8".into(),
            format!("STAGES={}", self.stages()),
        ];
        defines.extend(Pass::ALL.map(|pass| format!("{}={}", pass.define(), self.shared(pass))));
        defines
    }
}

/// All variants, for compilation checks.
pub(in crate::ops) fn variants() -> Vec<(Source, Vec<String>)> {
    let shapes = [(64, false), (128, false), (64, true), (128, true)];
    let of = |(head_dim, wide)| {
        let defines = PathShape::new(head_dim, wide).defines();
        [PREPARE, WALK, BACKWARD].map(|source| (source, defines.clone()))
    };
    shapes.into_iter().flat_map(of).collect()
}

/// The kernels over spans, which GPUs with wgmma use in bf16.
pub(in crate::ops) fn span_variants(generation: Generation) -> Vec<(Source, Vec<String>)> {
    let of = |head_dim| {
        let defines = PathShape::new(head_dim, false).defines();
        [OLDER, SPANS].map(|source| (source, defines.clone()))
    };
    let head_dims = [64, 128].into_iter().filter(|_| generation.has_wgmma());
    head_dims.flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::attention::tiles::HOPPER_SHARED;
    use super::*;

    #[test]
    fn tiles_fit_shared_memory() {
        for (head_dim, wide) in [(8, false), (128, false), (64, true), (128, true)] {
            for pass in Pass::ALL {
                let shared = PathShape::new(head_dim, wide).shared(pass);
                assert!(shared <= HOPPER_SHARED, "{pass:?} of {head_dim}: {shared}");
            }
        }
    }
}
