//! AdamW: Adam with decoupled weight decay.
//!
//! Weight decay applies to matrices, embeddings and convolutions, as the model's list of parameters says;
//! norms, biases and gate biases have none.

use fox_model::ParamSpec;
use fox_tensor::{Device, ParamUpdate};
use serde::{Deserialize, Serialize};

use super::{Optimizer, Rule, StepInput, Trained};
use crate::Result;

/// Settings of AdamW. The defaults are the published ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of the parameters that have it.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

impl Rule for AdamW {
    const NAME: &'static str = "adamw";

    fn conditions(&self) -> Vec<(bool, &'static str, &'static str)> {
        let unit = |x: f64| (0.0..1.0).contains(&x);
        vec![
            (unit(self.beta1), "beta1", "must be at least 0 and below 1"),
            (unit(self.beta2), "beta2", "must be at least 0 and below 1"),
            (self.eps > 0.0, "eps", "must be above 0"),
            (self.weight_decay >= 0.0, "weight_decay", "must be at least 0"),
        ]
    }
}

impl Optimizer for AdamW {
    /// Running means of the gradient and of its square.
    fn state(&self, _: &ParamSpec) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn step(&self, device: &Device, params: Vec<Trained<'_>>, input: &StepInput) -> Result<()> {
        let mut updates = Vec::with_capacity(params.len());
        for Trained { spec, value, grad, state } in params {
            let [m, v] = state else { continue };
            let step = fox_tensor::AdamW {
                lr: input.lr as f32,
                beta1: self.beta1 as f32,
                beta2: self.beta2 as f32,
                eps: self.eps as f32,
                weight_decay: if spec.decay { self.weight_decay as f32 } else { 0.0 },
                step: input.update,
                grad_scale: input.grad_scale as f32,
            };
            updates.push(ParamUpdate { param: value, grad, m, v, step });
        }
        Ok(device.backend().adamw_all(&mut updates)?)
    }
}
