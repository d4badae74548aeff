//! An exponential moving average of the weights: often a better model than the last weights themselves.
//!
//! ```text
//! average = d average + (1 - d) weights      after every update, d = min(decay, (1 + n) / (10 + n)) at the n-th
//! ```
//!
//! The smaller `d` of the first updates keeps the initial weights from weighing on a short run.

use fox_model::{Model, ParamSpec, Parameters};
use fox_tensor::{Blend, Device, ParamId, Tensor};

use crate::Result;

/// The name of an average among the state of a parameter.
pub(crate) const EMA: &str = "ema";

/// Averages of all trained parameters.
#[derive(Debug)]
pub(super) struct Ema {
    decay: f64,
    /// In the order of the parameters; `None` for buffers and for what belongs to another process.
    averages: Vec<Option<Tensor>>,
}

impl Ema {
    /// Averages, of the parameters that `owned` says, initialized from the current weights.
    pub fn new(decay: f64, params: &Parameters, owned: impl Fn(ParamId) -> bool) -> Self {
        let kept = |id: ParamId, spec: &ParamSpec| spec.trainable && owned(id);
        let average = |(id, spec, value): (ParamId, &ParamSpec, &Tensor)| {
            kept(id, spec).then(|| value.clone())
        };
        Ema { decay, averages: params.iter().map(average).collect() }
    }

    /// The average of a parameter, with its name.
    pub fn state(&self, id: ParamId) -> Option<(&'static str, &Tensor)> {
        Some((EMA, self.averages[id.0].as_ref()?))
    }

    pub fn restore(&mut self, id: ParamId, average: Option<Tensor>) {
        self.averages[id.0] = average;
    }

    /// Takes in the weights after the update with this number, counted from 1.
    pub fn update(&mut self, device: &Device, params: &Parameters, update: u64) -> Result<()> {
        let early = (1 + update) as f64 / (10 + update) as f64;
        let decay = self.decay.min(early);
        let mut blends = Vec::with_capacity(params.len());
        for ((_, _, value), average) in params.iter().zip(&mut self.averages) {
            if let Some(average) = average {
                blends.push(Blend::new(average, value, decay as f32, (1.0 - decay) as f32)?);
            }
        }
        Ok(device.backend().blend(&mut blends)?)
    }

    /// Puts the averages that are kept here in the place of the weights; returns the weights of all trained
    /// parameters.
    pub fn replace(&self, model: &mut Model) -> Result<Vec<(ParamId, Tensor)>> {
        let trained = model.params().iter().filter(|(_, spec, _)| spec.trainable);
        let weights = trained.map(|(id, _, value)| (id, value.clone())).collect();
        for (i, average) in self.averages.iter().enumerate() {
            let (id, Some(average)) = (ParamId(i), average) else { continue };
            model.params_mut().set(id, average.clone())?;
        }
        Ok(weights)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{gradients, model, values};
    use super::super::{OptimizerRecipe, Updater};

    #[test]
    fn ema_is_weighted_sum() {
        let mut model = model(&fox_cpu::device());
        let device = model.device().clone();
        let recipe = OptimizerRecipe::default();
        let mut updater = Updater::new(&recipe, Some(0.3), model.params(), &device).unwrap();
        let mut want = values(&model);
        // (1 + n) / (10 + n) is below 0.3 for two updates and above it from the third on.
        for decay in [2.0 / 11.0, 3.0 / 12.0, 0.3, 0.3f32] {
            let gradients = gradients(&model);
            updater.step(model.params_mut(), gradients, 0.05).unwrap();
            for (want, now) in want.iter_mut().zip(values(&model)) {
                want.iter_mut().zip(now).for_each(|(w, x)| *w = decay * *w + (1.0 - decay) * x);
            }
        }
        let weights = values(&model);
        let seen = updater.with_average(&mut model, |model| Ok(values(model))).unwrap();
        assert_eq!(values(&model), weights, "the weights are back");
        let mut moved = 0;
        for ((_, spec, _), ((seen, want), weights)) in
            model.params().iter().zip(seen.iter().zip(&want).zip(&weights))
        {
            for (seen, want) in seen.iter().zip(want) {
                assert!((seen - want).abs() <= 1e-6 * want.abs().max(0.1), "{}", spec.name);
            }
            moved += usize::from(seen != weights);
        }
        assert!(moved > 10, "{moved}");
        updater.put_average(&mut model).unwrap();
        assert_eq!(values(&model), seen);
    }
}
