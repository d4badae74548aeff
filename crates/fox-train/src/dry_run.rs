//! What a run would take, found out without writing anything: the checks of a run, and a few steps of it.

use std::time::Instant;

use fox_dist::Group;
use fox_model::{ModelConfig, ParamSpec};
use fox_tensor::speed::matmul_rate_within;
use fox_tensor::{Device, WeightFormat};

use crate::checkpoint::RunState;
use crate::cluster::batch_flops;
use crate::data::RunData;
use crate::stepper::Stepper;
use crate::trainer::{RATE_LIMIT, ValidatedRun};
use crate::{Recipe, Result, Updater, memory_check};

/// Seconds of matrix products that a measured step may take, and the number of such steps.
const PRODUCTS: f64 = 1.0;
const STEPS: u64 = 3;
/// Sequences are not cut below this length.
const SHORTEST: usize = 64;

/// What a run would take.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DryRun {
    /// Parameters of the model.
    pub parameters: usize,
    /// Bytes of device memory, as estimated from the recipe.
    pub memory: f64,
    /// Bytes that the device has free, where it knows.
    pub free: Option<usize>,
    /// Tokens per second in steps as long as those of the recipe.
    pub tokens_per_second: f64,
    /// Seconds of all steps; evaluations and checkpoints come on top.
    pub seconds: f64,
    /// Sequences and their tokens of the steps that were measured.
    pub measured: (usize, usize),
}

/// Makes every check of a run on one process, and a few steps of a part of its batch. Their fastest gives the time of
/// all steps, in proportion to the arithmetic. `complete` is false for a sample of the data.
///
/// # Errors
/// Those of a run, before it begins.
pub fn dry_run(recipe: &Recipe, data: &RunData, complete: bool, device: &Device) -> Result<DryRun> {
    let mut checked = recipe.clone();
    if !complete {
        // A sample ends earlier than the data.
        checked.data.epochs = None;
    }
    let ValidatedRun { config, .. } = ValidatedRun::new(&checked, data, device, 1)?;
    if recipe.training.init.is_some() {
        recipe.check_init(&config, data)?;
    }
    let part = part(recipe, &config, matmul_rate_within(device, RATE_LIMIT)?);
    let seconds = fastest_step(&part, &config, data, device)?;
    let whole = seconds * batch_flops(recipe, &config, 1.0) / batch_flops(&part, &config, 1.0);
    Ok(DryRun {
        parameters: config.param_specs().iter().map(ParamSpec::count).sum(),
        memory: memory_check::needed(recipe, &config, device)?,
        free: device.backend().free_memory(),
        tokens_per_second: recipe.tokens_per_step() as f64 / whole,
        seconds: whole * recipe.steps() as f64,
        measured: (part.training.batch, part.data.sequence_length),
    })
}

/// The recipe with fewer and then shorter sequences, until a step is short at `rate` FLOP/s of matrix products.
fn part(recipe: &Recipe, config: &ModelConfig, rate: f64) -> Recipe {
    let mut part = recipe.clone();
    part.parallel.context = 1;
    part.data.stages.clear();
    part.training.batch = recipe.micro_batch();
    part.training.micro_batch = None;
    while batch_flops(&part, config, 1.0) > PRODUCTS * rate {
        match (part.training.batch, part.data.sequence_length) {
            (2.., _) => part.training.batch /= 2,
            (_, length) if length / 2 >= SHORTEST => part.data.sequence_length = length / 2,
            _ => break,
        }
    }
    part
}

fn fastest_step(
    recipe: &Recipe,
    config: &ModelConfig,
    data: &RunData,
    device: &Device,
) -> Result<f64> {
    let mut model = recipe.initial_model(config, device)?;
    model.pack_weights(WeightFormat::F32)?;
    recipe.give_teacher(&mut model)?;
    let (optimizer, ema) = (&recipe.optimizer, recipe.training.ema);
    let group = std::sync::Arc::new(Group::alone());
    let updater = Updater::in_group(optimizer, ema, model.params(), device, &group)?;
    let loader = data.loader(recipe)?;
    let mut stepper = Stepper::new(recipe, model, updater, RunState::start(loader.state_at(0)))?;
    let batch = loader.batch(0)?;
    let mut fastest = f64::INFINITY;
    // The first one also compiles kernels and fills the memory pool.
    for _ in 0..STEPS {
        let begin = Instant::now();
        stepper.step(&batch)?;
        fastest = fastest.min(begin.elapsed().as_secs_f64());
    }
    Ok(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    #[test]
    fn measured_steps_are_short() {
        let recipe = recipe::load("fox-pro-125m", &[]).unwrap();
        let config = recipe.model_config(50_257).unwrap();
        let fast = part(&recipe, &config, 1e18);
        assert_eq!(fast.training.batch, recipe.micro_batch());
        assert_eq!(fast.data.sequence_length, recipe.data.sequence_length);
        let slow = part(&recipe, &config, 1e12);
        assert_eq!(slow.training.batch, 1);
        assert!(slow.data.sequence_length < recipe.data.sequence_length);
        assert!(batch_flops(&slow, &config, 1.0) <= PRODUCTS * 1e12);
        // Never shorter than can be trained on.
        assert_eq!(part(&recipe, &config, 1.0).data.sequence_length, SHORTEST);
    }

    #[test]
    fn rejects_data_that_end_early() {
        let set = ["data.epochs=1", "data.sequence_length=128", "schedule.warmup_tokens=0"];
        let recipe = recipe::load("tiny-fox-pro", &set.map(String::from)).unwrap();
        let train = fox_data::MemoryDataset::new(vec![vec![1; 4096]; 4], 8, 0, "ones");
        let data = RunData {
            train: std::sync::Arc::new(train),
            heldout: None,
            tokenizer: None,
            chat: None,
        };
        let device = fox_cpu::device();
        let error = dry_run(&recipe, &data, true, &device).unwrap_err();
        assert!(matches!(error, crate::Error::DataEnd { .. }), "{error}");
        dry_run(&recipe, &data, false, &device).unwrap();
    }

    #[test]
    fn estimated_time_covers_all_steps() {
        let set = ["training.tokens=65536", "schedule.warmup_tokens=0", "data.sequence_length=128"];
        let recipe = recipe::load("tiny-fox-pro", &set.map(String::from)).unwrap();
        let data = RunData::open(&recipe).unwrap();
        let found = dry_run(&recipe, &data, true, &fox_cpu::device()).unwrap();
        let tokens = (recipe.steps() * recipe.tokens_per_step()) as f64;
        assert!((found.seconds * found.tokens_per_second / tokens - 1.0).abs() < 1e-9);
        assert!(found.memory > 16.0 * found.parameters as f64 && found.parameters > 100_000);
    }
}
