//! Decode steps of many sequences whose state stays on the device: an optional ability.
//!
//! A sequence whose prompt is read takes a slot. Its pages stay where they are and belong to whoever made them; the
//! device keeps the rest of its state in arrays by slot: sums of the log gates, and the raw rows that the token shift
//! needs. A step feeds one token to each of some slots. What the host has to do for a sequence happens at the ends of
//! pages alone: make room for the next page, and drop what is forgotten.
//!
//! A row's result has the same bits whatever other rows are in the step, and wherever it stands among them. It does
//! not depend on when a page is dropped either: attention skips a page by the rule by which pages are dropped.

mod naive;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::{DecodeBlock, DecodeShape, Device, Error, PagedKeys, Result, Tensor};

/// Decode steps over slots; see [`Caps`](crate::Caps). The state is what [`StreamOps::open_streams`] has made;
/// [`Streams`] keeps both together.
pub trait StreamOps {
    /// Prepares everything for steps of this model; `None` where the device has no such way for it.
    fn open_streams(&self, model: &StreamModel<'_>) -> Result<Option<Box<dyn Any + Send>>>;

    /// A sequence of `len` tokens takes a slot: see [`Streams::enter`].
    fn enter_stream(
        &self,
        state: &mut dyn Any,
        slot: usize,
        len: usize,
        past: &mut [StreamPast<'_>],
    ) -> Result<()>;

    /// The pages of a slot have changed: see [`Streams::extend`].
    fn extend_stream(
        &self,
        state: &mut dyn Any,
        slot: usize,
        keys: &mut [&mut dyn PagedKeys],
    ) -> Result<()>;

    /// Begins a step.
    fn begin_stream_step(&self, state: &mut dyn Any, rows: &[StreamRow]) -> Result<()>;

    /// Ends it.
    fn finish_stream_step(&self, state: &mut dyn Any) -> Result<Vec<Choice>>;

    /// Logits `[V]` of a row of the last step.
    fn stream_logits(&self, state: &mut dyn Any, row: usize) -> Result<Vec<f32>>;

    /// Sums of the log gates of a slot `[layers][H]`; empty where nothing is forgotten.
    fn stream_sums(&self, state: &mut dyn Any, slot: usize) -> Result<Vec<f64>>;

    /// `x[R, K] w[N, K]^T` in f32 as steps compute it, each row with the same bits in any company; `None` for shapes
    /// that steps do not have.
    fn rows_product(&self, x: &Tensor, w: &Tensor) -> Result<Option<Tensor>>;
}

/// A FoX model whose sequences live in slots. `D` is its width.
#[derive(Debug)]
pub struct StreamModel<'a> {
    /// Sequences at a time.
    pub slots: usize,
    /// Tokens of a sequence, at most.
    pub max_context: usize,
    /// What the blocks have in common.
    pub shape: DecodeShape,
    /// `[V, D]`.
    pub embeddings: &'a Tensor,
    /// The blocks, in order, without sequences.
    pub blocks: Vec<DecodeBlock<'a>>,
    /// Per block and query head, the decay below which a page is skipped; `None` where none is.
    pub thresholds: Vec<Option<Arc<[f64]>>>,
    /// Weights of the norm after the last block `[D]`.
    pub norm: &'a Tensor,
    /// The output projection `[V, D]`.
    pub head: &'a Tensor,
}

/// What a layer remembers of a sequence.
#[derive(Debug)]
pub struct StreamPast<'a> {
    /// Its pages, with room for one more key that nobody shares.
    pub keys: &'a mut dyn PagedKeys,
    /// The last raw key projection `[1, H_kv * d]`.
    pub last_k: Option<&'a Tensor>,
    /// The last raw value projection `[1, H_kv * d]`.
    pub last_v: Option<&'a Tensor>,
    /// Sums of the log gates `[H]`; empty where nothing is forgotten.
    pub sums: &'a [f64],
}

/// A token for a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamRow {
    /// The slot.
    pub slot: usize,
    /// The token.
    pub token: i32,
    /// Tokens that the slot has seen.
    pub position: usize,
    /// How the next one is drawn; without it, the likeliest is taken, the lowest id among equals.
    pub draw: Option<StreamDraw>,
}

/// How a token is drawn. In descending order of weight, the lowest id first among equals, every filter keeps a
/// beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamDraw {
    /// Above 0.
    pub temperature: f32,
    /// So many of the likeliest; 0 for all.
    pub top_k: usize,
    /// The likeliest until they have this share of what is left by then; 1 for all.
    pub top_p: f32,
    /// Those with at least this share of the likeliest one's weight.
    pub min_p: f32,
    /// A number from 0 to 1: where it lies in the sum of the weights that are left, by id, is the token.
    pub uniform: f64,
}

/// The token that was chosen for a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Its id; `None` when a logit is NaN or all are minus infinity.
    pub id: Option<i32>,
    /// Its log-probability, before temperature and filters.
    pub logprob: f32,
}

/// The slots of a model on its device.
pub struct Streams {
    device: Device,
    state: Box<dyn Any + Send>,
    slots: usize,
}

impl Streams {
    /// Opens slots; `None` where the device has no such way for the model.
    pub fn open(model: &StreamModel<'_>, device: &Device) -> Result<Option<Streams>> {
        let Some(ops) = device.backend().caps().streams else { return Ok(None) };
        let (device, slots) = (device.clone(), model.slots);
        Ok(ops.open_streams(model)?.map(|state| Streams { device, state, slots }))
    }

    /// Sequences at a time, which are also the rows that a step has at most.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// A sequence of `len` tokens takes a slot; `past` has what each layer remembers of it. Its pages must live and
    /// stay as they are until another sequence takes the slot, but for what [`Streams::extend`] tells.
    pub fn enter(&mut self, slot: usize, len: usize, past: &mut [StreamPast<'_>]) -> Result<()> {
        self.check_slot("enter", slot)?;
        let (ops, state) = self.parts()?;
        ops.enter_stream(state, slot, len, past)
    }

    /// The pages of a slot have changed: one was added to each head, or some were dropped.
    pub fn extend(&mut self, slot: usize, keys: &mut [&mut dyn PagedKeys]) -> Result<()> {
        self.check_slot("extend", slot)?;
        let (ops, state) = self.parts()?;
        ops.extend_stream(state, slot, keys)
    }

    /// Begins a step of these rows, of which each slot has at most one. The host may do something else meanwhile.
    pub fn begin(&mut self, rows: &[StreamRow]) -> Result<()> {
        for row in rows {
            self.check_slot("step", row.slot)?;
        }
        if rows.len() > self.slots {
            let detail = format!("{} rows, but there are {} slots", rows.len(), self.slots);
            return Err(Error::argument("step", detail));
        }
        let (ops, state) = self.parts()?;
        ops.begin_stream_step(state, rows)
    }

    /// The next token of each row of the step that was begun.
    pub fn finish(&mut self) -> Result<Vec<Choice>> {
        let (ops, state) = self.parts()?;
        ops.finish_stream_step(state)
    }

    /// Logits `[V]` of a row of the last step.
    pub fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let (ops, state) = self.parts()?;
        ops.stream_logits(state, row)
    }

    /// Sums of the log gates of a slot, after the last step `[layers][H]`; empty where nothing is forgotten.
    pub fn sums(&mut self, slot: usize) -> Result<Vec<f64>> {
        self.check_slot("sums", slot)?;
        let (ops, state) = self.parts()?;
        ops.stream_sums(state, slot)
    }

    fn parts(&mut self) -> Result<(&dyn StreamOps, &mut dyn Any)> {
        match self.device.backend().caps().streams {
            Some(ops) => Ok((ops, &mut *self.state)),
            None => Err(Error::unsupported(self.device.backend().name(), "sequences in slots")),
        }
    }

    fn check_slot(&self, op: &'static str, slot: usize) -> Result<()> {
        match slot < self.slots {
            true => Ok(()),
            false => Err(Error::argument(op, format!("slot {slot}, but there are {}", self.slots))),
        }
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("slots", &self.slots).finish_non_exhaustive()
    }
}

/// What a backend has made, in its own type.
pub fn stream_state<T: Any>(state: &mut dyn Any) -> Result<&mut T> {
    let other = || Error::argument("streams", "slots of another device");
    state.downcast_mut().ok_or_else(other)
}
