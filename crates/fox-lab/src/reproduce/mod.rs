//! The experiments of the paper on one machine, in one report.
//!
//! `recipes/reproduce/*.toml` are the experiments, `recipes/reproduce/scales/*.toml` the scales; `README.md` there
//! explains their keys. A [`Reproduction`] turns both into runs. Runs that several experiments need are the same run.
//!
//! ```text
//! OUT/plan.json           settings
//! OUT/held-out.jsonl      held-out text in segments, and OUT/held-out/ the same as prepared data
//! OUT/warm-up.json        the measured throughput
//! OUT/runs/RUN/           a run folder each
//! OUT/starts/RUN/         weights of a run with forget gates added, from which other runs start
//! OUT/evaluation/RUN/     measurements of a run
//! OUT/sessions.jsonl      durations of the command
//! OUT/report.{md,html,json}, OUT/pictures/*.svg
//! ```

mod estimate;
mod experiment;
mod held_out;
mod plan;
mod report;
mod results;
mod scale;
mod schedule;
mod settings;
mod start;

pub use estimate::{Estimate, ExperimentEstimate, Speed};
pub use experiment::{Claim, Experiment, Figure, Layout, Measurement, RowConfig, StartConfig};
pub(crate) use experiment::{EXPERIMENTS, RATES};
pub use plan::{PlannedRun, Reproduction, ReproductionOptions};
pub use scale::{Needles, ScaleConfig};
pub use settings::Settings;
pub use start::PlannedStart;

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, anyhow, bail};
use fox_base::durable;
use fox_tensor::Device;
use fox_train::Recipe;
use fox_train::data::RunData;
use fox_train::recipe::DataRecipe;
use serde::de::DeserializeOwned;

use crate::graph::RunGraph;
use crate::{Scheduler, output};
use held_out::HeldOutSegments;
use results::Results;
use schedule::Schedule;

/// How a reproduction ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Whether it came to its end; otherwise it was stopped.
    pub complete: bool,
    /// The main results for the terminal, if a report was written.
    pub summary: Option<String>,
    /// Labels and messages of commands that failed.
    pub failures: Vec<(String, String)>,
}

/// What all experiments would take.
#[derive(Debug)]
pub struct DryRun {
    /// A list of all runs with their tokens.
    pub runs: String,
    /// Runs, tokens and time of every experiment, or why none can be estimated.
    pub estimate: Result<Estimate>,
}

impl DryRun {
    /// For a terminal.
    pub fn text(&self) -> String {
        let estimate = match &self.estimate {
            Ok(estimate) => estimate.table(),
            Err(error) => format!("no estimate of the time: {}\n", output::error_message(error)),
        };
        format!("{}{estimate}", self.runs)
    }
}

/// Estimates runs, tokens and time of all experiments from a few steps that are not kept. Nothing is written.
pub fn dry_run(settings: &Settings, out: &Path, jobs: usize, device: &Device) -> Result<DryRun> {
    let plan = settings.plan(out)?;
    let estimate = || -> Result<Estimate> {
        let (recipe, data) = first_run(&plan)?;
        let measured = fox_train::dry_run(&recipe, &data, true, device)?;
        let speed = Speed::from_steps(measured.tokens_per_second, device);
        estimate::estimate(&plan, &speed, data.train.vocab_size(), jobs)
    };
    Ok(DryRun { runs: estimate::runs(&plan), estimate: estimate() })
}

/// The recipe of the first run, without the held-out segments that are cut later, and its data.
fn first_run(plan: &Reproduction) -> Result<(Recipe, RunData)> {
    let Some(first) = plan.searches.first().or(plan.runs.first()) else {
        bail!("there is nothing to train; name other experiments");
    };
    let mut recipe = first.train_run(1e-3, &plan.options).recipe()?;
    recipe.data = DataRecipe { heldout: None, ..recipe.data };
    let data = RunData::open(&recipe)?;
    Ok((recipe, data))
}

/// Writes the report again from the files in a folder.
pub fn write_report(out: &Path) -> Result<()> {
    let settings = Settings::read(out)?;
    let plan = settings.plan(out)?;
    report::write(&settings, &Results::read(&plan)?, out)
}

/// Trains and measures whatever is missing in `out`, and writes the report, also when it is stopped. `warm_up_device`
/// are the device arguments of a single process.
pub fn run(
    settings: &Settings,
    out: &Path,
    scheduler: &Scheduler,
    warm_up_device: &[String],
) -> Result<Outcome> {
    let plan = settings.plan(out)?;
    let joined = settings.joined(out)?;
    // The data are validated before anything is written.
    let (recipe, data) = first_run(&plan)?;
    data.loader(&recipe)?;
    let segments = HeldOutSegments::cut(&data, settings.data.as_deref(), &plan.scale)?;
    durable::create_folder(out)?;
    joined.write(out)?;
    if let Some(segments) = segments {
        segments.write(out)?;
    }

    let start = Instant::now();
    let Some(speed) = estimate::warm_up(&plan, scheduler, warm_up_device)? else {
        return Ok(Outcome::default());
    };
    let vocab = data.train.vocab_size();
    output::note(&estimate::estimate(&plan, &speed, vocab, scheduler.jobs)?.table());
    let mut schedule = Schedule::new(&plan, vocab, scheduler.quiet)?;
    let mut graph = RunGraph::default();
    let complete = scheduler.run(&mut graph, &mut schedule);
    schedule.log_session(start.elapsed().as_secs_f64(), scheduler.jobs, &speed)?;
    let complete = complete?;
    let joined_plan = joined.plan(out)?;
    let results = Results::read(&joined_plan)?;
    report::write(&joined, &results, out)?;
    let summary = Some(report::summary(&results));
    let failures = graph.failures().map(|(label, why)| (label.to_string(), why.to_string()));
    Ok(Outcome { complete, summary, failures: failures.collect() })
}

/// Parses a TOML text; an error names the file.
pub(crate) fn read_toml<T: DeserializeOwned>(file: &str, text: &str) -> Result<T> {
    toml::from_str(text).map_err(|e| {
        let detail = e.message().split_whitespace().collect::<Vec<_>>().join(" ");
        fox_train::Error::Toml { file: file.into(), detail }.into()
    })
}

/// The error for an unknown name.
fn unknown<'a>(kind: &str, name: &str, known: impl Iterator<Item = &'a str>) -> anyhow::Error {
    let known: Vec<&str> = known.collect();
    anyhow!("there is no {kind} `{name}`; choose from {}", known.join(", "))
}
