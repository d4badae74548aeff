//! The figures of a run, for people and for tables.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checkpoint::RunState;
use crate::evaluate::Evaluation;
use crate::job::Start;
use crate::metrics::{MetricsLog, Record};
use crate::{Result, files};

const FILE: &str = "summary.json";
/// The run's training loss is the mean over its last tenth, but over no more lines of the log than this.
const MOST_LINES: usize = 50;

/// The figures of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Name or file of the recipe.
    pub recipe: String,
    /// Whether it came to its end.
    pub finished: bool,
    /// Number of parameters.
    pub parameters: usize,
    /// Steps done.
    pub steps: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Mean loss of the last tenth of the run, in nats per token.
    pub train_loss: Option<f64>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// Steps left out because their gradient was not finite.
    pub skips: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// Over the whole run.
    pub tokens_per_second: f64,
}

impl Summary {
    pub(crate) fn collect(
        start: &Start,
        state: &RunState,
        finished: bool,
        run: &Path,
    ) -> Result<Summary> {
        let records = MetricsLog::read(run)?.records;
        let all: Vec<f64> = records
            .iter()
            .filter_map(|record| match record {
                Record::Train(step) => step.loss,
                Record::Eval(_) => None,
            })
            .collect();
        let losses = &all[all.len() - all.len().div_ceil(10).min(MOST_LINES)..];
        let evaluation = records.iter().rev().find_map(|record| match record {
            Record::Eval(eval) => Some(eval.evaluation.clone()),
            Record::Train(_) => None,
        });
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        Ok(Summary {
            recipe: start.recipe.clone(),
            finished,
            parameters: start.parameters,
            steps: state.step,
            tokens: state.tokens,
            train_loss: (!losses.is_empty()).then_some(mean),
            evaluation,
            skips: state.skips,
            seconds: state.seconds,
            tokens_per_second: if state.seconds > 0.0 {
                state.tokens as f64 / state.seconds
            } else {
                0.0
            },
        })
    }

    pub(crate) fn write(&self, run: &Path) -> Result<()> {
        files::write_json(&run.join(FILE), self)
    }

    /// The summary of a finished run; `None` when the folder has none yet.
    pub fn read(run: &Path) -> Result<Option<Summary>> {
        let path = run.join(FILE);
        if path.exists() { files::read_json(&path).map(Some) } else { Ok(None) }
    }
}
