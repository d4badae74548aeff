//! What a run computes, step after step: learning rate, gradient, update, counters. The
//! [trainer](crate::train) adds what is written down and kept.

use fox_data::Batch;
use fox_model::{ForwardOptions, Model};
use fox_tensor::Gradients;

use crate::checkpoint::RunState;
use crate::optimizer::{StepReport, Updater};
use crate::schedule::Schedule;
use crate::step::{BatchLoss, accumulate};
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
    micro_batch: usize,
}

/// What a step came to.
#[derive(Debug)]
pub struct StepOutcome {
    /// The learning rate it was made with.
    pub lr: f64,
    /// The loss of its batch, before the update.
    pub loss: BatchLoss,
    /// What the optimizer did.
    pub report: StepReport,
}

impl Stepper {
    /// Goes on from these weights, this state of the optimizer and these counters, as the recipe says.
    pub fn new(recipe: &Recipe, model: Model, updater: Updater, state: RunState) -> Self {
        Stepper {
            model,
            updater,
            state,
            schedule: recipe.schedule(),
            options: recipe.forward_options(),
            micro_batch: recipe.micro_batch(),
        }
    }

    /// How the model is run.
    pub fn options(&self) -> &ForwardOptions {
        &self.options
    }

    /// One step. The learning rate is that of the tokens before it, so that of the first step of a warm-up is 0.
    pub fn step(&mut self, batch: &Batch) -> Result<StepOutcome> {
        let lr = self.schedule.lr(self.state.tokens);
        let mut gradients = Gradients::default();
        let micro = self.micro_batch;
        let loss = accumulate(&self.model, batch, micro, &self.options, &mut gradients)?;
        let report = self.updater.step(self.model.params_mut(), gradients, lr)?;
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
