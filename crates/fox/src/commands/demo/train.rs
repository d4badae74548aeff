//! The two models of the demo.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use fox_data::SyntheticConfig;
use fox_eval::Subject;
use fox_eval::learning::Learning;
use fox_model::Model;
use fox_tensor::Device;
use fox_train::metrics::{MetricsLog, Record};
use fox_train::{Event, Job, recipe, train};

use crate::commands::train::Progress;

/// Training tokens of each model, chosen so that the whole demo takes less than four minutes on two cores.
pub const TOKENS: u64 = 3_600_000;

/// What the demo sets besides: both recipes are made for longer runs.
const CHANGES: [&str; 11] = [
    // Two wide heads find what was said earlier sooner than four narrow ones.
    "model.num_heads=2",
    "model.intermediate_size=256",
    // Few titles that are asked for often, each with many names: looking up is worth learning early.
    "data.synthetic.titles=12",
    "data.synthetic.names_per_title=8",
    "data.synthetic.min_gap=8",
    "data.sequence_length=128",
    "training.batch=16",
    "evaluation.every=0",
    "evaluation.sequences=64",
    "checkpoints.every=500",
    "metrics.details_every=0",
];

/// Tokens of warm-up.
const WARMUP: u64 = 100_000;

/// Which of the two.
#[derive(Clone, Copy)]
pub enum Contestant {
    /// FoX (Pro).
    Fox,
    /// The same layer with RoPE and without a forget gate.
    Transformer,
}

/// A trained model and what is known about its training.
pub struct Trained {
    /// In tables and legends.
    pub name: String,
    /// The recipe it was trained with, and what was set besides.
    pub recipe: &'static str,
    /// Its run folder.
    pub folder: PathBuf,
    /// The model.
    pub model: Model,
    /// Number of parameters.
    pub parameters: usize,
    /// Tokens of a training sequence.
    pub training_length: usize,
    /// The corpus it was trained on.
    pub corpus: SyntheticConfig,
    /// Training loss: tokens seen and loss.
    pub learning: Learning,
    /// Held-out loss: tokens seen and loss.
    pub heldout: Vec<(f64, f64)>,
    /// Training time.
    pub seconds: f64,
    /// Training speed.
    pub tokens_per_second: f64,
    /// Median over the steps of the time the matrix products alone would take, over the time taken.
    pub floor_fraction: f64,
    /// Whether training came to its end.
    pub finished: bool,
}

impl Trained {
    /// For the evaluation.
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            name: &self.name,
            model: &self.model,
            training_length: Some(self.training_length),
        }
    }
}

impl Contestant {
    /// What only this model has set: its idea of position, made for sequences of this length.
    fn change(self) -> &'static str {
        match self {
            // Gates that begin half open hide everything but the last few tokens for most of the demo.
            Contestant::Fox => "training.gate_memory=[128, 128]",
            Contestant::Transformer => "model.rope_base=10000.0",
        }
    }

    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Contestant::Fox => ("FoX", "tiny-fox-pro", "fox"),
            Contestant::Transformer => {
                ("Transformer (RoPE)", "tiny-transformer-pro", "transformer")
            }
        }
    }

    /// Trains it, or goes on with a run that was stopped.
    pub fn train(
        self,
        out: &Path,
        tokens: u64,
        device: &Device,
        stop: &AtomicBool,
    ) -> Result<Trained> {
        let (name, recipe_name, folder) = self.names();
        let mut changes: Vec<String> = CHANGES.map(String::from).to_vec();
        changes.extend([
            self.change().to_string(),
            format!("training.tokens={tokens}"),
            format!("schedule.warmup_tokens={}", tokens.min(WARMUP)),
        ]);
        let recipe = recipe::load(recipe_name, &changes)?;
        let (training_length, corpus) = (recipe.data.sequence_length, recipe.data.synthetic);
        let folder = out.join(folder);
        let job = Job {
            recipe,
            out: folder.clone(),
            device: device.clone(),
            command: std::env::args().collect(),
        };
        let mut progress = Progress::new(false);
        let outcome = train(&job, &mut |event: &Event<'_>| {
            progress.show(event);
            if stop.load(Ordering::Relaxed) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        progress.finish();
        let (mut losses, mut heldout, mut floors) = (Vec::new(), Vec::new(), Vec::new());
        for record in MetricsLog::read(&folder)?.records {
            match record {
                Record::Train(step) => {
                    losses.extend(step.loss.map(|loss| (step.tokens as f64, loss)));
                    floors.push(step.floor_fraction);
                }
                Record::Eval(eval) => heldout.push((eval.tokens as f64, eval.evaluation.loss)),
            }
        }
        floors.sort_by(f64::total_cmp);
        let summary = outcome.summary;
        Ok(Trained {
            name: name.to_string(),
            recipe: recipe_name,
            folder,
            parameters: outcome.model.params().count(),
            model: outcome.model,
            training_length,
            corpus,
            learning: Learning { model: name.to_string(), losses },
            heldout,
            seconds: summary.seconds,
            tokens_per_second: summary.tokens_per_second,
            floor_fraction: fox_eval::stats::quantile(&floors, 0.5),
            finished: summary.finished,
        })
    }
}
