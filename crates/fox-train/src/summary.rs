//! The figures of a run, for people and for tables.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checkpoint::RunState;
use crate::evaluate::Evaluation;
use crate::metrics::{MetricsLog, Record};
use crate::run_spec::Start;
use crate::{Error, Result, files};

const FILE: &str = "summary.json";
/// The run's training loss is the mean over its last tenth, but over no more lines of the log than this.
const MOST_LINES: usize = 50;

/// The figures of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
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
    /// Its loss in bits per byte of text, where the data are text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// The evaluation with the lowest loss; missing in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowest: Option<LowestLoss>,
    /// Steps left out because their gradient was not finite.
    pub skips: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// Over the whole run.
    pub tokens_per_second: f64,
}

/// The lowest held-out loss of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LowestLoss {
    /// Tokens consumed before it was measured.
    pub tokens: u64,
    /// Mean loss in nats per token.
    pub loss: f64,
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
        let evaluated = records.iter().filter_map(|record| match record {
            Record::Eval(eval) => {
                Some(LowestLoss { tokens: eval.tokens, loss: eval.evaluation.loss })
            }
            Record::Train(_) => None,
        });
        let lowest = evaluated.min_by(|a, b| a.loss.total_cmp(&b.loss));
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        Ok(Summary {
            recipe: start.recipe.clone(),
            finished,
            parameters: start.parameters,
            steps: state.step,
            tokens: state.tokens,
            train_loss: (!losses.is_empty()).then_some(mean),
            evaluation,
            bits_per_byte: None,
            lowest,
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

    /// Removes the summary, where there is one.
    pub(crate) fn remove(run: &Path) -> Result<()> {
        let path = run.join(FILE);
        match path.exists() {
            true => Ok(std::fs::remove_file(&path).map_err(Error::io("remove", &path))?),
            false => Ok(()),
        }
    }

    /// The summary of a finished run; `None` when the folder has none yet.
    pub fn read(run: &Path) -> Result<Option<Summary>> {
        let path = run.join(FILE);
        if path.exists() { files::read_json(&path).map(Some) } else { Ok(None) }
    }
}

#[cfg(test)]
mod tests {
    use fox_data::LoaderState;

    use super::*;
    use crate::metrics::StepRecord;

    #[test]
    fn training_loss_is_mean_of_last_tenth() {
        let start = Start {
            recipe: "r".into(),
            parameters: 1,
            steps: 1,
            tokens_per_step: 1,
            from_step: 0,
            gemm_rate: 1.0,
            device: "d".into(),
            processes: 1,
            link: None,
            exchange: None,
            data: "d".into(),
            epoch_tokens: None,
        };
        let state = RunState::start(LoaderState { next_batch: 0, fingerprint: 0 });
        // The loss of a line is its number.
        for (lines, first) in [(1, 1), (25, 23), (100, 91), (600, 551)] {
            let run = tempfile::tempdir().unwrap();
            let mut log = MetricsLog::open(run.path(), 0).unwrap().0;
            for step in 1..=lines {
                let loss = Some(step as f64);
                log.write(&Record::Train(StepRecord { step, loss, ..Default::default() })).unwrap();
            }
            let summary = Summary::collect(&start, &state, true, run.path()).unwrap();
            assert_eq!(summary.train_loss, Some((first + lines) as f64 / 2.0), "{lines} lines");
        }
    }
}
