//! The optimizer of the guide (`docs/guide/src/extend.md`): what a new file of `src/optimizer` would hold, tried on a
//! bowl.
#![allow(clippy::unwrap_used)] // a test may panic

use fox_model::{Model, ModelConfig, ParamSpec};
use fox_tensor::{DType, Device};
use fox_train::{Optimizer, OptimizerRecipe, Result, Rule, StepInput, Trained};
use serde::{Deserialize, Serialize};

/// Steps of one size, in the direction of the sign of the momentum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SignDescent {
    /// How much of the momentum stays.
    pub momentum: f64,
}

impl Default for SignDescent {
    fn default() -> Self {
        SignDescent { momentum: 0.9 }
    }
}

impl Rule for SignDescent {
    const NAME: &'static str = "sign-descent";

    fn conditions(&self) -> Vec<(bool, &'static str, &'static str)> {
        let holds = (0.0..1.0).contains(&self.momentum);
        vec![(holds, "momentum", "must be at least 0 and below 1")]
    }
}

impl Optimizer for SignDescent {
    /// One tensor of the parameter's shape; checkpoints store it as `momentum.NAME`.
    fn state(&self, _: &ParamSpec) -> &'static [&'static str] {
        &["momentum"]
    }

    fn step(&self, device: &Device, params: Vec<Trained<'_>>, input: &StepInput) -> Result<()> {
        let (keep, lr) = (self.momentum as f32, input.lr as f32);
        for Trained { value, grad, state, .. } in params {
            let (mut w, g, mut m) = (value.to_f32()?, grad.to_f32()?, state[0].to_f32()?);
            for ((w, g), m) in w.iter_mut().zip(g).zip(&mut m) {
                *m = keep * *m + (1.0 - keep) * g * input.grad_scale as f32;
                *w -= lr * m.signum();
            }
            state[0] = device.from_f32(&m, value.shape())?;
            *value = device.from_f32(&w, value.shape())?;
        }
        Ok(())
    }
}

/// The gradient of `|w|^2 / 2` is `w`: the weights of a layer go to 0, up to the size of a step.
#[test]
fn external_optimizer_minimizes_quadratic() {
    let device = fox_cpu::device();
    let config = ModelConfig::fox_pro(32, 1, 2).with_vocab(16);
    let model = Model::init(&config, 0, &device).unwrap();
    let (_, spec, start) = model.params().iter().find(|(_, spec, _)| spec.trainable).unwrap();
    let (rule, mut value) = (SignDescent::default(), start.clone());
    let names = rule.state(spec);
    let mut state = vec![device.zeros(value.shape(), DType::F32).unwrap(); names.len()];
    let largest = |w: &[f32]| w.iter().fold(0.0f32, |max, w| max.max(w.abs()));
    assert!(largest(&value.to_f32().unwrap()) > 0.03);
    for update in 1..=200 {
        let mut grad = value.clone();
        let param = Trained { spec, value: &mut value, grad: &mut grad, state: &mut state };
        rule.step(&device, vec![param], &StepInput { lr: 1e-3, update, grad_scale: 1.0 }).unwrap();
    }
    // The momentum swings over the bottom by some steps.
    assert!(largest(&value.to_f32().unwrap()) < 0.02, "{}", largest(&value.to_f32().unwrap()));
}

#[test]
fn external_optimizer_reads_recipe_keys() {
    let recipe = OptimizerRecipe::of(&SignDescent { momentum: 0.5 }).unwrap();
    assert_eq!(recipe.name, "sign-descent");
    assert_eq!(recipe.settings::<SignDescent>().unwrap(), SignDescent { momentum: 0.5 });
    assert!(!SignDescent { momentum: 1.0 }.conditions()[0].0);
}
