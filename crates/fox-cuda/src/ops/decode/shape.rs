//! What a decode step is: sizes, as the kernel takes them, and how much of it fits in shared memory.

use fox_tensor::{DecodeKeys, DecodeShape, DecodeStep, Tensor};
use half::bf16;

use super::tables::Layer;
use crate::ops::linear::thin::MAX_BATCH;
use crate::ops::pieces::activation_code;
use crate::params::{ConstPtr, Float2, Param, Ptr, kernel_params};

// As in decode.cuh.
pub(crate) const WARPS: usize = 8;
pub(crate) const THREADS: usize = 32 * WARPS;
const TURN: usize = 32 * WARPS;
const ROWS: usize = 8;
pub(crate) const PARTS: usize = 7;
pub(crate) const MAX_GROUP: usize = 8;
/// Bytes on their way to a multiprocessor that keep the memory busy.
const IN_FLIGHT: usize = 64 << 10;

kernel_params! {
    /// One kind of product: `w [rows, width]` (all parts together for the projections, pairs of rows for
    /// gate and up).
    #[derive(Default)]
    pub(super) struct Stage {
        pub(super) rows: usize,
        pub(super) width: usize,
        pub(super) tiles: usize,
        /// Slots of a tile.
        pub(super) slots: usize,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct Params {
        /// `[layer_count]`.
        pub(super) layers: ConstPtr<Layer>,
        /// The embedded tokens `[batch, D]`.
        pub(super) input: ConstPtr<bf16>,
        /// What thread blocks exchange `[layer_count][layer_words]`.
        pub(super) exchange: Ptr<u64>,
        /// Sum of p v, then maximum, sum of p and decay `[batch][heads][splits][d + 4]`.
        pub(super) partial: Ptr<u64>,
        /// After the last layer `[D]`.
        pub(super) norm: ConstPtr<f32>,
        /// `[V, D]`.
        pub(super) head: ConstPtr<bf16>,
        /// `[batch, V]`.
        pub(super) logits: Ptr<f32>,
        /// `[positions][d / 2]`, or null.
        pub(super) rope: ConstPtr<Float2>,
        pub(super) epoch: i32,
        pub(super) layer_count: usize,
        pub(super) batch: usize,
        pub(super) width: usize,
        pub(super) heads: usize,
        pub(super) kv_heads: usize,
        pub(super) splits: usize,
        pub(super) window: usize,
        pub(super) q_shared: bool,
        pub(super) k_shared: bool,
        pub(super) output_act: i32,
        pub(super) mlp_act: i32,
        pub(super) scale: f32,
        pub(super) norm_eps: f32,
        pub(super) qk_eps: f32,
        /// Whether anything is forgotten.
        pub(super) gated: bool,
        /// Of all stages.
        pub(super) most_slots: usize,
        /// Words that a layer exchanges, and where those of each kind begin.
        pub(super) layer_words: usize,
        pub(super) exchange_start: [usize; 5],
        pub(super) stages: [Stage; 5],
        pub(super) part_rows: [usize; PARTS],
        pub(super) part_tiles: [usize; PARTS],
        pub(super) raw_start: [usize; PARTS],
        pub(super) k_start: [usize; MAX_BATCH],
        pub(super) k_len: [usize; MAX_BATCH],
    }
}

/// Keys that a thread block takes at once; the kernels' `SPLIT`.
fn split(head_dim: usize) -> usize {
    8 * THREADS / (head_dim / 8)
}

/// What the kernel is compiled for, and the shared memory that it then needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Build {
    head_dim: usize,
    /// Sequences, at most.
    batch: usize,
    /// Columns of a slot of the ring, by `TURN`.
    turns: usize,
    slots: usize,
    pub(crate) shared: usize,
}

impl Build {
    /// For a model of such a width whose widest product has rows of `widest`, with as many slots as fit into
    /// `limit` bytes beside the rest.
    pub(crate) fn new(
        (width, widest): (usize, usize),
        layers: usize,
        head_dim: usize,
        batch: usize,
        limit: usize,
    ) -> Option<Self> {
        let turns = width.div_ceil(TURN);
        // Slots of up to 2048 columns that are filled well; few kinds of batches, few compilations.
        let turns = turns.div_ceil(turns.div_ceil(8));
        let build = Build { head_dim, batch: batch.next_power_of_two(), turns, ..Build::default() };
        let inputs = build.input_bytes(width) + build.input_bytes(widest);
        let fixed = scratch_bytes(head_dim)
            + 4 * width
            + inputs
            + layers * size_of::<<Layer as Param>::Device>();
        let slots = (limit.checked_sub(fixed)? / build.slot_bytes()).min(32);
        let shared = fixed + slots * build.slot_bytes();
        (slots >= 3).then_some(Build { slots, shared, ..build })
    }

    fn slot_bytes(self) -> usize {
        // With two barriers.
        ROWS * 2 * (self.turns * TURN + 32) + 16
    }

    /// Slots that a row of this width takes.
    fn slots_of(self, width: usize) -> usize {
        width.div_ceil(self.turns * TURN)
    }

    /// Bytes of the input of a product.
    fn input_bytes(self, width: usize) -> usize {
        self.slots_of(width) * self.turns * TURN * 2 * self.batch
    }

    pub(crate) fn defines(self) -> Vec<String> {
        let in_flight = (IN_FLIGHT / self.slot_bytes()).clamp(2, self.slots - 1);
        vec![
            format!("HEAD_DIM={}", self.head_dim),
            format!("BATCH={}", self.batch),
            format!("SLOT_TURNS={}", self.turns),
            format!("RING={}", self.slots),
            format!("IN_FLIGHT={in_flight}"),
            format!("SCRATCH={}", scratch_bytes(self.head_dim)),
        ]
    }
}

/// Typical builds, for compilation checks.
pub(super) fn typical() -> impl Iterator<Item = Build> {
    let hopper = 227 << 10;
    let builds = [
        Build::new((1536, 4096), 24, 64, 1, hopper),
        Build::new((1024, 2816), 24, 128, 8, hopper),
        Build::new((1280, 3584), 12, 256, 2, hopper),
    ];
    builds.into_iter().flatten()
}

/// Bytes of the kernels' `Scratch`.
fn scratch_bytes(head_dim: usize) -> usize {
    let sums = 4 * (WARPS * THREADS + WARPS * MAX_BATCH);
    let attention = 4 * ((MAX_GROUP + 2 + WARPS) * head_dim + MAX_GROUP + THREADS + 3 * WARPS);
    sums.max(attention).next_multiple_of(128)
}

/// Everything but addresses.
pub(crate) fn shape_params(step: &DecodeStep<'_>, build: Build) -> Params {
    let DecodeShape { heads, kv_heads, head_dim, .. } = step.shape;
    let (batch, width) = (step.h.rows(), step.h.cols());
    let mut params = Params::default();
    let segments = step.segments.as_slice();
    for (b, s) in segments.iter().enumerate() {
        (params.k_start[b], params.k_len[b]) = (s.k_start, s.k_len);
    }
    let Some(block) = step.blocks.first() else { return params };
    let rows = |w: Option<&Tensor>| w.map_or(0, Tensor::rows);
    let parts = [
        block.q.weight.rows(),
        block.k.weight.rows(),
        block.v.weight.rows(),
        rows(block.k.shift),
        rows(block.v.shift),
        rows(block.gate.map(|(w, _)| w)),
        rows(block.output_gate),
    ];
    let (mut start, mut tiles) = (0, 0);
    for (part, &rows) in parts.iter().enumerate() {
        params.part_rows[part] = rows;
        params.part_tiles[part] = rows.div_ceil(ROWS);
        params.raw_start[part] = start;
        (start, tiles) = (start + batch * rows, tiles + rows.div_ceil(ROWS));
    }
    let inner = block.down.cols();
    // Pairs of everything but the projections.
    let kinds = [
        start,
        batch * heads * head_dim / 2,
        batch * width / 2,
        batch * inner / 2,
        batch * width / 2,
    ];
    for (kind, words) in kinds.iter().enumerate() {
        params.exchange_start[kind] = params.layer_words;
        // Two words are read at once.
        params.layer_words += words.next_multiple_of(2);
    }
    let stage = |rows: usize, width: usize, per_tile: usize| Stage {
        rows,
        width,
        tiles: rows.div_ceil(per_tile),
        slots: build.slots_of(width),
    };
    params.stages = [
        Stage { tiles, ..stage(parts.iter().sum(), width, ROWS) },
        stage(width, heads * head_dim, ROWS),
        stage(inner, width, ROWS / 2),
        stage(width, inner, ROWS),
        stage(step.head.rows(), width, ROWS),
    ];
    let shared = |w: Option<&Tensor>| w.is_some_and(|w| w.len() == head_dim);
    let longest = segments.iter().map(|s| s.k_len).max().unwrap_or(0);
    Params {
        layer_count: step.blocks.len(),
        batch,
        width,
        heads,
        kv_heads,
        splits: most_keys(step).div_ceil(split(head_dim)).max(1),
        // A window that is longer than all keys hides as little as one of their length.
        window: step.shape.window.map_or(0, |window| window.min(longest)),
        q_shared: shared(block.q.norm),
        k_shared: shared(block.k.norm),
        output_act: activation_code(step.shape.output_act),
        mlp_act: activation_code(step.shape.mlp_act),
        scale: 1.0 / (head_dim as f32).sqrt(),
        norm_eps: step.shape.norm_eps,
        qk_eps: step.shape.qk_eps,
        gated: block.gate.is_some(),
        most_slots: params.stages.iter().map(|stage| stage.slots).max().unwrap_or(0),
        ..params
    }
}

/// Keys that are held of the longest sequence.
fn most_keys(step: &DecodeStep<'_>) -> usize {
    let segments = step.segments.as_slice();
    let held = |keys: &DecodeKeys<'_>| match keys {
        DecodeKeys::Rows { .. } => segments.iter().map(|s| s.k_len).max(),
        DecodeKeys::Pages(sequences) => {
            let held =
                segments.iter().zip(sequences).map(|(s, keys)| s.k_len - keys.first_of_all());
            held.max()
        }
    };
    step.blocks.iter().filter_map(|block| held(&block.keys)).max().unwrap_or(1)
}
