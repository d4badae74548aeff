//! An estimate of the time: the throughput of a short run, scaled by the FLOPs of every run.

use std::fs;
use std::sync::Arc;

use anyhow::{Result, bail};
use fox_eval::files::write_whole;
use fox_tensor::Device;
use fox_train::metrics::{MetricsLog, Record, StepRecord};
use serde::{Deserialize, Serialize};

use super::plan::ALONE_RATE;
use super::{Measurement, PlannedRun, Reproduction};
use crate::graph::{Experiment, Node, NodeId, RunGraph, RunOutcome};
use crate::{Scheduler, output};

/// Approximate number of runs of a learning-rate search.
const RUNS_PER_SEARCH: f64 = 4.0;

/// Seconds of a run outside of its steps, where they were not measured.
const AROUND: f64 = 2.0;

/// The measured throughput.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Speed {
    /// Tokens per second of the base model in training.
    pub tokens_per_second: f64,
    /// Seconds of a run outside of its steps: start, data, evaluation, files.
    pub around: f64,
    /// The device.
    pub device: String,
}

impl Speed {
    /// From the throughput of steps alone.
    pub(crate) fn from_steps(tokens_per_second: f64, device: &Device) -> Speed {
        Speed { tokens_per_second, around: AROUND, device: device.to_string() }
    }
}

/// What the experiments would take.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    /// The measured throughput.
    pub speed: Speed,
    /// The recipe that was measured.
    pub measured: String,
    /// Every experiment.
    pub experiments: Vec<ExperimentEstimate>,
}

/// What an experiment would take.
#[derive(Clone, Debug, Serialize)]
pub struct ExperimentEstimate {
    /// Its name.
    pub name: String,
    /// Training runs.
    pub runs: u64,
    /// Tokens of all runs.
    pub tokens: u64,
    /// Seconds of all runs.
    pub seconds: f64,
}

/// A list of all runs with their tokens.
pub fn runs(plan: &Reproduction) -> String {
    let mut text = String::new();
    for (e, experiment) in plan.experiments.iter().enumerate() {
        let all = plan.searches.iter().chain(&plan.runs);
        let runs: Vec<&PlannedRun> = all.filter(|run| run.experiment == e).collect();
        if !runs.is_empty() {
            text += &format!("{}: {}\n", experiment.name, experiment.title);
        }
        for run in runs {
            let name = &experiment.rows[run.row].name;
            let tokens = output::grouped(run.tokens);
            text += &format!("  {name}, seed {}: {}, {tokens} tokens\n", run.seed, run.spec);
        }
    }
    text
}

/// Trains the first model for a few steps to measure the throughput; `None` when it was stopped. A result that is on
/// file is used again.
pub fn warm_up(
    plan: &Reproduction,
    scheduler: &Scheduler,
    device: &[String],
) -> Result<Option<Speed>> {
    let out = &plan.options.out;
    let file = out.join("warm-up.json");
    let known = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(speed) = known {
        return Ok(Some(speed));
    }
    let Some(planned) = base(plan) else { bail!("there is nothing to train") };
    let mut run = planned.alone()?.train_run(ALONE_RATE, &plan.options);
    (run.label, run.folder) = ("warm-up".into(), out.join("warm-up"));
    let folder = run.folder.clone();
    let mut graph = RunGraph::default();
    let node = graph.add(Node::train(run))?;
    let mut timer = Timer::default();
    let (quiet, stop) = (scheduler.quiet, Arc::clone(&scheduler.stop));
    let scheduler = Scheduler { jobs: 1, device: device.to_vec(), quiet, stop };
    scheduler.run(&mut graph, &mut timer)?;
    match &graph.node(node).outcome {
        None => return Ok(None),
        Some(RunOutcome::Finished) => {}
        Some(RunOutcome::Diverged(why) | RunOutcome::Failed(why)) => bail!("{why}"),
    }
    let Some(last) = last_step(&MetricsLog::read(&folder)?.records) else {
        bail!("{} has no metrics", folder.display())
    };
    let start: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("run.json"))?)?;
    let speed = Speed {
        tokens_per_second: last.tokens_per_second,
        around: (timer.seconds - last.seconds).max(0.0),
        device: start["starts"][0]["device"].as_str().unwrap_or_default().to_string(),
    };
    write_whole(&file, &serde_json::to_vec_pretty(&speed)?)?;
    Ok(Some(speed))
}

/// The last step of a log.
pub(crate) fn last_step(records: &[Record]) -> Option<StepRecord> {
    records.iter().rev().find_map(|record| match record {
        Record::Train(step) => Some(step.clone()),
        Record::Eval(_) => None,
    })
}

/// The run whose model is measured.
fn base(plan: &Reproduction) -> Option<&PlannedRun> {
    plan.searches.first().or(plan.runs.first())
}

/// Runs, tokens and time of every experiment.
pub fn estimate(plan: &Reproduction, speed: &Speed, vocab: usize, jobs: usize) -> Result<Estimate> {
    let Some(first) = base(plan) else { bail!("there is nothing to train") };
    let flops = |run: &PlannedRun, length: Option<usize>| -> Result<f64> {
        let recipe = run.recipe(1e-3)?;
        let config = recipe.model_config(vocab)?;
        Ok(config.train_flops_per_token(length.unwrap_or(recipe.data.sequence_length)))
    };
    let rate = speed.tokens_per_second * flops(first, None)?;
    let held_out_tokens = (plan.scale.length as u64 * plan.scale.documents) as f64;
    let seconds = |run: &PlannedRun| -> Result<f64> {
        let steps = run.tokens as f64 * flops(run, None)? / rate;
        let mut around = speed.around / jobs as f64;
        let mut evaluation = 0.0;
        for measurement in &run.measurements {
            // A run alone on the device uses one job.
            let jobs = if *measurement == Measurement::Speed { 1 } else { jobs };
            around += speed.around / jobs as f64;
            if *measurement == Measurement::Loss {
                // A forward pass has a third of the FLOPs of a step.
                evaluation += held_out_tokens * flops(run, Some(plan.scale.length))? / 3.0 / rate;
            }
        }
        Ok(steps + evaluation + around)
    };
    let mut experiments = Vec::new();
    for (e, experiment) in plan.experiments.iter().enumerate() {
        let (mut runs, mut time, mut tokens) = (0, 0.0, 0);
        for run in plan.searches.iter().filter(|run| run.experiment == e) {
            time += RUNS_PER_SEARCH * seconds(run)?;
            runs += RUNS_PER_SEARCH as u64;
            tokens += RUNS_PER_SEARCH as u64 * run.tokens;
        }
        for run in plan.runs.iter().filter(|run| run.experiment == e) {
            time += seconds(run)?;
            runs += 1;
            tokens += run.tokens;
        }
        let name = experiment.name.clone();
        experiments.push(ExperimentEstimate { name, runs, tokens, seconds: time });
    }
    Ok(Estimate { speed: speed.clone(), measured: first.spec.clone(), experiments })
}

impl Estimate {
    /// Runs, tokens and minutes of every experiment, and in total.
    pub fn table(&self) -> String {
        let mut rows = vec![["experiment", "runs", "tokens", "minutes"].map(String::from).to_vec()];
        rows.extend(self.experiments.iter().map(|e| row(&e.name, e.runs, e.tokens, e.seconds)));
        let all = self.experiments.iter();
        let total = all.fold((0, 0, 0.0), |(runs, tokens, seconds), e| {
            (runs + e.runs, tokens + e.tokens, seconds + e.seconds)
        });
        rows.push(row("total", total.0, total.1, total.2));
        format!(
            "estimate from {} tokens/s of {} on {}, without needles and with about {RUNS_PER_SEARCH} rates a search:\n{}",
            output::grouped(self.speed.tokens_per_second.round() as u64),
            self.measured,
            self.speed.device,
            output::table(&rows)
        )
    }
}

fn row(name: &str, runs: u64, tokens: u64, seconds: f64) -> Vec<String> {
    let minutes = format!("{:.1}", seconds / 60.0);
    vec![name.to_string(), runs.to_string(), output::grouped(tokens), minutes]
}

/// Measures the time of the only node of a graph.
#[derive(Default)]
struct Timer {
    seconds: f64,
}

impl Experiment for Timer {
    fn update(&mut self, _: &mut RunGraph, ended: Option<(NodeId, f64)>) -> Result<()> {
        self.seconds = ended.map_or(0.0, |(_, seconds)| seconds);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::{ReproductionOptions, ScaleConfig};

    /// Estimated minutes of a plan with one run.
    fn minutes(plan: &mut Reproduction, measurements: &[Measurement], around: f64) -> f64 {
        plan.runs[0].measurements = measurements.to_vec();
        // A minute of training.
        let tokens_per_second = plan.runs[0].tokens as f64 / 60.0;
        let speed = Speed { tokens_per_second, around, device: "a device".into() };
        let text = estimate(plan, &speed, 261, 2).unwrap().table();
        text.trim_end().rsplit([' ', '|']).find(|word| !word.is_empty()).unwrap().parse().unwrap()
    }

    #[test]
    fn measuring_loss_costs_a_third_of_training() {
        let scale = ScaleConfig::load("laptop").unwrap();
        let options =
            ReproductionOptions { only: vec!["main".into()], ..ReproductionOptions::default() };
        let mut plan = Reproduction::new(scale, options).unwrap();
        plan.searches.clear();
        plan.runs.truncate(1);
        let length = plan.runs[0].recipe(1e-3).unwrap().data.sequence_length;
        plan.scale.length = length;
        plan.scale.documents = 3 * plan.runs[0].tokens / length as u64;
        assert_eq!(minutes(&mut plan, &[], 0.0), 1.0);
        assert_eq!(minutes(&mut plan, &[Measurement::Loss], 0.0), 2.0);
        // Start-up time of the training and of the measurement is divided by the number of jobs.
        assert_eq!(minutes(&mut plan, &[Measurement::Loss], 120.0), 4.0);
    }
}
