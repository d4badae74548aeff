//! Results of runs and measurements, read from their files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use fox_eval::loss::{LossCurve, LossReport};
use fox_eval::needle::NeedleReport;
use fox_eval::stats::SeedMean;
use fox_train::Summary;
use fox_train::metrics::{MetricsLog, Record, StepRecord};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::estimate::{Speed, last_step};
use super::plan::ALONE_RATE;
use super::{Measurement, PlannedRun, Reproduction, schedule};
use crate::graph::{comparable_loss, diverged};
use crate::search::{Bracket, learning_rate_grid};

/// Log of the durations of all sessions, one JSON object per line.
pub const SESSIONS: &str = "sessions.jsonl";

/// The folder of a run's measurements.
pub fn evaluation(out: &Path, run: &str) -> PathBuf {
    out.join("evaluation").join(run)
}

/// Kinds of needle tests, as their folders are called: both modes, and words that are ranked.
pub const NEEDLES: [&str; 3] = ["easy", "standard", CANDIDATES];
/// The needles whose answer is one word out of several.
pub const CANDIDATES: &str = "candidates";

/// Results of one run.
pub struct RunResults {
    /// Name of its folder.
    pub folder: String,
    /// Its peak learning rate.
    pub lr: f64,
    /// Its summary, once it is finished.
    pub summary: Option<Summary>,
    /// Whether it diverged.
    pub diverged: bool,
    /// Loss by position.
    pub curve: Option<LossCurve>,
    /// Needle tests, in the order of [`NEEDLES`].
    pub needles: [Option<NeedleReport>; 3],
    /// The last steps of the run whose speed was measured with nothing else on the device.
    pub alone: Option<StepRecord>,
    /// The JSON of `fox inspect`.
    pub heads: Option<Value>,
    /// Its metrics log.
    pub records: Vec<Record>,
}

impl RunResults {
    /// Held-out loss at the training length.
    pub fn loss(&self) -> Option<f64> {
        comparable_loss(self.summary.as_ref()?)
    }

    /// The fraction of needles whose right answer is the most likely candidate.
    pub fn recall(&self) -> Option<f64> {
        let cells = &self.needles[2].as_ref()?.maps.first()?.cells;
        let sum = cells.iter().map(|cell| cell.preferred).sum::<Option<f64>>()?;
        Some(sum / cells.len() as f64)
    }

    /// Held-out loss of the second half of the evaluated positions.
    pub fn tail(&self) -> Option<f64> {
        Some(self.summary.as_ref()?.evaluation.as_ref()?.by_position.last()?.loss)
    }
}

/// One execution of the command.
#[derive(serde::Deserialize)]
pub struct Session {
    /// Seconds from its start to its end.
    pub seconds: f64,
    /// Processes at a time.
    pub jobs: f64,
    /// Seconds of training steps, summed over all runs.
    pub training: f64,
    /// Seconds of measurements, summed over all processes.
    pub measuring: f64,
}

/// All results of a reproduction.
pub struct Results<'a> {
    /// The planned runs.
    pub plan: &'a Reproduction,
    /// One per planned run, in order.
    pub runs: Vec<RunResults>,
    /// Learning-rate searches by model.
    pub rates: BTreeMap<String, Bracket>,
    /// Sessions that ended.
    pub sessions: Vec<Session>,
    /// The measured speed.
    pub speed: Option<Speed>,
}

impl<'a> Results<'a> {
    /// Reads the folder of a reproduction.
    pub fn read(plan: &'a Reproduction) -> Result<Results<'a>> {
        let (rates, out) = (schedule::rates(plan)?, &plan.options.out);
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
            runs.push(RunResults {
                lr,
                diverged: diverged(&path)?.is_some(),
                summary,
                curve: report.and_then(|report| report.curves.into_iter().next()),
                needles: NEEDLES.map(|kind| read(&measured.join(kind).join("needle.json"))),
                alone: alone(run, out)?,
                heads: read(&measured.join("inspect.json")),
                records,
                folder,
            });
        }
        let speed = read(&out.join("warm-up.json"));
        Ok(Results { plan, runs, rates, sessions: sessions(out), speed })
    }

    /// The runs of a row.
    pub fn runs_of(&self, experiment: usize, row: usize) -> impl Iterator<Item = &RunResults> {
        let all = self.plan.runs.iter().zip(&self.runs);
        let same = all.filter(move |(run, _)| (run.experiment, run.row) == (experiment, row));
        same.map(|(_, results)| results)
    }

    /// The mean of a figure of a row over its seeds.
    pub fn mean(
        &self,
        experiment: usize,
        row: usize,
        figure: impl Fn(&RunResults) -> Option<f64>,
    ) -> Option<SeedMean> {
        let values: Vec<f64> = self.runs_of(experiment, row).filter_map(figure).collect();
        SeedMean::of(&values)
    }

    /// How many of the planned runs are finished or have diverged.
    pub fn ended(&self) -> usize {
        self.runs.iter().filter(|run| run.summary.is_some() || run.diverged).count()
    }
}

/// The end of a run's short twin, where one was planned and is finished.
fn alone(run: &PlannedRun, out: &Path) -> Result<Option<StepRecord>> {
    if !run.measurements.contains(&Measurement::Speed) {
        return Ok(None);
    }
    let path = out.join("runs").join(run.alone()?.folder(ALONE_RATE));
    if Summary::read(&path)?.is_none() {
        return Ok(None);
    }
    Ok(last_step(&MetricsLog::read(&path)?.records))
}

/// Reads a JSON file; `None` if it is missing or invalid.
fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn sessions(out: &Path) -> Vec<Session> {
    let text = fs::read_to_string(out.join(SESSIONS)).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}
