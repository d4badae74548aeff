//! What a run computes, step after step: learning rate, gradient, update, counters. The
//! [trainer](crate::train) adds what is written down and kept.

use fox_data::Batch;
use fox_dist::Group;
use fox_dist::context::{Context, Traffic};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Dropout, Gradients, RowNumbers, WeightFormat};

use crate::checkpoint::RunState;
use crate::masking::Masking;
use crate::optimizer::{StepReport, Updater};
use crate::overlapped_reduce::OverlappedReduce;
use crate::recipe::{Exchange, Reduction, TrainingRecipe};
use crate::schedule::Schedule;
use crate::step::{BatchLoss, RankShard, ShardLoss, add_traffic, gradient_with};
use crate::{Recipe, Result};

/// A model in training.
#[derive(Debug)]
pub struct Stepper {
    /// The weights.
    pub model: Model,
    /// The optimizer with its state.
    pub updater: Updater,
    /// The counters.
    pub state: RunState,
    schedule: Schedule,
    options: ForwardOptions,
    training: TrainingRecipe,
    portion: RankShard,
    early: OverlappedReduce,
    /// Of encoders.
    masking: Option<Masking>,
    /// Tokens in a sequence of the last stage, which the portion is counted in.
    length: usize,
}

/// What a step came to.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutcome {
    /// The learning rate it was made with.
    pub lr: f64,
    /// The loss of its batch, before the update.
    pub loss: BatchLoss,
    /// What the optimizer did.
    pub report: StepReport,
}

impl Stepper {
    /// Creates a stepper from weights, optimizer state and counters, initial or of a checkpoint.
    pub fn new(
        recipe: &Recipe,
        model: Model,
        mut updater: Updater,
        state: RunState,
    ) -> Result<Self> {
        let reduction = recipe.training.reduction;
        updater.set_rates(recipe.training.rate_factors(model.params()));
        if reduction == Reduction::Tree {
            updater.sum_norm_by_parameter();
        }
        let group = updater.group();
        let context = Context::new(group, recipe.parallel.context)?;
        let context = match recipe.parallel.keys {
            Exchange::Device => context,
            Exchange::Host => context.through_host(),
        };
        let own = recipe.training.batch / (group.size() / context.size());
        let rows = context.number() * own..(context.number() + 1) * own;
        let context = Some(context).filter(|context| context.size() > 1);
        let early = OverlappedReduce::new(&updater, recipe.parallel.bucket);
        Ok(Stepper {
            early,
            masking: recipe.masking(model.config())?,
            model,
            updater,
            state,
            schedule: recipe.schedule(),
            options: recipe.forward_options(),
            training: recipe.training.clone(),
            portion: RankShard { rows, context, micro_batch: recipe.micro_batch(), reduction },
            length: recipe.data.sequence_length,
        })
    }

    /// Dropout of the next step: its masks follow from the seed of the run, the number of the step and the position in
    /// the batch.
    fn dropout(&self) -> Option<Dropout> {
        let TrainingRecipe { dropout: rate, seed, .. } = self.training;
        let step = Dropout { rate, seed, rows: RowNumbers::from(0) }.of_tensor(self.state.step);
        (rate > 0.0).then_some(step)
    }

    /// How the model is evaluated after the steps so far: without dropout.
    pub(crate) fn options_now(&self) -> ForwardOptions {
        let rope_strength = self.training.rope_strength(self.state.tokens);
        ForwardOptions { rope_strength, ..self.options }
    }

    fn gradient(&mut self, batch: &Batch) -> Result<(Gradients, ShardLoss)> {
        let options = ForwardOptions { dropout: self.dropout(), ..self.options_now() };
        let portion = self.portion.of_stage(self.length / batch.time);
        let found = gradient_with(&self.model, batch, &portion, &options, &mut self.early);
        found.map_err(|error| self.updater.weights_failure().unwrap_or(error))
    }

    /// One step. The learning rate is that of the tokens before it, so that of the first step of a warm-up is 0.
    pub fn step(&mut self, batch: &Batch) -> Result<StepOutcome> {
        let lr = self.schedule.lr(self.state.tokens);
        let masked = self.masking.map(|masking| masking.batch(batch, self.state.step));
        let batch = masked.as_ref().unwrap_or(batch);
        let (gradients, own) = self.gradient(batch)?;
        let group = self.updater.group().clone();
        // Part by part, in the order of the rows: the same sum for any number of processes.
        let sum = group.all_numbers(&own.sums)?.into_iter().fold(0.0, |sum, part| sum + part);
        let labelled = batch.labelled();
        let mean = sum / labelled.max(1) as f64;
        let traffic = all_traffic(&group, &own.traffic)?;
        let loss = BatchLoss { mean, labelled, tiles: own.tiles, traffic };
        let report = self.updater.step(self.model.params_mut(), gradients, lr)?;
        if group.size() > 1 {
            // What came from the others is as it was sent.
            self.model.pack_weights(WeightFormat::F32)?;
        }
        let state = &mut self.state;
        state.step += 1;
        state.tokens += batch.inputs.len() as u64;
        state.loader = batch.state;
        state.updates = self.updater.updates();
        state.skips_in_a_row = if report.skipped { state.skips_in_a_row + 1 } else { 0 };
        state.skips += u64::from(report.skipped);
        Ok(StepOutcome { lr, loss, report })
    }
}

/// What came to all processes, layer by layer. All of them have as many layers, or none that shares sequences.
fn all_traffic(group: &Group, own: &[Traffic]) -> Result<Vec<Traffic>> {
    let mut sum = Vec::new();
    if own.is_empty() {
        return Ok(sum);
    }
    let numbers: Vec<f64> = own.iter().flat_map(|t| [t.fetched as f64, t.full as f64]).collect();
    for part in group.all_numbers(&numbers)?.chunks(numbers.len()) {
        let traffic = |pair: &[f64]| Traffic { fetched: pair[0] as u64, full: pair[1] as u64 };
        add_traffic(&mut sum, &part.chunks(2).map(traffic).collect::<Vec<_>>());
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::RunData;

    #[test]
    fn traffic_is_summed_over_ranks() {
        let own = [Traffic { fetched: 3, full: 5 }, Traffic { fetched: 1, full: 8 }];
        let all = all_traffic(&Group::alone(), &own).unwrap();
        let pairs: Vec<_> = all.iter().map(|t| (t.fetched, t.full)).collect();
        assert_eq!(pairs, [(3, 5), (1, 8)]);
        assert!(all_traffic(&Group::alone(), &[]).unwrap().is_empty());
    }

    /// A tiny model with its first batch of four rows, `micro` rows at a time.
    fn stepper(micro: usize, dropout: f32) -> (Stepper, Batch) {
        let set = ["training.batch=4", "data.sequence_length=32", "model.num_hidden_layers=1"];
        let mut set = set.map(String::from).to_vec();
        set.push(format!("training.micro_batch={micro}"));
        set.push(format!("training.dropout={dropout:?}"));
        let recipe = crate::recipe::load("tiny-fox-pro", &set).unwrap();
        let data = RunData::open(&recipe).unwrap();
        let (device, loader) = (fox_cpu::device(), data.loader(&recipe).unwrap());
        let config = recipe.model_config(data.train.vocab_size()).unwrap();
        let model = recipe.initial_model(&config, &device).unwrap();
        let updater = Updater::new(&recipe.optimizer, None, model.params(), &device).unwrap();
        let state = RunState::start(loader.state_at(0));
        let stepper = Stepper::new(&recipe, model, updater, state).unwrap();
        (stepper, loader.batch(0).unwrap())
    }

    fn loss(micro: usize, dropout: f32) -> f64 {
        let (mut stepper, batch) = stepper(micro, dropout);
        stepper.step(&batch).unwrap().loss.mean
    }

    #[test]
    fn dropout_depends_on_step_and_seed() {
        let (mut plain, batch) = stepper(4, 0.0);
        let (mut other, _) = stepper(4, 0.2);
        let loss = |stepper: &mut Stepper| stepper.step(&batch).unwrap().loss.mean;
        // The learning rate of the first step is 0: the second has the same weights.
        let plain = [loss(&mut plain), loss(&mut plain)];
        assert_eq!(plain[0], plain[1]);
        let dropped = [loss(&mut other), loss(&mut other)];
        assert!(dropped[0] != plain[0] && dropped[0] != dropped[1], "{plain:?} {dropped:?}");
        let (mut seeded, _) = stepper(4, 0.2);
        seeded.training.seed = 1;
        assert_ne!(loss(&mut seeded), dropped[0]);
        assert_eq!(other.options_now().dropout, None, "of evaluations");
    }

    #[test]
    fn update_resets_consecutive_skips() {
        let (mut stepper, batch) = stepper(4, 0.0);
        let head = stepper.model.params().find("lm_head.weight").unwrap();
        let healthy = stepper.model.params().value(head).clone();
        let mut counts = Vec::new();
        for skips in [true, true, false, true, false, false] {
            let broken = healthy.device().full(healthy.shape(), f32::NAN).unwrap();
            let head_now = stepper.model.params().value(head).clone();
            if skips {
                stepper.model.params_mut().set(head, broken).unwrap();
            }
            assert_eq!(stepper.step(&batch).unwrap().report.skipped, skips);
            if skips {
                stepper.model.params_mut().set(head, head_now).unwrap();
            }
            let RunState { step, updates, skips, skips_in_a_row, .. } = stepper.state;
            counts.push((step, updates, skips, skips_in_a_row));
        }
        let want =
            [(1, 0, 1, 1), (2, 0, 2, 2), (3, 1, 2, 0), (4, 1, 3, 1), (5, 2, 3, 0), (6, 3, 3, 0)];
        assert_eq!(counts, want);
    }

    #[test]
    fn loss_is_independent_of_micro_batch() {
        for dropout in [0.0, 0.2] {
            let whole = loss(4, dropout);
            for micro in [1, 2, 3] {
                let parts = loss(micro, dropout);
                assert!((parts / whole - 1.0).abs() < 1e-6, "{micro}: {parts} {whole}");
            }
        }
    }
}
