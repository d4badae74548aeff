//! Whether a run fits its device, before it begins.

use fox_dist::owners;
use fox_model::{MemoryEstimate, ModelConfig, ParamSpec};
use fox_tensor::{DType, Device};

use crate::recipe::{Recipe, Reduction, Shard};
use crate::sharded_weights::{is_sharded, window};
use crate::{Error, Result};

/// Bytes of a value of the optimizer's state.
const F32: f64 = 4.0;
const GIB: f64 = (1u64 << 30) as f64;
/// What a device's pool takes from the system for each byte in use: 24.6 GiB for a peak of 23.4 at 760M.
const HOLES: f64 = 1.05;
/// Bytes that a GPU receives gradients of other ranks into, at most.
const RECEIVED: f64 = (64u64 << 20) as f64;

/// Compares the estimate of a training step of one of several processes with what its device has free, where it knows.
pub(crate) fn check(
    recipe: &Recipe,
    config: &ModelConfig,
    device: &Device,
    ranks: usize,
) -> Result<()> {
    let Some(free) = device.backend().free_memory() else { return Ok(()) };
    let recompute = recipe.training.recompute;
    let (kept, recomputed) = estimates(recipe, config, device, ranks)?;
    let needed = if recompute { recomputed } else { kept };
    if needed > free as f64 {
        // Worth a word only where it helps.
        let helps = !recompute && recomputed <= free as f64;
        return Err(Error::TooLarge {
            needed: needed / GIB,
            free: free as f64 / GIB,
            device: device.to_string(),
            rows: rows(recipe, ranks),
            recomputed: helps.then_some(recomputed / GIB),
        });
    }
    Ok(())
}

/// Bytes that a training step takes of the device of a process without others.
pub(crate) fn needed(recipe: &Recipe, config: &ModelConfig, device: &Device) -> Result<f64> {
    let (kept, recomputed) = estimates(recipe, config, device, 1)?;
    Ok(if recipe.training.recompute { recomputed } else { kept })
}

/// The same with all activations kept, and with blocks recomputed.
fn estimates(
    recipe: &Recipe,
    config: &ModelConfig,
    device: &Device,
    ranks: usize,
) -> Result<(f64, f64)> {
    let narrow = device.backend().caps().activation_type == DType::Bf16;
    let (kept, recomputed) = step_bytes(recipe, config, ranks, narrow)?;
    Ok((kept * HOLES, recomputed * HOLES))
}

/// Sequences, or parts of them, that one of `ranks` processes has in memory at once.
pub(crate) fn rows(recipe: &Recipe, ranks: usize) -> usize {
    recipe.micro_batch().min(recipe.training.batch * recipe.parallel.context / ranks)
}

/// Bytes of a step at the one of `ranks` processes that needs the most, without the earlier keys of shared sequences:
/// with all activations kept, and with blocks recomputed. Activations are in bf16 where they are `narrow`.
pub(crate) fn step_bytes(
    recipe: &Recipe,
    config: &ModelConfig,
    ranks: usize,
    narrow: bool,
) -> Result<(f64, f64)> {
    let rule = recipe.optimizer.rule()?;
    let average = if recipe.training.ema.is_some() { F32 } else { 0.0 };
    let state = |spec: &ParamSpec| match recipe.training.trains(spec) {
        true => F32 * rule.state(spec).len() as f64 + average,
        false => 0.0,
    };
    let length = recipe.data.sequence_length / recipe.parallel.context;
    let estimate = MemoryEstimate::with_state(config, rows(recipe, ranks), length, state)?;
    let specs = config.param_specs();
    let sizes: Vec<usize> = specs.iter().map(ParamSpec::count).collect();
    // A tensor that is larger than the buffer is received in chunks.
    let largest = F32 * sizes.iter().copied().max().unwrap_or(0) as f64;
    let received = if narrow { RECEIVED.min(largest * (ranks - 1) as f64) } else { 0.0 };
    if recipe.parallel.shard == Shard::Weights && ranks > 1 {
        let (kept, again) = sharded_bytes(recipe, config, ranks, narrow, &estimate, state);
        return Ok((kept + received, again + received));
    }
    // Every process keeps the optimizer's state of the parameters it owns.
    let mut states = vec![0.0; ranks];
    for (spec, owner) in specs.iter().zip(owners(&sizes, ranks)).filter(|(s, _)| s.trainable) {
        states[owner] += state(spec) * spec.count() as f64;
    }
    let kept = estimate.weights + states.into_iter().fold(0.0, f64::max);
    let pass = |activations: &Activations| {
        kept + received + pass_bytes(recipe, ranks, activations, estimate.gradients, 0.0)
    };
    let [whole, again] = activations(config, &estimate, narrow);
    Ok((pass(&whole), pass(&again)))
}

/// Bytes of activations in a training pass.
struct Activations {
    /// At the loss, with the gradient of the output projection.
    loss: f64,
    /// After the loss, without the output projection.
    after_loss: f64,
    /// Beside the gradients of all blocks, at the end of the backward pass.
    at_end: f64,
    /// Gradients that are not there yet at that time.
    later: f64,
}

impl Activations {
    /// The most of them, without gradients.
    fn largest(&self) -> f64 {
        self.loss.max(self.after_loss)
    }
}

/// Activations of a pass: with all of them kept, and with blocks recomputed.
fn activations(config: &ModelConfig, estimate: &MemoryEstimate, narrow: bool) -> [Activations; 2] {
    let until_end = |loss: f64| Activations { loss, after_loss: 0.0, at_end: 0.0, later: 0.0 };
    if !narrow {
        let head = F32 * (config.vocab_size * config.hidden_size) as f64;
        let all = [estimate.activations, estimate.activations_recomputed];
        return all.map(|activations| until_end(activations + head));
    }
    let moments = estimate.recomputed_bf16;
    let recomputed = Activations {
        loss: moments.loss,
        after_loss: moments.last_block,
        at_end: moments.first_block,
        later: estimate.gradients - estimate.gradients_of_blocks,
    };
    [until_end(estimate.activations_bf16), recomputed]
}

/// Micro-batches of a step at one process.
fn micro_batches(recipe: &Recipe, ranks: usize) -> usize {
    (recipe.training.batch * recipe.parallel.context / ranks).div_ceil(rows(recipe, ranks).max(1))
}

/// Bytes of activations and gradients where they are most, in the backward pass of the last micro-batch: its gradients
/// appear as its activations go, beside the sums of those before it. The loss also has `head` bytes of weights.
fn pass_bytes(
    recipe: &Recipe,
    ranks: usize,
    activations: &Activations,
    gradients: f64,
    head: f64,
) -> f64 {
    let parts = micro_batches(recipe, ranks);
    let largest = activations.largest().max(activations.loss + head);
    let alone = largest.max(gradients).max(gradients - activations.later + activations.at_end);
    match recipe.training.reduction {
        _ if parts <= 1 => alone,
        // Added to in place.
        Reduction::Running => largest + gradients,
        Reduction::Tree => f64::from(parts.ilog2()) * gradients + alone,
    }
}

/// The same where weights and gradients are sharded too, see [`crate::recipe::Shard`]:
///
/// ```text
/// owned weights and optimizer state, replicated vectors
/// + gathered weights: the batches in use, before it and, on a GPU, after it
/// + the largest of activations with the output projection and its gradient, at the start of the backward pass,
///   the last block where blocks are recomputed, and owned gradients with one bucket, at its end, with the first block
///   (with several micro-batches in a step as with replicated weights)
/// ```
fn sharded_bytes(
    recipe: &Recipe,
    config: &ModelConfig,
    ranks: usize,
    narrow: bool,
    estimate: &MemoryEstimate,
    state: impl Fn(&ParamSpec) -> f64,
) -> (f64, f64) {
    let specs = config.param_specs();
    let sizes: Vec<usize> = specs.iter().map(ParamSpec::count).collect();
    let trained = |spec: &ParamSpec| spec.trainable && recipe.training.trains(spec);
    let bytes = |spec: &ParamSpec| F32 * spec.count() as f64;
    let owners = owners(&sizes, ranks);
    // Weights with their state, and gradients, by rank.
    let (mut kept, mut gradients) = (vec![0.0; ranks], vec![0.0; ranks]);
    for (spec, &owner) in specs.iter().zip(&owners) {
        match is_sharded(spec) {
            true => kept[owner] += bytes(spec),
            false => kept.iter_mut().for_each(|kept| *kept += bytes(spec)),
        }
        if trained(spec) {
            kept[owner] += state(spec) * spec.count() as f64;
            gradients[owner] += bytes(spec);
        }
    }
    let window = window(&specs, config.num_layers) as f64;
    let elsewhere = window * (ranks - 1) as f64 / ranks as f64;
    // Over the host, weights are in flight outside of the device.
    let gathered = if narrow { 3.0 * elsewhere } else { elsewhere };
    let table = F32 * (config.vocab_size * config.hidden_size) as f64;
    let step = |activations: &Activations| {
        let start = activations.largest().max(activations.loss + table);
        let of_rank = |(kept, own): (&f64, &f64)| {
            kept + gathered
                + match micro_batches(recipe, ranks) {
                    0 | 1 => start.max(own + bucket(recipe, window) + activations.at_end),
                    _ => pass_bytes(recipe, ranks, activations, estimate.gradients, table),
                }
        };
        kept.iter().zip(&gradients).map(of_rank).fold(0.0, f64::max)
    };
    let [whole, again] = activations(config, estimate, narrow);
    (step(&whole), step(&again))
}

/// Bytes of complete gradients that wait to be summed.
fn bucket(recipe: &Recipe, window: f64) -> f64 {
    (recipe.parallel.bucket as f64).min(window)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;
    use fox_tensor::LOSS_CHUNK_BYTES;

    #[test]
    fn estimates_allow_for_fragmentation() {
        let recipe = recipe::load("tiny-fox-pro", &[]).unwrap();
        let config = recipe.model_config(261).unwrap();
        let (kept, recomputed) = step_bytes(&recipe, &config, 1, false).unwrap();
        let found = estimates(&recipe, &config, &fox_cpu::device(), 1).unwrap();
        assert_eq!(found, (1.05 * kept, 1.05 * recomputed));
    }

    /// Peaks in bytes on one H200: of one to four ranks, `tests/ranks/h200 FOX memory` (2026-11-16), and of two with
    /// sharded weights, `tests/ranks/h200 FOX shards` (2026-11-19), which prints ratios to the plan of its time. The loss
    /// had chunks of 256 MiB then.
    #[test]
    fn plan_matches_peaks_of_ranks_on_a_gpu() {
        let shards = "parallel.shard=\"weights\"";
        let gib = (1u64 << 30) as f64;
        for (ranks, more, measured) in [
            (1, &[][..], 5.64 * gib),
            (2, &[][..], 3.4 * gib),
            (4, &[][..], 2.24 * gib),
            (2, &[shards][..], 1.028 * 3_406_539_328.0),
            (2, &[shards, "training.recompute=true"][..], 0.916 * 2_187_405_888.0),
            (2, &[shards, "training.micro_batch=1"][..], 1.032 * 2_635_329_664.0),
        ] {
            let set = ["training.batch=8", "training.micro_batch=8", "data.sequence_length=2048"];
            let set: Vec<String> = set.iter().chain(more).map(ToString::to_string).collect();
            let recipe = recipe::load("fox-pro-125m", &set).unwrap();
            let config = recipe.model_config(50_257).unwrap();
            let (kept, recomputed) = step_bytes(&recipe, &config, ranks, true).unwrap();
            let planned = if recipe.training.recompute { recomputed } else { kept };
            let single = more.iter().any(|set| set.contains("micro_batch"));
            let rows = 2048 * if single { 1 } else { 8 / ranks };
            let logits = |most: usize| (2 * rows * 50_257).min(most) as f64;
            let ratio = (measured + logits(LOSS_CHUNK_BYTES) - logits(256 << 20)) / planned;
            assert!(
                (ratio - 1.0).abs() < 0.02,
                "{ranks} ranks {more:?}: measured / planned is {ratio:.3}"
            );
        }
    }

    #[test]
    fn memory_shrinks_with_processes() {
        let bytes = |set: &[&str], ranks: usize| {
            let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
            let recipe = recipe::load("tiny-fox-pro", &set).unwrap();
            let config = recipe.model_config(261).unwrap();
            let parameters: usize = config.param_specs().iter().map(ParamSpec::count).sum();
            (step_bytes(&recipe, &config, ranks, false).unwrap(), parameters as f64)
        };
        let ((one, _), parameters) = bytes(&["training.batch=2"], 1);
        let ((four, again), _) = bytes(&["training.batch=8"], 4);
        // As many sequences at once, but a quarter of two values for each parameter.
        assert!(((one - four) / (8.0 * 0.75 * parameters) - 1.0).abs() < 0.05, "{one} {four}");
        assert!(again < four, "recomputing helps");
        let ((half, _), _) = bytes(&["training.batch=8", "parallel.context=2"], 8);
        assert!(half < four, "two processes share their two sequences: {half} {four}");
        let ((frozen, _), _) = bytes(&["training.batch=8", "training.train=[\"gates\"]"], 4);
        assert!(frozen < four, "what is frozen needs no state");
    }
}
