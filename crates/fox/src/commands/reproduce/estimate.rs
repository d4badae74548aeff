//! How long it will take: a measured speed, and the arithmetic of every run.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use fox_eval::files::write_whole;
use fox_train::metrics::{MetricsLog, Record};
use fox_train::reproduce::{Measure, Plan, PlannedRun};
use fox_train::sweep::Ended;
use serde::{Deserialize, Serialize};

use crate::commands::sweep::training;
use crate::output;
use crate::pool::{Pool, Task, Work};

/// Steps of the warm-up.
const STEPS: u64 = 12;
/// Runs of a search, about.
const SEARCHED: f64 = 4.0;

/// What the warm-up measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Speed {
    /// Tokens per second of the base model in training.
    pub tokens_per_second: f64,
    /// Seconds of a run besides its steps: start, data, evaluation, files.
    pub around: f64,
    /// Where it was measured.
    pub device: String,
}

/// The runs and tokens of every experiment.
pub fn runs(plan: &Plan) -> String {
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

/// Trains the first model for a few steps; `None` when it was stopped. What is on file is not measured again.
pub fn warm_up(plan: &Plan, out: &Path, pool: &Pool, device: &[String]) -> Result<Option<Speed>> {
    let file = out.join("warm-up.json");
    let known = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(speed) = known {
        return Ok(Some(speed));
    }
    let Some(run) = base(plan) else { bail!("nothing is to be trained") };
    let lr = 1e-4;
    let recipe = run.recipe(lr, plan.options.data.as_deref())?;
    let folder = out.join("warm-up");
    let mut settings = run.settings(lr);
    settings.extend([
        format!("training.tokens={}", STEPS * recipe.tokens_per_step()),
        "schedule.warmup_tokens=0".into(),
        "metrics.every=4".into(),
        "metrics.details_every=0".into(),
        "checkpoints.every=0".into(),
    ]);
    let mut arguments = training(&run.spec, &settings, plan.options.data.as_deref(), &folder);
    arguments.extend(device.iter().cloned());
    let mut work = Once { task: Some(arguments), ended: None };
    pool.run(&mut work)?;
    let seconds = match work.ended {
        None => return Ok(None),
        Some((Ended::Well, seconds)) => seconds,
        Some((Ended::Diverged(why) | Ended::Failed(why), _)) => bail!("{why}"),
    };
    let records = MetricsLog::read(&folder)?.records;
    let mut steps = records.iter().rev().filter_map(|record| match record {
        Record::Train(step) => Some(step),
        Record::Eval(_) => None,
    });
    let Some(last) = steps.next() else { bail!("the warm-up left no figures") };
    let start: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("run.json"))?)?;
    let speed = Speed {
        tokens_per_second: last.tokens_per_second,
        around: (seconds - last.seconds).max(0.0),
        device: start["starts"][0]["device"].as_str().unwrap_or_default().to_string(),
    };
    write_whole(&file, &serde_json::to_vec_pretty(&speed)?)?;
    Ok(Some(speed))
}

/// The model that is measured.
fn base(plan: &Plan) -> Option<&PlannedRun> {
    plan.searches.first().or(plan.runs.first())
}

/// Runs and minutes of every experiment, and in all.
pub fn table(plan: &Plan, speed: &Speed, vocab: usize, jobs: usize) -> Result<String> {
    let Some(first) = base(plan) else { bail!("nothing is to be trained") };
    let data = plan.options.data.as_deref();
    let flops = |run: &PlannedRun, length: Option<usize>| -> Result<f64> {
        let recipe = run.recipe(1e-3, data)?;
        let config = recipe.model_config(vocab)?;
        Ok(config.train_flops_per_token(length.unwrap_or(recipe.data.sequence_length)))
    };
    let rate = speed.tokens_per_second * flops(first, None)?;
    let pieces = (plan.scale.length as u64 * plan.scale.documents) as f64;
    let seconds = |run: &PlannedRun| -> Result<f64> {
        let steps = run.tokens as f64 * flops(run, None)? / rate;
        let mut around = speed.around / jobs as f64;
        let mut evaluation = 0.0;
        for measure in &run.measures {
            around += speed.around / jobs as f64;
            if *measure == Measure::Loss {
                // A forward pass is a third of a step.
                evaluation += pieces * flops(run, Some(plan.scale.length))? / 3.0 / rate;
            }
        }
        Ok(steps + evaluation + around)
    };
    let mut rows = vec![["experiment", "runs", "tokens", "minutes"].map(String::from).to_vec()];
    let (mut all, mut total, mut tokens) = (0.0, 0, 0);
    for (e, experiment) in plan.experiments.iter().enumerate() {
        let (mut count, mut part, mut read) = (0, 0.0, 0);
        for run in plan.searches.iter().filter(|run| run.experiment == e) {
            part += SEARCHED * seconds(run)?;
            count += SEARCHED as u64;
            read += SEARCHED as u64 * run.tokens;
        }
        for run in plan.runs.iter().filter(|run| run.experiment == e) {
            part += seconds(run)?;
            count += 1;
            read += run.tokens;
        }
        rows.push(row(&experiment.name, count, read, part));
        (all, total, tokens) = (all + part, total + count, tokens + read);
    }
    rows.push(row("in all", total, tokens, all));
    Ok(format!(
        "estimate from {} tokens/s of {} on {}, without needles and with about {SEARCHED} rates a search:\n{}",
        output::grouped(speed.tokens_per_second.round() as u64),
        first.spec,
        speed.device,
        output::table(&rows)
    ))
}

fn row(name: &str, runs: u64, tokens: u64, seconds: f64) -> Vec<String> {
    let minutes = format!("{:.1}", seconds / 60.0);
    vec![name.to_string(), runs.to_string(), output::grouped(tokens), minutes]
}

/// One task.
struct Once {
    task: Option<Vec<String>>,
    ended: Option<(Ended, f64)>,
}

impl Work for Once {
    fn next(&mut self) -> Result<Option<Task>> {
        let task = self.task.take();
        Ok(task.map(|arguments| Task { label: "warm-up".into(), arguments, alone: false }))
    }

    fn ended(&mut self, _: &str, ended: Ended, seconds: f64) -> Result<()> {
        self.ended = Some((ended, seconds));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fox_train::reproduce::{PlanOptions, ScalePlan};

    use super::*;

    /// Minutes of all that one run takes, trained and measured so.
    fn minutes(plan: &mut Plan, measures: &[Measure], around: f64) -> f64 {
        plan.runs[0].measures = measures.to_vec();
        // A minute of training.
        let tokens_per_second = plan.runs[0].tokens as f64 / 60.0;
        let speed = Speed { tokens_per_second, around, device: "a device".into() };
        let text = table(plan, &speed, 261, 2).unwrap();
        text.trim_end().rsplit([' ', '|']).find(|word| !word.is_empty()).unwrap().parse().unwrap()
    }

    #[test]
    fn a_measured_loss_costs_a_third_of_as_many_trained_tokens() {
        let scale = ScalePlan::load("laptop").unwrap();
        let options = PlanOptions { only: vec!["main".into()], ..PlanOptions::default() };
        let mut plan = Plan::new(scale, options).unwrap();
        plan.searches.clear();
        plan.runs.truncate(1);
        let length = plan.runs[0].recipe(1e-3, None).unwrap().data.sequence_length;
        plan.scale.length = length;
        plan.scale.documents = 3 * plan.runs[0].tokens / length as u64;
        assert_eq!(minutes(&mut plan, &[], 0.0), 1.0);
        assert_eq!(minutes(&mut plan, &[Measure::Loss], 0.0), 2.0);
        // Two jobs at once share the start of each: of the training and of the measurement.
        assert_eq!(minutes(&mut plan, &[Measure::Loss], 120.0), 4.0);
    }
}
