//! AdamW with global-norm clipping over the parameters of a model.
//!
//! Groups: weight decay applies to matrices, embeddings and convolutions, as the model's list of
//! parameters says; norms, biases and gate biases have none; buffers are not touched.

use fox_model::Parameters;
use fox_tensor::{AdamW, DType, Device, Gradients, ParamId, ParamUpdate, Tensor};
use serde::{Deserialize, Serialize};

use crate::Result;

/// Settings of AdamW. The defaults are the published ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerSettings {
    /// The highest learning rate of the schedule.
    pub peak_lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of the group that has it.
    pub weight_decay: f64,
    /// Largest norm of the whole gradient; a longer one is scaled by `clip / (norm + 1e-6)`.
    pub clip: f64,
}

impl Default for OptimizerSettings {
    fn default() -> Self {
        OptimizerSettings {
            peak_lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
        }
    }
}

/// The moments of one parameter, shaped like it.
#[derive(Debug)]
pub struct Moments {
    /// Running mean of the gradient.
    pub m: Tensor,
    /// Running mean of its square.
    pub v: Tensor,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Factor that clipping applied to the gradient; 1 when it was short enough.
    pub clip_scale: f64,
    /// Whether the gradient was not finite, so that nothing was changed.
    pub skipped: bool,
}

/// AdamW: the moments of every trained parameter, on the device.
#[derive(Debug)]
pub struct Optimizer {
    settings: OptimizerSettings,
    /// In the order of the parameters; `None` for buffers.
    moments: Vec<Option<Moments>>,
    updates: u64,
}

impl Optimizer {
    /// Fresh moments for every trained parameter.
    pub fn new(
        settings: OptimizerSettings,
        params: &Parameters,
        device: &Device,
    ) -> Result<Optimizer> {
        let mut moments = Vec::with_capacity(params.len());
        for (_, spec, value) in params.iter() {
            moments.push(match spec.trainable {
                true => Some(Moments {
                    m: device.zeros(value.shape(), DType::F32)?,
                    v: device.zeros(value.shape(), DType::F32)?,
                }),
                false => None,
            });
        }
        Ok(Optimizer { settings, moments, updates: 0 })
    }

    /// Number of updates made so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The moments of a parameter; `None` for a buffer.
    pub fn moments(&self, id: ParamId) -> Option<&Moments> {
        self.moments.get(id.0)?.as_ref()
    }

    /// Puts back saved moments of one parameter.
    pub(crate) fn restore(&mut self, id: ParamId, moments: Moments) {
        self.moments[id.0] = Some(moments);
    }

    /// Puts back the number of updates, which the bias correction depends on.
    pub(crate) fn restore_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Clips the gradients and updates the parameters. A gradient that is not finite changes
    /// nothing, neither parameters nor moments nor the count of updates.
    pub fn step(
        &mut self,
        params: &mut Parameters,
        gradients: &Gradients,
        lr: f64,
    ) -> Result<Update> {
        let all: Vec<&Tensor> = gradients.iter().map(|(_, grad)| grad).collect();
        let Some(device) = all.first().map(|grad| grad.device().clone()) else {
            return Ok(Update { grad_norm: 0.0, clip_scale: 1.0, skipped: true });
        };
        let grad_norm = device.backend().sum_squares(&all)?.sqrt();
        if !grad_norm.is_finite() {
            return Ok(Update { grad_norm, clip_scale: 0.0, skipped: true });
        }
        let clip_scale = (self.settings.clip / (grad_norm + 1e-6)).min(1.0);
        self.updates += 1;
        let mut updates = Vec::with_capacity(params.len());
        for ((id, spec, param), moments) in params.iter_mut().zip(&mut self.moments) {
            let (Some(grad), Some(Moments { m, v })) = (gradients.get(id), moments) else {
                continue;
            };
            let step = AdamW {
                lr: lr as f32,
                beta1: self.settings.beta1 as f32,
                beta2: self.settings.beta2 as f32,
                eps: self.settings.eps as f32,
                weight_decay: if spec.decay { self.settings.weight_decay as f32 } else { 0.0 },
                step: self.updates,
                grad_scale: clip_scale as f32,
            };
            updates.push(ParamUpdate { param, grad, m, v, step });
        }
        device.backend().adamw_all(&mut updates)?;
        Ok(Update { grad_norm, clip_scale, skipped: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_data::{Batch, LoaderState};
    use fox_model::{
        DecayTime, ForgetGate, ForgettingConfig, ForwardOptions, MixerConfig, Model, ModelConfig,
    };

    fn model() -> Model {
        let mut config = ModelConfig::fox_pro(32, 1, 2);
        config.vocab_size = 16;
        config.mixer = MixerConfig::Forgetting(ForgettingConfig {
            gate: ForgetGate::Fixed { decay_time: Some(DecayTime { min: 2.0, max: 64.0 }) },
            ..ForgettingConfig::fox_pro(2)
        });
        Model::init(&config, 0, &fox_cpu::device()).unwrap()
    }

    fn gradients(model: &Model) -> Gradients {
        let ids: Vec<i32> = (0..24).map(|i| i * 5 % 16).collect();
        let state = LoaderState { next_batch: 1, fingerprint: 0 };
        let labels = ids.iter().map(|id| (id + 1) % 16).collect();
        let batch = Batch { inputs: ids, labels, batch: 1, time: 24, boundaries: None, state };
        let (options, mut gradients) = (ForwardOptions::default(), Gradients::default());
        crate::accumulate(model, &batch, 1, &options, &mut gradients).unwrap();
        gradients
    }

    fn values(model: &Model) -> Vec<Vec<f32>> {
        model.params().iter().map(|(_, _, value)| value.to_f32().unwrap()).collect()
    }

    /// The weights after one step.
    fn stepped(settings: OptimizerSettings, lr: f64) -> (Model, Update) {
        let mut model = model();
        let mut optimizer =
            Optimizer::new(settings, model.params(), &model.device().clone()).unwrap();
        let gradients = gradients(&model);
        let update = optimizer.step(model.params_mut(), &gradients, lr).unwrap();
        (model, update)
    }

    #[test]
    fn decay_moves_its_group_and_nothing_else_and_buffers_stay() {
        let plain = OptimizerSettings { weight_decay: 0.0, ..Default::default() };
        let (start, without, with) =
            (model(), stepped(plain, 0.01).0, stepped(OptimizerSettings::default(), 0.01).0);
        let all = [&start, &without, &with].map(values);
        let mut seen = [0, 0, 0];
        for (i, (_, spec, _)) in start.params().iter().enumerate() {
            let [p0, p1, p2] = [&all[0][i], &all[1][i], &all[2][i]];
            if !spec.trainable {
                assert_eq!((p0, p0), (p1, p2), "{} is a buffer", spec.name);
                seen[0] += 1;
            } else if !spec.decay {
                assert_ne!(p0, p1, "{}", spec.name);
                assert_eq!(p1, p2, "{} has no decay", spec.name);
                seen[1] += 1;
            } else {
                for ((p0, p1), p2) in p0.iter().zip(p1).zip(p2) {
                    assert!((p1 - p2 - 0.01 * 0.1 * p0).abs() < 1e-7, "{}", spec.name);
                }
                seen[2] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
    }

    #[test]
    fn a_long_gradient_is_clipped_to_its_norm() {
        let free = OptimizerSettings { clip: f64::INFINITY, ..Default::default() };
        let norm = stepped(free, 0.0).1.grad_norm;
        let tight = OptimizerSettings { clip: norm / 4.0, ..Default::default() };
        let update = stepped(tight, 0.0).1;
        assert_eq!(update.grad_norm, norm);
        assert_eq!(update.clip_scale, norm / 4.0 / (norm + 1e-6));
        assert_eq!(stepped(free, 0.0).1.clip_scale, 1.0);
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        let mut model = model();
        let device = model.device().clone();
        let mut optimizer =
            Optimizer::new(OptimizerSettings::default(), model.params(), &device).unwrap();
        let head = model.params().find("lm_head.weight").unwrap();
        let healthy = model.params().value(head).clone();
        let broken = device.full(healthy.shape(), f32::NAN).unwrap();
        model.params_mut().set(head, broken).unwrap();
        let bad = gradients(&model);
        model.params_mut().set(head, healthy).unwrap();
        let before = values(&model);
        let update = optimizer.step(model.params_mut(), &bad, 0.1).unwrap();
        assert!(update.skipped && !update.grad_norm.is_finite());
        assert_eq!(values(&model), before);
        assert_eq!(optimizer.updates(), 0);
        assert!(optimizer.moments(head).unwrap().m.to_f32().unwrap().iter().all(|x| *x == 0.0));
    }
}
