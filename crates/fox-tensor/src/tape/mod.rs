//! The tape: runs ops, saves what their backward passes need, and runs these in reverse.
//!
//! ```text
//! let mut tape = Tape::recording(&device);
//! let h = tape.embedding(&table, &ids, None)?;      // ops take and give `Var`s
//! ...
//! let loss = tape.linear_cross_entropy(&x, &head, &labels, &weights)?;
//! tape.backward(&mut gradients)?;                   // adds to the parameters' gradients
//! ```
//!
//! A tape that does not record is inference: the same model code without saved activations.
//! [`Tape::checkpoint`] is activation checkpointing: a block's activations are dropped after the forward pass
//! and recomputed in the backward pass.

mod buckets;
mod custom;
mod preceding;
mod saved;

pub use buckets::BucketSink;
pub use custom::CustomOp;
pub use preceding::{ExtendedKeys, LocalKeys, PendingKeys, PrecedingRows};

use std::sync::Arc;

use crate::{DType, Device, Result, Shape, Tensor};
use buckets::Buckets;
use saved::Deferred;
pub(crate) use saved::Saved;

/// Index of a parameter in the model's list, and of its gradient in [`Gradients`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// Destination of a value's gradient. Steps keep the slots, not the values, of operands that only receive gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// None: a constant, or a tape that does not record.
    None,
    /// The parameter's entry in [`Gradients`].
    Param(ParamId),
    /// An entry of the tape.
    Inner(usize),
}

/// A value on the tape.
#[derive(Clone, Debug)]
pub struct Var {
    pub(crate) value: Tensor,
    pub(crate) slot: Slot,
    /// Recomputation of the value for the backward pass, when it is not saved.
    pub(crate) again: Option<Saved>,
}

impl Var {
    /// A value that needs no gradient.
    pub fn constant(value: Tensor) -> Self {
        Var { value, slot: Slot::None, again: None }
    }

    /// A parameter; its gradient goes to entry `id` of [`Gradients`].
    pub fn param(id: ParamId, value: Tensor) -> Self {
        Var { value, slot: Slot::Param(id), again: None }
    }

    /// A parameter whose value is not kept for the backward pass: `again` returns it there. Without an `id` it is frozen.
    pub fn fetched_param(
        id: Option<ParamId>,
        value: Tensor,
        again: impl Fn() -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let slot = id.map_or(Slot::None, Slot::Param);
        Var { value, slot, again: Some(Saved::recomputed(false, again)) }
    }

    /// The tensor.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    pub(crate) fn needs_grad(&self) -> bool {
        self.slot != Slot::None
    }

    /// The value for the backward pass.
    pub(crate) fn saved(&self) -> Saved {
        self.again.clone().unwrap_or_else(|| Saved::stored(self.value.clone()))
    }
}

/// Gradients of the parameters, accumulated over backward passes.
#[derive(Debug, Default)]
pub struct Gradients {
    params: Vec<Option<Tensor>>,
    /// Number of terms of each parameter.
    terms: Vec<u32>,
    buckets: Option<Buckets>,
    /// Whether terms are counted and dropped.
    counts_only: bool,
}

impl Gradients {
    /// Counts the terms of every parameter ([`Gradients::term_counts`]) and keeps none of them.
    pub fn counting() -> Gradients {
        Gradients { counts_only: true, ..Gradients::default() }
    }

    /// The gradient of a parameter, if any backward pass reached it.
    pub fn get(&self, id: ParamId) -> Option<&Tensor> {
        self.params.get(id.0)?.as_ref()
    }

    /// Parameters that have a gradient, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &Tensor)> {
        self.params.iter().enumerate().filter_map(|(i, g)| Some((ParamId(i), g.as_ref()?)))
    }

    /// [`Gradients::iter`] with mutable tensors, for an optimizer that reuses their memory.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ParamId, &mut Tensor)> {
        self.params.iter_mut().enumerate().filter_map(|(i, g)| Some((ParamId(i), g.as_mut()?)))
    }

    /// Adds other gradients of the same parameters.
    pub fn add(&mut self, other: Gradients) -> Result<()> {
        for (i, term) in other.params.into_iter().enumerate() {
            let Some(term) = term else { continue };
            let slot = self.slot(ParamId(i));
            *slot = Some(match slot.take() {
                None => term,
                Some(sum) => {
                    let device = sum.device().clone();
                    device.backend().add(sum, &term)?
                }
            });
        }
        Ok(())
    }

    /// Drops all gradients; their memory returns to the device's pool.
    pub fn clear(&mut self) {
        *self = Gradients::default();
    }

    fn slot(&mut self, id: ParamId) -> &mut Option<Tensor> {
        if self.params.len() <= id.0 {
            self.params.resize_with(id.0 + 1, || None);
        }
        &mut self.params[id.0]
    }
}

/// Gradients during one backward pass: those of the tape's values and of the parameters.
pub(crate) struct Flow<'g> {
    inner: Vec<Option<Tensor>>,
    params: &'g mut Gradients,
}

impl Flow<'_> {
    /// Takes the gradient so far: the complete gradient of an op's output, or a partial sum.
    pub(crate) fn take(&mut self, slot: Slot) -> Option<Tensor> {
        self.entry(slot)?.take()
    }

    /// Takes the gradients of all results of an op, given as slots and shapes: zeros for those that have none. `None` if
    /// no result has a gradient.
    pub(crate) fn take_all(
        &mut self,
        outs: &[(Slot, Shape)],
        device: &Device,
    ) -> Result<Option<Vec<Tensor>>> {
        let grads: Vec<Option<Tensor>> = outs.iter().map(|(slot, _)| self.take(*slot)).collect();
        if grads.iter().all(Option::is_none) {
            return Ok(None);
        }
        let or_zeros = |(grad, (_, shape)): (Option<Tensor>, &(Slot, Shape))| match grad {
            Some(grad) => Ok(grad),
            None => device.zeros(*shape, DType::F32),
        };
        grads.into_iter().zip(outs).map(or_zeros).collect::<Result<_>>().map(Some)
    }

    /// Stores a gradient; without a slot it is dropped.
    pub(crate) fn put(&mut self, slot: Slot, grad: Tensor) {
        let dropped = self.params.counts_only && matches!(slot, Slot::Param(_));
        if let Some(entry) = self.entry(slot).filter(|_| !dropped) {
            *entry = Some(grad);
        }
        if let Slot::Param(id) = slot {
            self.params.count_term(id);
        }
    }

    /// Lets `f` add a term to the gradient so far, if the slot has one.
    pub(crate) fn update(
        &mut self,
        slot: Slot,
        f: impl FnOnce(Option<Tensor>) -> Result<Tensor>,
    ) -> Result<()> {
        if slot != Slot::None {
            let sum = f(self.take(slot))?;
            self.put(slot, sum);
        }
        Ok(())
    }

    fn entry(&mut self, slot: Slot) -> Option<&mut Option<Tensor>> {
        match slot {
            Slot::None => None,
            Slot::Param(id) => Some(self.params.slot(id)),
            Slot::Inner(i) => Some(&mut self.inner[i]),
        }
    }

    /// Runs the deferred work on `value`.
    pub(crate) fn run_deferred(&mut self, deferred: Vec<Deferred>, value: &Tensor) -> Result<()> {
        deferred.into_iter().try_for_each(|work| work(value, self))
    }

    /// Adds a term, if any.
    pub(crate) fn add_some(&mut self, slot: Slot, term: Option<Tensor>) -> Result<()> {
        term.map_or(Ok(()), |term| self.add(slot, term))
    }

    /// Adds a term.
    pub(crate) fn add(&mut self, slot: Slot, term: Tensor) -> Result<()> {
        self.update(slot, |acc| match acc {
            None => Ok(term),
            Some(acc) => {
                let device = acc.device().clone();
                device.backend().add(acc, &term)
            }
        })
    }
}

type Step<'m> = Box<dyn FnOnce(&mut Flow<'_>) -> Result<()> + 'm>;

/// Records ops and runs their backward passes. `'m` is the lifetime of the model whose blocks
/// [`Tape::checkpoint`] recomputes.
pub struct Tape<'m> {
    pub(crate) device: Device,
    pub(crate) recording: bool,
    /// Whether the results of cheap ops are recomputed in the backward pass rather than saved.
    recompute_cheap: bool,
    /// The preceding rows of its sequences, when they are on other ranks.
    preceding: Option<Arc<dyn PrecedingRows>>,
    steps: Vec<Step<'m>>,
    values: usize,
}

impl<'m> Tape<'m> {
    /// A tape that records, for training.
    pub fn recording(device: &Device) -> Self {
        let recompute_cheap = device.backend().caps().recompute.is_some();
        Tape {
            device: device.clone(),
            recording: true,
            recompute_cheap,
            preceding: None,
            steps: Vec::new(),
            values: 0,
        }
    }

    /// A tape that records nothing, for inference.
    pub fn inference(device: &Device) -> Self {
        Tape { recording: false, ..Tape::recording(device) }
    }

    /// Whether a backward pass can follow.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// The device that the ops run on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A value that needs a gradient and is not a parameter; see [`Tape::backward_from`].
    pub fn leaf(&mut self, value: Tensor) -> Var {
        let slot = self.next_slot(true);
        Var { value, slot, again: None }
    }

    /// Runs the backward pass from the losses and accumulates the parameters' gradients.
    pub fn backward(self, gradients: &mut Gradients) -> Result<()> {
        self.walk(&[], gradients).map(drop)
    }

    /// Runs the backward pass from given output gradients and returns the gradients of `leaves`.
    pub fn backward_from(
        self,
        seeds: &[(Var, Tensor)],
        leaves: &[Var],
        gradients: &mut Gradients,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut flow = self.walk(seeds, gradients)?;
        Ok(leaves.iter().map(|leaf| flow.take(leaf.slot)).collect())
    }

    /// Activation checkpointing: runs `block` without saving its activations; the backward pass runs it again, recording.
    ///
    /// `block` must be a pure function of `inputs` and of parameters.
    pub fn checkpoint<F>(&mut self, inputs: &[Var], block: F) -> Result<Vec<Var>>
    where
        F: Fn(&mut Tape<'m>, &[Var]) -> Result<Vec<Var>> + 'm,
    {
        let preceding = self.preceding.clone();
        let mut quiet = Tape { preceding: preceding.clone(), ..Tape::inference(&self.device) };
        let outputs = block(&mut quiet, inputs)?;
        let outputs: Vec<Var> =
            outputs.into_iter().map(|out| self.output(out.value, true)).collect();
        if self.recording {
            let (inputs, device) = (inputs.to_vec(), self.device.clone());
            let outs: Vec<Slot> = outputs.iter().map(|out| out.slot).collect();
            self.push(move |flow| {
                // Only one block's activations exist at a time, so its cheap results are saved.
                let mut tape =
                    Tape { recompute_cheap: false, preceding, ..Tape::recording(&device) };
                let leaves: Vec<Var> =
                    inputs.iter().map(|input| tape.leaf(input.value.clone())).collect();
                let again = block(&mut tape, &leaves)?;
                let seeds: Vec<(Var, Tensor)> = again
                    .into_iter()
                    .zip(outs)
                    .filter_map(|(var, slot)| Some((var, flow.take(slot)?)))
                    .collect();
                let grads = tape.backward_from(&seeds, &leaves, flow.params)?;
                for (input, grad) in inputs.iter().zip(grads) {
                    flow.add_some(input.slot, grad)?;
                }
                Ok(())
            });
        }
        Ok(outputs)
    }

    fn walk<'g>(self, seeds: &[(Var, Tensor)], gradients: &'g mut Gradients) -> Result<Flow<'g>> {
        let inner = std::iter::repeat_with(|| None).take(self.values).collect();
        let mut flow = Flow { inner, params: gradients };
        for (var, grad) in seeds {
            grad.expect_device("backward", "seed", &self.device)?;
            grad.expect_shape("backward", "seed", var.value.dims())?;
            flow.add(var.slot, grad.clone())?;
        }
        // Each step is dropped as soon as it ran, together with its saved activations.
        for step in self.steps.into_iter().rev() {
            step(&mut flow)?;
            flow.params.send_full_bucket()?;
        }
        Ok(flow)
    }

    fn next_slot(&mut self, needs_grad: bool) -> Slot {
        if !self.recording || !needs_grad {
            return Slot::None;
        }
        self.values += 1;
        Slot::Inner(self.values - 1)
    }

    /// The result of an op; it needs a gradient if any of its inputs does.
    pub(crate) fn output(&mut self, value: Tensor, needs_grad: bool) -> Var {
        let slot = self.next_slot(needs_grad);
        Var { value, slot, again: None }
    }

    /// [`Tape::output`] of an op that is cheap to recompute: a device with
    /// [`RecomputeOps`](crate::RecomputeOps) recomputes the result in the backward pass instead of saving it. With
    /// `can_wait`, consumers may defer their work to the backward pass of this op, which must then run it.
    pub(crate) fn cheap_output(
        &mut self,
        value: Tensor,
        needs_grad: bool,
        can_wait: bool,
        make: impl Fn(&Device) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Var {
        let mut out = self.output(value, needs_grad);
        if self.recording && self.recompute_cheap {
            let device = self.device.clone();
            out.again = Some(Saved::recomputed(can_wait, move || make(&device)));
        }
        out
    }

    pub(crate) fn push(&mut self, step: impl FnOnce(&mut Flow<'_>) -> Result<()> + 'm) {
        if self.recording {
            self.steps.push(Box::new(step));
        }
    }
}

pub(crate) fn slot_of(var: Option<&Var>) -> Slot {
    var.map_or(Slot::None, |var| var.slot)
}

pub(crate) fn wants(var: Option<&Var>) -> bool {
    var.is_some_and(Var::needs_grad)
}

pub(crate) fn value_of(var: Option<&Var>) -> Option<Tensor> {
    var.map(|var| var.value.clone())
}
