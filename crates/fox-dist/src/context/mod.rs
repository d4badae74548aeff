//! One sequence over several ranks (context parallelism).
//!
//! Every rank of a [`Context`] holds a range of the columns of a batch. Ops that look back get what they need from the
//! ranks before, through [`PrecedingRows`], so that a model computes with part of its sequences as if it had all of them:
//!
//! - the token shift and the short convolution need the rows before the first one (`last_rows.rs`);
//! - recurrent mixers need the state after the rows of the rank before (`recurrence.rs`);
//! - forgetting attention needs the earlier keys that the first query has not forgotten (`keys.rs`). The sums of the log
//!   gates run from rank to rank; each rank then sends the others the sums at the ends of its blocks of keys
//!   (`gate_sums.rs`). From these all of them know, without asking, who needs which keys (`key_plan.rs`), and send them
//!   (`fetch.rs`).
//!
//! Tensors travel from device to device, beside other work, where the group has connected the devices ([`Group::connect`]),
//! and through the host otherwise (`transfer.rs`). Sums of gates at the ends of blocks always travel through the host: it
//! needs them for the sizes of all other messages.
//!
//! Gradients return to the rank that the values came from, and are added there in the order of the ranks.
//!
//! The outputs have the bits of a single rank on the CPU: sums of gates and states are those of a single rank, blocks of
//! keys have the same borders, and keys that do not travel have a weight of 0 in f32, or would be pruned. This holds for
//! parts of whole blocks and of more than 64 rows, below which matrix products take another path; with pruning, for
//! sequences that begin with a row of the batch; and with recurrent mixers, for sequences whose parts begin at a multiple
//! of 64 tokens.

mod fetch;
mod gate_sums;
mod key_plan;
mod keys;
mod last_rows;
mod recurrence;
mod split;
mod transfer;

use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::{
    ConvSpec, LocalKeys, PendingKeys, PrecedingRows, ScanSpec, ScanVars, Segments, Tape, Var,
};

pub use split::SequenceSplit;

use crate::group::Collective;
use crate::{Error, Group, Result};

/// The ranks that hold the parts of the same sequences: this one and its neighbours. A group of `data * size` ranks has
/// `data` such contexts of `size` successive ranks each.
#[derive(Clone, Debug)]
pub struct Context {
    group: Arc<Group>,
    first: usize,
    size: usize,
    through_host: bool,
}

impl Context {
    /// The context of this rank, when every `size` ranks of a group share their sequences.
    ///
    /// # Errors
    /// A size that does not divide the number of ranks.
    pub fn new(group: &Arc<Group>, size: usize) -> Result<Context> {
        if size == 0 || !group.size().is_multiple_of(size) {
            return Err(Error::Refused(format!(
                "{} ranks cannot share sequences {size} by {size}; start a multiple of {size} ranks",
                group.size()
            )));
        }
        let first = group.rank() / size * size;
        Ok(Context { group: group.clone(), first, size, through_host: false })
    }

    /// The same context, whose tensors pass through the host even where devices are connected.
    #[must_use]
    pub fn through_host(self) -> Context {
        Context { through_host: true, ..self }
    }

    fn on_devices(&self) -> bool {
        self.group.is_connected() && !self.through_host
    }

    /// Ranks that share a sequence.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Which part of the sequences is here.
    pub fn index(&self) -> usize {
        self.group.rank() - self.first
    }

    /// Number of this context in the group.
    pub fn number(&self) -> usize {
        self.first / self.size
    }

    fn step<T>(&self, work: impl FnOnce(&mut ContextLinks<'_, '_>) -> Result<T>) -> Result<T> {
        self.group.collective(|step| work(&mut ContextLinks { step, first: self.first }))
    }

    /// What each rank of the context gives, in order.
    fn gather(&self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        self.step(|ranks| {
            let others = (0..self.size).filter(|&r| r != self.index());
            others.for_each(|r| ranks.send(r, own));
            (0..self.size)
                .map(|r| if r == self.index() { Ok(own.to_vec()) } else { ranks.receive(r) })
                .collect()
        })
    }
}

/// The links to the ranks of a context during one collective, by their index in it.
struct ContextLinks<'s, 'g> {
    step: &'s mut Collective<'g>,
    first: usize,
}

impl ContextLinks<'_, '_> {
    fn send<T: bytemuck::NoUninit>(&self, to: usize, values: &[T]) {
        self.step.send(self.first + to, bytemuck::cast_slice(values));
    }

    fn receive<T: bytemuck::AnyBitPattern>(&mut self, from: usize) -> Result<Vec<T>> {
        let bytes = self.step.receive(self.first + from)?;
        Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// Bytes of earlier keys, values and gates that a rank received for one layer, and those of a full exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Received.
    pub fetched: u64,
    /// Of a full exchange.
    pub full: u64,
}

/// The part of some sequences that is here, for one pass over a tape.
#[derive(Clone)]
pub struct SequenceShard(Arc<Inner>);

struct Inner {
    context: Context,
    split: SequenceSplit,
    traffic: Mutex<Vec<Traffic>>,
    failure: Mutex<Option<Error>>,
}

impl SequenceShard {
    /// The part that rank [`Context::index`] has of these sequences.
    pub fn new(context: &Context, split: SequenceSplit) -> SequenceShard {
        let (traffic, failure) = (Mutex::default(), Mutex::default());
        SequenceShard(Arc::new(Inner { context: context.clone(), split, traffic, failure }))
    }

    /// The rows that are here as segments: their queries are the rows, their keys all up to the last of these.
    pub fn segments(&self) -> fox_tensor::Result<Segments> {
        self.0.split.segments(self.0.context.index())
    }

    /// A tape that finds the beginnings of its sequences with the other ranks.
    pub fn tape<'m>(&self, tape: Tape<'m>) -> Tape<'m> {
        tape.with_preceding_rows(Arc::new(self.clone()))
    }

    /// What was received for each attention layer, in the order of the calls.
    pub fn traffic(&self) -> Vec<Traffic> {
        self.0.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why an op failed, if it was for another rank.
    pub fn failure(&self) -> Option<Error> {
        self.0.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn note_traffic(&self, traffic: Traffic) {
        self.0.traffic.lock().unwrap_or_else(PoisonError::into_inner).push(traffic);
    }

    /// An op can only report errors of the engine: keeps the real one for [`SequenceShard::failure`].
    fn record_failure<T>(&self, result: Result<T>) -> fox_tensor::Result<T> {
        result.map_err(|error| match error {
            Error::Tensor(error) => error,
            error => {
                let outside = fox_tensor::Error::Argument {
                    op: "sequence over several processes",
                    detail: error.to_string(),
                };
                *self.0.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                outside
            }
        })
    }
}

impl PrecedingRows for SequenceShard {
    fn preceding_rows(&self, tape: &mut Tape<'_>, u: &[&Var]) -> fox_tensor::Result<Vec<Var>> {
        tape.custom(last_rows::RowBefore(self.clone()), u)
    }

    fn begin_keys(
        &self,
        tape: &mut Tape<'_>,
        own: &LocalKeys<'_>,
    ) -> fox_tensor::Result<PendingKeys> {
        keys::begin_keys(self, tape, own)
    }

    fn scan(
        &self,
        tape: &mut Tape<'_>,
        vars: &ScanVars<'_>,
        spec: &ScanSpec,
    ) -> fox_tensor::Result<Var> {
        recurrence::scan(self, tape, vars, spec)
    }

    fn short_conv(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        spec: &ConvSpec,
    ) -> fox_tensor::Result<Var> {
        recurrence::short_conv(self, tape, x, weight, bias, spec)
    }
}
