//! Optimizers: update rules and their state.
//!
//! An [`Optimizer`] is a rule: its settings, the names of what it keeps of a parameter, and one step. Everything
//! else is the same for all of them and done by the [`Updater`]: clipping the gradient by its norm, leaving
//! out a gradient that is not finite, holding the state by name for checkpoints, and averaging the weights.
//!
//! A new optimizer is a file here that implements [`Rule`], with a `mod` line and an entry of `OPTIMIZERS` below.

mod adamw;
mod ema;
mod muon;
mod registry;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;

use fox_dist::{Group, Owned, owners};
use fox_model::{Model, ParamSpec, Parameters, WeightSource};
use fox_tensor::{DType, Device, Gradients, ParamId, Tensor, WeightFormat};

pub use adamw::AdamW;
pub(crate) use ema::EMA;
use ema::Ema;
pub use muon::{Muon, Scale};
pub use registry::{OptimizerRecipe, Rule, optimizer_names};

use crate::Result;
use crate::overlapped_reduce::drop_values;
use crate::sharded_weights::ShardedWeights;

/// The optimizers that a recipe can name. The first is the default.
const OPTIMIZERS: &[registry::Entry] =
    &[registry::Entry::of::<AdamW>(), registry::Entry::of::<Muon>()];

/// A parameter that a step changes.
#[derive(Debug)]
pub struct Trained<'a> {
    /// What is known about it.
    pub spec: &'a ParamSpec,
    /// Its value.
    pub value: &'a mut Tensor,
    /// Its gradient, not clipped yet. Unused afterwards: a rule may reuse its memory.
    pub grad: &'a mut Tensor,
    /// What the rule keeps of it, in the order of [`Optimizer::state`].
    pub state: &'a mut [Tensor],
}

/// What a step depends on beside gradients and state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// Learning rate.
    pub lr: f64,
    /// Number of this update, counted from 1.
    pub update: u64,
    /// Factor that clipping applies to the gradient.
    pub grad_scale: f64,
}

/// A rule by which gradients change parameters.
pub trait Optimizer: Debug + Send + Sync {
    /// Names of what it keeps of a trained parameter: each is a tensor of the parameter's shape in f32 that
    /// begins with zeros. Checkpoints store it as `NAME.PARAMETER`.
    fn state(&self, spec: &ParamSpec) -> &'static [&'static str];

    /// One update of all parameters that have a gradient.
    fn step(&self, device: &Device, params: Vec<Trained<'_>>, input: &StepInput) -> Result<()>;
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Factor that clipping applied to the gradient; 1 when it was short enough.
    pub clip_scale: f64,
    /// Whether the gradient was not finite, so that nothing was changed.
    pub skipped: bool,
}

/// An optimizer at work: the rule and its state on the device. In a group of processes every parameter belongs to
/// one of them, which keeps its state, updates it and gives the result to the others (ZeRO stage 1), or keeps it until it
/// is used ([stage 3](crate::recipe::Shard)).
#[derive(Debug)]
pub struct Updater {
    rule: Box<dyn Optimizer>,
    clip: f64,
    /// What the rule keeps, in the order of the parameters; nothing for buffers and for what belongs to others.
    states: Vec<Vec<Tensor>>,
    ema: Option<Ema>,
    updates: u64,
    group: Arc<Group>,
    /// The process that each parameter belongs to.
    owners: Vec<usize>,
    /// The weights, where other processes have those that this one does not own.
    weights: Option<Arc<ShardedWeights>>,
    /// Factors on the learning rate, in the order of the parameters; empty for none.
    rates: Vec<f64>,
    /// Whether the norm of the gradient is summed parameter by parameter, so that it does not depend on the number of
    /// processes.
    norm_by_parameter: bool,
}

impl Updater {
    /// Fresh state for every trained parameter; with `ema`, the decay of an average of the weights.
    pub fn new(
        recipe: &OptimizerRecipe,
        ema: Option<f64>,
        params: &Parameters,
        device: &Device,
    ) -> Result<Updater> {
        Updater::in_group(recipe, ema, params, device, &Arc::new(Group::alone()))
    }

    /// The same, for one of several processes that have the same parameters.
    pub(crate) fn in_group(
        recipe: &OptimizerRecipe,
        ema: Option<f64>,
        params: &Parameters,
        device: &Device,
        group: &Arc<Group>,
    ) -> Result<Updater> {
        let rule = recipe.rule()?;
        let sizes: Vec<usize> = params.iter().map(|(_, spec, _)| spec.count()).collect();
        let owners = owners(&sizes, group.size());
        let mut states = Vec::with_capacity(params.len());
        for (id, spec, value) in params.iter() {
            let kept = spec.trainable && owners[id.0] == group.rank();
            let names = if kept { rule.state(spec) } else { &[] };
            let zeros = names.iter().map(|_| device.zeros(value.shape(), DType::F32));
            states.push(zeros.collect::<fox_tensor::Result<Vec<_>>>()?);
        }
        let ema = ema.map(|decay| Ema::new(decay, params, |id| owners[id.0] == group.rank()));
        let (clip, group, updates) = (recipe.clip, group.clone(), 0);
        let norm_by_parameter = group.size() > 1;
        let (rates, weights) = (Vec::new(), None);
        Ok(Updater {
            rule,
            clip,
            states,
            ema,
            updates,
            group,
            owners,
            weights,
            rates,
            norm_by_parameter,
        })
    }

    /// Keeps the weights of a model only where they are owned, from now on.
    pub(crate) fn shard_weights(&mut self, model: &mut Model) {
        let weights = Arc::new(ShardedWeights::new(&self.group, model));
        let keeps = |id| weights.keeps(id);
        model.params_mut().set_source(weights.clone(), &keeps);
        self.weights = Some(weights.clone());
    }

    /// The weights, where they are sharded.
    pub(crate) fn sharded_weights(&self) -> Option<&Arc<ShardedWeights>> {
        self.weights.as_ref()
    }

    /// Why weights could not be gathered, if that is why a pass has failed.
    pub(crate) fn weights_failure(&self) -> Option<crate::Error> {
        self.weights.as_ref()?.failure().map(crate::Error::Group)
    }

    /// Sends the parameters that all processes keep from their owners to the others.
    fn share(&self, params: &mut Parameters) -> Result<()> {
        let everywhere = |id: ParamId| !self.weights.as_ref().is_some_and(|w| w.holds(id));
        let updated = params.iter_mut().filter(|(id, spec, _)| spec.trainable && everywhere(*id));
        let shared = updated.map(|(id, _, tensor)| Owned { owner: self.owners[id.0], tensor });
        Ok(self.group.share(&mut shared.collect::<Vec<_>>())?)
    }

    /// Multiplies the learning rate of each parameter by a factor.
    pub fn set_rates(&mut self, rates: Vec<f64>) {
        self.rates = rates;
    }

    /// Sums the norm of the gradient parameter by parameter, so that its bits are those of any number of processes.
    pub(crate) fn sum_norm_by_parameter(&mut self) {
        self.norm_by_parameter = true;
    }

    /// The processes that share the work.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// The process that each parameter belongs to.
    pub(crate) fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// The process that a parameter belongs to.
    pub(crate) fn owner(&self, id: ParamId) -> usize {
        self.owners[id.0]
    }

    /// Names of the state of a parameter, here or at the process that owns it; empty for a buffer.
    pub(crate) fn state_names(&self, spec: &ParamSpec) -> Vec<&'static str> {
        if !spec.trainable {
            return Vec::new();
        }
        let own = self.rule.state(spec).iter().copied();
        own.chain(self.ema.is_some().then_some(EMA)).collect()
    }

    /// Number of updates made so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// State of a parameter by name; empty for a buffer or a parameter of another process.
    pub fn state(&self, id: ParamId, spec: &ParamSpec) -> Vec<(&'static str, &Tensor)> {
        let own = self.rule.state(spec).iter().copied().zip(&self.states[id.0]);
        own.chain(self.ema.as_ref().and_then(|ema| ema.state(id))).collect()
    }

    /// Restores the saved state of a parameter, in the order of [`Updater::state`].
    pub(crate) fn restore(&mut self, id: ParamId, mut saved: Vec<Tensor>) {
        if let Some(ema) = &mut self.ema {
            ema.restore(id, saved.pop());
        }
        self.states[id.0] = saved;
    }

    /// Restores the number of updates, which a rule may depend on.
    pub(crate) fn restore_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Clips the gradients and updates the parameters. A gradient that is not finite changes
    /// nothing, neither parameters nor state nor the count of updates.
    pub fn step(
        &mut self,
        params: &mut Parameters,
        mut gradients: Gradients,
        lr: f64,
    ) -> Result<StepReport> {
        let Some(device) = gradients.iter().next().map(|(_, grad)| grad.device().clone()) else {
            return Ok(StepReport { grad_norm: 0.0, clip_scale: 1.0, skipped: true });
        };
        // Some reductions may have started in the backward pass.
        let shared = gradients.unsent_mut().map(|(id, tensor)| {
            let owner = self.owners[id.0];
            Owned { owner, tensor }
        });
        self.group.reduce_to_owners(&mut shared.collect::<Vec<_>>())?;
        if self.weights.is_some() {
            let others =
                gradients.unsent_mut().filter(|(id, _)| self.owner(*id) != self.group.rank());
            others.for_each(|(_, tensor)| drop_values(tensor));
        }
        let grad_norm = self.squares(&device, &gradients)?.sqrt();
        if !grad_norm.is_finite() {
            return Ok(StepReport { grad_norm, clip_scale: 0.0, skipped: true });
        }
        let clip_scale = (self.clip / (grad_norm + 1e-6)).min(1.0);
        self.updates += 1;
        let mut grads: Vec<Option<&mut Tensor>> = params.iter().map(|_| None).collect();
        for (id, grad) in gradients.iter_mut() {
            grads[id.0] = Some(grad);
        }
        // By factor on the learning rate; without factors all are in one list.
        let mut trained: Vec<(f64, Vec<Trained<'_>>)> = Vec::new();
        for (((id, spec, value), state), grad) in params.iter_mut().zip(&mut self.states).zip(grads)
        {
            let owned = self.owners[id.0] == self.group.rank();
            if let (true, Some(grad)) = (spec.trainable && owned, grad) {
                let rate = self.rates.get(id.0).copied().unwrap_or(1.0);
                let param = Trained { spec, value, grad, state };
                match trained.iter_mut().find(|(other, _)| *other == rate) {
                    Some((_, list)) => list.push(param),
                    None => trained.push((rate, vec![param])),
                }
            }
        }
        for (rate, list) in trained {
            let input = StepInput { lr: lr * rate, update: self.updates, grad_scale: clip_scale };
            self.rule.step(&device, list, &input)?;
        }
        if let Some(ema) = &mut self.ema {
            ema.update(&device, params, self.updates)?;
        }
        self.share(params)?;
        Ok(StepReport { grad_norm, clip_scale, skipped: false })
    }

    /// L2 norm of all trained parameters, wherever they are. All processes call this where weights are sharded.
    pub(crate) fn param_norm(&self, model: &Model) -> Result<f64> {
        let backend = model.device().backend();
        let trained = model.params().iter().filter(|(_, spec, _)| spec.trainable);
        if self.weights.is_none() {
            let values: Vec<&Tensor> = trained.map(|(_, _, value)| value).collect();
            return Ok(backend.sum_squares(&values)?.sqrt());
        }
        let own = trained.filter(|(id, _, _)| self.owner(*id) == self.group.rank());
        let own: Vec<&Tensor> = own.map(|(_, _, value)| value).collect();
        let all = self.group.all_numbers(&[backend.sum_squares(&own)?])?;
        Ok(all.into_iter().sum::<f64>().sqrt())
    }

    /// Sum of the squares of all gradients, each at the process that it belongs to.
    fn squares(&self, device: &Device, gradients: &Gradients) -> Result<f64> {
        if !self.norm_by_parameter {
            let all: Vec<&Tensor> = gradients.iter().map(|(_, grad)| grad).collect();
            return Ok(device.backend().sum_squares(&all)?);
        }
        let mut own = vec![0.0; self.owners.len()];
        let here = gradients.iter().filter(|(id, _)| self.owner(*id) == self.group.rank());
        let (ids, grads): (Vec<ParamId>, Vec<&Tensor>) = here.unzip();
        for (id, sum) in ids.into_iter().zip(device.backend().sum_squares_each(&grads)?) {
            own[id.0] = sum;
        }
        let all = self.group.all_numbers(&own)?;
        let of = |(id, &owner): (usize, &usize)| all[owner * self.owners.len() + id];
        Ok(self.owners.iter().enumerate().map(of).sum())
    }

    /// Puts the averages of the weights, where they are kept, into the model and returns what was there.
    pub(crate) fn put_average(&self, model: &mut Model) -> Result<Vec<(ParamId, Tensor)>> {
        let Some(ema) = &self.ema else { return Ok(Vec::new()) };
        let weights = ema.replace(model)?;
        // As the others have theirs.
        model.pack_weights(WeightFormat::F32)?;
        self.share(model.params_mut())?;
        model.pack_weights(WeightFormat::F32)?;
        Ok(weights)
    }

    /// Runs `f` on the model with the averages of its weights, and puts the weights back.
    pub(crate) fn with_average<T>(
        &self,
        model: &mut Model,
        f: impl FnOnce(&Model) -> Result<T>,
    ) -> Result<T> {
        let weights = self.put_average(model)?;
        let result = f(model);
        for (id, value) in weights {
            model.params_mut().set(id, value)?;
        }
        result
    }
}
