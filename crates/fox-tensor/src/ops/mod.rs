//! The ops, one file each, or one folder for a large op, in this order:
//!
//! - `mod.rs`: operands, options and results with their shapes, the trait that a device implements, and the validation
//!   of its operands (`check_<method>`);
//! - `tape.rs`: the op on the tape: run and record;
//! - `naive.rs`: the f64 oracle;
//! - `cases.rs`: the inputs on which every device is compared with the oracle.
//!
//! A new op is such a file and two lines below. Names must be unique among the ops, because the crate root exports them
//! all.
//!
//! [`peers`], [`recompute`], [`paged`] and [`decode`] declare optional abilities of a device; see [`Caps`](crate::Caps).

pub(crate) mod attention;
mod channel_decay;
mod columns;
mod conv;
mod decode;
mod dropout;
mod embedding;
mod gate;
mod gated_norm;
mod glu;
mod heads;
mod hgrn;
mod linear;
mod loss;
mod norm;
mod orthogonalize;
pub(crate) mod paged;
pub(crate) mod path;
mod peers;
mod recompute;
mod reflection;
pub(crate) mod scan;
mod sink;
pub(crate) mod stick;
mod time_step;
mod update;
pub(crate) mod wall;

pub use decode::{
    AttentionShape, DecodeAttention, DecodeBlock, DecodeMixer, DecodeMlp, DecodeProjection,
    DecodeRow, DecodeWeights, FinishedStep, LayerPast, MAX_UNFINISHED_STEPS, RowToken,
    SampledToken, SlotDecodeOps, SlotDecoder, TokenDraw, check_enter_slot, check_open_slots,
    check_slot_rows, check_update_slot_pages, slot_state,
};
pub use paged::{
    NewKeys, PAGE, Page, PageMut, PagePart, PageShape, PageTable, PagedKeys, PagedOps, PagedSpec,
    Slab, check_copy_page, check_gate_totals, check_paged_attention, check_write_pages,
    copy_to_pages, gate_totals, gathered_attention, held_pages, host_gate_totals, page_parts,
    write_pages,
};
pub use peers::{
    OwnedTensor, PeerOps, RankInfo, check_collective, check_exchange, check_join_peers,
};
pub use recompute::RecomputeOps;

use crate::cases::Case;

/// Lists every op once: its module and its trait.
macro_rules! ops {
    ($($op:ident: $ops:ident,)*) => {
        $(pub use $op::*;)*

        /// Every op that a device must have; implemented for each type that implements all op traits.
        pub trait Ops: $($ops +)* {}
        impl<T: $($ops +)* ?Sized> Ops for T {}

        /// The cases of every op.
        pub(crate) fn cases() -> Vec<Case> {
            let mut cases = Vec::new();
            $(cases.extend($op::cases());)*
            cases
        }
    };
}

ops! {
    linear: LinearOps,
    embedding: EmbeddingOps,
    dropout: DropoutOps,
    norm: NormOps,
    heads: HeadOps,
    gate: GateOps,
    attention: AttentionOps,
    sink: SinkOps,
    stick: StickOps,
    gated_norm: GatedNormOps,
    glu: GluOps,
    loss: LossOps,
    update: UpdateOps,
    orthogonalize: MatrixOps,
    columns: ColumnOps,
    conv: ConvOps,
    scan: ScanOps,
    time_step: TimeStepOps,
    hgrn: HgrnOps,
    channel_decay: ChannelDecayOps,
    reflection: ReflectionOps,
    path: PathOps,
    wall: WallOps,
}
