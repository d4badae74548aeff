//! Decoding one token per sequence while the sequence state stays on the device, in slots: an optional ability.
//!
//! A sequence enters a slot after its prefill. Its KV cache pages stay where they are; the device keeps the rest of the
//! state in arrays indexed by slot: sums of the log forget gates, and the raw key and value rows that the token shift
//! reads. A step feeds one token to each of some slots. The host acts on a sequence only at page boundaries: it reserves
//! the next page and evicts forgotten ones.
//!
//! Two steps may be unfinished at a time: the second one starts from the tokens that the first one samples, so the device
//! does not wait for the host between them.
//!
//! Steps are batch-invariant: the bits of a row depend neither on the other rows of the step nor on its position among
//! them. They do not depend on when a page is evicted either, because attention skips pages by the eviction rule.

mod check;
mod naive;
mod sampling;
mod weights;

use std::any::Any;
use std::fmt;

pub use check::{check_enter_slot, check_open_slots, check_slot_rows, check_update_slot_pages};
pub use sampling::{SampledToken, TokenDraw};
pub use weights::{
    AttentionShape, DecodeAttention, DecodeBlock, DecodeMixer, DecodeMlp, DecodeProjection,
    DecodeWeights,
};

use crate::{Device, Error, PagedKeys, Result, Tensor};

/// Decode steps over slots; see [`Caps`](crate::Caps). `state` is what [`SlotDecodeOps::open_slots`] has returned;
/// [`SlotDecoder`] keeps both together.
///
/// An implementation keeps the memory alive that its slots refer to: callers may drop pages at any time.
pub trait SlotDecodeOps {
    /// Prepares steps of a model; `None` if the device does not support it.
    fn open_slots(&self, weights: &DecodeWeights) -> Result<Option<Box<dyn Any + Send>>>;

    /// Puts a sequence of `len` tokens into a slot: see [`SlotDecoder::enter`].
    fn enter_slot(
        &self,
        state: &mut dyn Any,
        slot: usize,
        len: usize,
        past: &mut [LayerPast<'_>],
    ) -> Result<()>;

    /// Takes over the changed pages of a slot: see [`SlotDecoder::update_pages`].
    fn update_slot_pages(
        &self,
        state: &mut dyn Any,
        slot: usize,
        pages: &mut [&mut dyn PagedKeys],
    ) -> Result<()>;

    /// Starts a step without waiting for it: see [`SlotDecoder::begin`].
    fn begin_slot_step(&self, state: &mut dyn Any, rows: &[DecodeRow]) -> Result<()>;

    /// Waits for the oldest unfinished step.
    fn finish_slot_step(&self, state: &mut dyn Any) -> Result<FinishedStep>;

    /// Logits `[V]` of a row of the step that was begun last.
    fn slot_logits(&self, state: &mut dyn Any, row: usize) -> Result<Vec<f32>>;

    /// The matrix product of the steps, `x[R, K] w[N, K]^T` in f32, batch-invariant; `None` for unsupported shapes.
    fn batch_invariant_linear(&self, x: &Tensor, w: &Tensor) -> Result<Option<Tensor>>;
}

/// The state of one layer of a sequence that enters a slot.
#[derive(Debug)]
pub struct LayerPast<'a> {
    /// KV cache pages, with unshared room for one more key.
    pub pages: &'a mut dyn PagedKeys,
    /// The last raw key projection `[1, H_kv * d]`, with a token shift of keys.
    pub last_k: Option<&'a Tensor>,
    /// The last raw value projection `[1, H_kv * d]`, with a token shift of values.
    pub last_v: Option<&'a Tensor>,
    /// Sums of the log gates `[H]`; empty without forget gates.
    pub gate_sums: &'a [f64],
}

/// A row of a decode step: the next token of a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeRow {
    /// The slot.
    pub slot: usize,
    /// The token.
    pub token: RowToken,
    /// Tokens that the slot has seen before this one.
    pub position: usize,
    /// How the next token is sampled; greedy if absent, with the lowest id among equals.
    pub draw: Option<TokenDraw>,
}

/// The token of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowToken {
    /// This one.
    Id(i32),
    /// The token that this row of the step begun before has sampled; token 0 where none could be sampled.
    Sampled(usize),
}

/// The results of a decode step.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedStep {
    /// The next token of each row.
    pub tokens: Vec<SampledToken>,
    /// Rows whose token was the last one of a page, with the sums of the log gates of their slots up to it `[layers][H]`,
    /// empty without forget gates.
    pub page_ends: Vec<(usize, Vec<f64>)>,
}

/// Most steps that may be unfinished at a time.
pub const MAX_UNFINISHED_STEPS: usize = 2;

/// The slots of a model on its device.
pub struct SlotDecoder {
    device: Device,
    state: Box<dyn Any + Send>,
    slots: usize,
}

impl SlotDecoder {
    /// Opens the slots of a model; `None` if the device does not support it.
    pub fn open(weights: &DecodeWeights, device: &Device) -> Result<Option<SlotDecoder>> {
        let Some(ops) = device.backend().caps().slots else { return Ok(None) };
        let (device, slots) = (device.clone(), weights.slots);
        Ok(ops.open_slots(weights)?.map(|state| SlotDecoder { device, state, slots }))
    }

    /// Number of slots, which is also the largest number of rows of a step.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Puts a sequence of `len` tokens into a slot, in place of the one before; `past` is the state of each layer.
    /// The device keeps the pages' memory alive; their contents must change through steps of this slot alone.
    pub fn enter(&mut self, slot: usize, len: usize, past: &mut [LayerPast<'_>]) -> Result<()> {
        let (ops, state) = self.ops()?;
        ops.enter_slot(state, slot, len, past)
    }

    /// Takes over the pages of a slot, one list per layer, after pages were reserved or evicted.
    pub fn update_pages(&mut self, slot: usize, pages: &mut [&mut dyn PagedKeys]) -> Result<()> {
        let (ops, state) = self.ops()?;
        ops.update_slot_pages(state, slot, pages)
    }

    /// Starts a step with at most one row per slot, without waiting for it.
    ///
    /// # Errors
    /// [`MAX_UNFINISHED_STEPS`] are unfinished; a row that does not fit its slot; the device's.
    pub fn begin(&mut self, rows: &[DecodeRow]) -> Result<()> {
        let (ops, state) = self.ops()?;
        ops.begin_slot_step(state, rows)
    }

    /// Waits for the oldest unfinished step.
    ///
    /// # Errors
    /// There is none; the device's.
    pub fn finish(&mut self) -> Result<FinishedStep> {
        let (ops, state) = self.ops()?;
        ops.finish_slot_step(state)
    }

    /// Logits `[V]` of a row of the step that was begun last.
    pub fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let (ops, state) = self.ops()?;
        ops.slot_logits(state, row)
    }

    fn ops(&mut self) -> Result<(&dyn SlotDecodeOps, &mut dyn Any)> {
        match self.device.backend().caps().slots {
            Some(ops) => Ok((ops, &mut *self.state)),
            None => Err(Error::unsupported(self.device.backend().name(), "decoding in slots")),
        }
    }
}

impl fmt::Debug for SlotDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotDecoder").field("slots", &self.slots).finish_non_exhaustive()
    }
}

/// Downcasts the state of [`SlotDecodeOps::open_slots`] to the backend's type.
pub fn slot_state<T: Any>(state: &mut dyn Any) -> Result<&mut T> {
    let foreign = || Error::argument("slots", "the slots were opened by another device");
    state.downcast_mut().ok_or_else(foreign)
}
