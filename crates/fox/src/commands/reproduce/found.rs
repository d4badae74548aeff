//! What is on the disk: figures of runs, and what was measured of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use fox_eval::loss::{LossCurve, LossReport};
use fox_eval::needle::{Mode, NeedleReport};
use fox_train::Summary;
use fox_train::metrics::{MetricsLog, Record};
use fox_train::reproduce::Plan;
use fox_train::sweep::{Bracket, Spread, learning_rate_grid};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::estimate::Speed;
use super::schedule;

/// What says in a run folder that the run diverged.
pub const DIVERGED: &str = "diverged.txt";
/// How long the command was at work, a line each time.
pub const SESSIONS: &str = "sessions.jsonl";

/// Where the measurements of a run go.
pub fn evaluation(out: &Path, run: &str) -> PathBuf {
    out.join("evaluation").join(run)
}

/// The mode of a needle test as the command line has it.
pub fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Easy => "easy",
        Mode::Standard => "standard",
    }
}

/// The loss that runs are compared by: held-out where it was measured, else in training.
pub fn loss(summary: &Summary) -> Option<f64> {
    summary.evaluation.as_ref().map(|e| e.loss).or(summary.train_loss)
}

/// What is known about a run.
pub struct RunFound {
    /// Name of its folder.
    pub folder: String,
    /// Its peak learning rate.
    pub lr: f64,
    /// Its figures, when it is finished.
    pub summary: Option<Summary>,
    /// Whether it diverged.
    pub diverged: bool,
    /// The loss at every position.
    pub curve: Option<LossCurve>,
    /// Needles, easy and standard.
    pub needles: [Option<NeedleReport>; 2],
    /// The JSON of `fox inspect`.
    pub heads: Option<Value>,
    /// What was written down during training.
    pub records: Vec<Record>,
}

impl RunFound {
    /// Held-out loss at the training length.
    pub fn loss(&self) -> Option<f64> {
        loss(self.summary.as_ref()?)
    }

    /// Held-out loss of the second half of the evaluated positions.
    pub fn tail(&self) -> Option<f64> {
        Some(self.summary.as_ref()?.evaluation.as_ref()?.by_position.last()?.loss)
    }
}

/// One session of the command.
pub struct Session {
    /// Seconds from its start to its end.
    pub seconds: f64,
    /// Processes at once.
    pub jobs: f64,
    /// Seconds of training steps, of all runs together.
    pub training: f64,
    /// Seconds of measurements, of all processes together.
    pub measuring: f64,
}

/// Everything that is there.
pub struct Found<'a> {
    /// What was planned.
    pub plan: &'a Plan,
    /// One for every planned run, in order.
    pub runs: Vec<RunFound>,
    /// The searches by model.
    pub rates: BTreeMap<String, Bracket>,
    /// The sessions that came to an end.
    pub sessions: Vec<Session>,
    /// The measured speed.
    pub speed: Option<Speed>,
}

impl<'a> Found<'a> {
    /// Reads what is in the folder of a plan.
    pub fn read(plan: &'a Plan, out: &Path) -> Result<Found<'a>> {
        let rates = schedule::rates(plan, out)?;
        let mut runs = Vec::new();
        for run in &plan.runs {
            let searched = || rates.get(&run.rate)?.best().map(learning_rate_grid);
            let lr = run.lr.or_else(searched).unwrap_or(1e-3);
            let folder = run.folder(lr);
            let path = out.join("runs").join(&folder);
            let measured = evaluation(out, &folder);
            let summary = Summary::read(&path)?.filter(|summary| summary.finished);
            let records = match summary {
                Some(_) => MetricsLog::read(&path)?.records,
                None => Vec::new(),
            };
            let report: Option<LossReport> = read(&measured.join("loss.json"));
            runs.push(RunFound {
                lr,
                diverged: path.join(DIVERGED).exists(),
                summary,
                curve: report.and_then(|report| report.curves.into_iter().next()),
                needles: [Mode::Easy, Mode::Standard]
                    .map(|mode| read(&measured.join(word(mode)).join("needle.json"))),
                heads: read(&measured.join("inspect.json")),
                records,
                folder,
            });
        }
        let speed = read(&out.join("warm-up.json"));
        Ok(Found { plan, runs, rates, sessions: sessions(out), speed })
    }

    /// The finished runs of a row.
    pub fn of(&self, experiment: usize, row: usize) -> impl Iterator<Item = &RunFound> {
        let all = self.plan.runs.iter().zip(&self.runs);
        let same = all.filter(move |(run, _)| (run.experiment, run.row) == (experiment, row));
        same.map(|(_, found)| found)
    }

    /// A figure of a row over its seeds.
    pub fn spread(
        &self,
        experiment: usize,
        row: usize,
        figure: impl Fn(&RunFound) -> Option<f64>,
    ) -> Option<Spread> {
        let values: Vec<f64> = self.of(experiment, row).filter_map(figure).collect();
        Spread::of(&values)
    }

    /// How many of the planned runs are finished or have diverged.
    pub fn over(&self) -> usize {
        self.runs.iter().filter(|run| run.summary.is_some() || run.diverged).count()
    }
}

/// A JSON file, when there is one that can be read.
fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn sessions(out: &Path) -> Vec<Session> {
    let text = fs::read_to_string(out.join(SESSIONS)).unwrap_or_default();
    let session = |line: &str| {
        let json: Value = serde_json::from_str(line).ok()?;
        let number = |key: &str| json[key].as_f64();
        Some(Session {
            seconds: number("seconds")?,
            jobs: number("jobs")?,
            training: number("training")?,
            measuring: number("measuring")?,
        })
    };
    text.lines().filter_map(session).collect()
}
