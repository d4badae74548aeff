//! Whether a run fits its device, before it begins.

use fox_model::{MemoryEstimate, ModelConfig, ParamSpec};
use fox_tensor::{DType, Device};

use crate::recipe::Recipe;
use crate::{Error, Result};

/// Bytes of a value of the optimizer's state.
const F32: f64 = 4.0;
const GIB: f64 = (1u64 << 30) as f64;
/// What a device's pool takes from the system for each byte in use: 24.6 GiB for a peak of 23.4 at 760M.
const HOLES: f64 = 1.05;

/// Compares the estimate of a training step with what the device has free, where it knows.
pub(crate) fn check(recipe: &Recipe, config: &ModelConfig, device: &Device) -> Result<()> {
    let Some(free) = device.backend().free_memory() else { return Ok(()) };
    let recompute = recipe.training.recompute;
    let (kept, recomputed) = estimates(recipe, config, device)?;
    let needed = if recompute { recomputed } else { kept };
    if needed > free as f64 {
        // Worth a word only where it helps.
        let helps = !recompute && recomputed <= free as f64;
        return Err(Error::TooLarge {
            needed: needed / GIB,
            free: free as f64 / GIB,
            device: device.to_string(),
            rows: recipe.micro_batch(),
            recomputed: helps.then_some(recomputed / GIB),
        });
    }
    Ok(())
}

/// Bytes that a training step takes of the device.
pub(crate) fn needed(recipe: &Recipe, config: &ModelConfig, device: &Device) -> Result<f64> {
    let (kept, recomputed) = estimates(recipe, config, device)?;
    Ok(if recipe.training.recompute { recomputed } else { kept })
}

/// The same with all activations kept, and with blocks recomputed.
fn estimates(recipe: &Recipe, config: &ModelConfig, device: &Device) -> Result<(f64, f64)> {
    let state = state_bytes(recipe)?;
    let length = recipe.data.sequence_length / recipe.parallel.context;
    let estimate = MemoryEstimate::with_state(config, recipe.micro_batch(), length, state)?;
    let narrow = device.backend().caps().activation_type == DType::Bf16;
    let (kept, recomputed) = match narrow {
        true => (estimate.train_bf16, estimate.train_bf16_recomputed),
        false => (estimate.train(), estimate.train_recomputed()),
    };
    Ok((kept * HOLES, recomputed * HOLES))
}

/// Bytes that the optimizer and the average of the weights keep for every element of a parameter.
pub(crate) fn state_bytes(recipe: &Recipe) -> Result<impl Fn(&ParamSpec) -> f64> {
    let rule = recipe.optimizer.rule()?;
    let average = if recipe.training.ema.is_some() { F32 } else { 0.0 };
    Ok(move |spec: &ParamSpec| match spec.trainable && recipe.training.trains(spec) {
        true => F32 * rule.state(spec).len() as f64 + average,
        false => 0.0,
    })
}
