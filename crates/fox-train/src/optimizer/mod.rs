//! Optimizers: how gradients change parameters, and what is kept from step to step for it.
//!
//! An [`Optimizer`] is a rule: its settings, the names of what it keeps of a parameter, and one step. Everything
//! else is the same for all of them and done by the [`Updater`]: clipping the gradient by its norm, leaving
//! out a gradient that is not finite, holding the state by name for checkpoints, and averaging the weights.
//!
//! A new optimizer is a file here that implements [`Rule`], and a line in the list of [`registry`].

mod adamw;
mod ema;
mod muon;
mod registry;
#[cfg(test)]
mod tests;

use std::fmt::Debug;

use fox_model::{Model, ParamSpec, Parameters};
use fox_tensor::{DType, Device, Gradients, ParamId, Tensor};

pub use adamw::AdamW;
pub(crate) use ema::EMA;
use ema::Ema;
pub use muon::{Muon, Scale};
pub use registry::{OptimizerRecipe, Rule, optimizer_names};

use crate::Result;

/// A parameter that a step changes.
#[derive(Debug)]
pub struct Trained<'a> {
    /// What is known about it.
    pub spec: &'a ParamSpec,
    /// Its value.
    pub value: &'a mut Tensor,
    /// Its gradient, not clipped yet. Nobody needs it afterwards: a rule may use its memory.
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

/// An optimizer at work: the rule and its state on the device.
#[derive(Debug)]
pub struct Updater {
    rule: Box<dyn Optimizer>,
    clip: f64,
    /// What the rule keeps, in the order of the parameters; nothing for buffers.
    states: Vec<Vec<Tensor>>,
    ema: Option<Ema>,
    updates: u64,
}

impl Updater {
    /// Fresh state for every trained parameter; with `ema`, the decay of an average of the weights.
    pub fn new(
        recipe: &OptimizerRecipe,
        ema: Option<f64>,
        params: &Parameters,
        device: &Device,
    ) -> Result<Updater> {
        let rule = recipe.rule()?;
        let mut states = Vec::with_capacity(params.len());
        for (_, spec, value) in params.iter() {
            let names = if spec.trainable { rule.state(spec) } else { &[] };
            let zeros = names.iter().map(|_| device.zeros(value.shape(), DType::F32));
            states.push(zeros.collect::<fox_tensor::Result<Vec<_>>>()?);
        }
        let ema = ema.map(|decay| Ema::new(decay, params));
        Ok(Updater { rule, clip: recipe.clip, states, ema, updates: 0 })
    }

    /// Number of updates made so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// What is kept of a parameter, by name; nothing for a buffer.
    pub fn state(&self, id: ParamId, spec: &ParamSpec) -> Vec<(&'static str, &Tensor)> {
        let own = self.rule.state(spec).iter().copied().zip(&self.states[id.0]);
        own.chain(self.ema.as_ref().and_then(|ema| ema.state(id))).collect()
    }

    /// Puts back saved state of a parameter, in the order of [`Updater::state`].
    pub(crate) fn restore(&mut self, id: ParamId, mut saved: Vec<Tensor>) {
        if let Some(ema) = &mut self.ema {
            ema.restore(id, saved.pop());
        }
        self.states[id.0] = saved;
    }

    /// Puts back the number of updates, which a rule may depend on.
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
        let all: Vec<&Tensor> = gradients.iter().map(|(_, grad)| grad).collect();
        let Some(device) = all.first().map(|grad| grad.device().clone()) else {
            return Ok(StepReport { grad_norm: 0.0, clip_scale: 1.0, skipped: true });
        };
        let grad_norm = device.backend().sum_squares(&all)?.sqrt();
        if !grad_norm.is_finite() {
            return Ok(StepReport { grad_norm, clip_scale: 0.0, skipped: true });
        }
        let clip_scale = (self.clip / (grad_norm + 1e-6)).min(1.0);
        self.updates += 1;
        let mut grads: Vec<Option<&mut Tensor>> = params.iter().map(|_| None).collect();
        for (id, grad) in gradients.iter_mut() {
            grads[id.0] = Some(grad);
        }
        let mut trained = Vec::with_capacity(params.len());
        for (((_, spec, value), state), grad) in params.iter_mut().zip(&mut self.states).zip(grads)
        {
            if let (true, Some(grad)) = (spec.trainable, grad) {
                trained.push(Trained { spec, value, grad, state });
            }
        }
        let input = StepInput { lr, update: self.updates, grad_scale: clip_scale };
        self.rule.step(&device, trained, &input)?;
        if let Some(ema) = &mut self.ema {
            ema.update(&device, params, self.updates)?;
        }
        Ok(StepReport { grad_norm, clip_scale, skipped: false })
    }

    /// Puts the averages of the weights, where they are kept, into the model and returns what was there.
    pub fn put_average(&self, model: &mut Model) -> Result<Vec<(ParamId, Tensor)>> {
        self.ema.as_ref().map_or(Ok(Vec::new()), |ema| ema.replace(model))
    }

    /// Runs `f` on the model with the averages of its weights, and puts the weights back.
    pub fn with_average<T>(
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
