//! The report: the paper's tables and figures with the figures of these runs.

mod heads;
mod longer;
mod losses;
mod needles;
mod numbers;
mod tables;

use std::path::Path;

use anyhow::Result;
use fox_eval::report::Report;

use super::results::Results;
use super::{Layout, Settings};
use crate::{output, provenance};

/// Writes report.html, report.md, report.json and the pictures.
pub fn write(settings: &Settings, results: &Results<'_>, out: &Path) -> Result<()> {
    let scale = &results.plan.scale;
    let mut report = Report::new(
        &format!("The Forgetting Transformer on {}", settings.corpus),
        &format!(
            "The experiments of Lin et al., ICLR 2025 (arXiv 2503.02130), at the scale {}: {}. {} tokens a run in \
             the main comparison. Losses are in nats per token of the data. A seed decides the initial weights and the order of the \
             data; intervals over seeds are 95% (Student's t).",
            scale.name,
            scale.description,
            output::grouped(results.plan.tokens()),
        ),
    );
    facts(&mut report, results);
    // The learning-rate search runs first, and is shown after the main results.
    let mut order: Vec<usize> = (0..results.plan.experiments.len()).collect();
    order.sort_by_key(|e| results.plan.experiments[*e].shape == Layout::Rates);
    for e in order {
        let experiment = &results.plan.experiments[e];
        let any = results.plan.runs.iter().zip(&results.runs).any(|(run, result)| {
            run.experiment == e && (result.summary.is_some() || result.diverged)
        });
        if !any && experiment.shape != Layout::Rates {
            continue;
        }
        match experiment.shape {
            Layout::Main => {
                losses::add(&mut report, results, e);
                needles::add(&mut report, results, e);
                heads::add(&mut report, results, e);
            }
            Layout::Ablation => tables::ablation(&mut report, results, e)?,
            Layout::Gates => tables::gates(&mut report, results, e),
            Layout::Rates => tables::rates(&mut report, results, e),
            Layout::Table => tables::plain(&mut report, results, e),
            Layout::Pruning => tables::pruning(&mut report, results, e),
            Layout::Longer => {
                longer::add(&mut report, results, e);
                needles::add(&mut report, results, e);
            }
        }
    }
    times(&mut report, results);
    report.heading("How it was made");
    report.code(&settings.command);
    let device = results.speed.as_ref().map_or("", |speed| speed.device.as_str());
    let numbers = "the numbers are in report.json beside this page.";
    report.footer(&provenance::footer(device, &settings.command, numbers));
    report.set_numbers(numbers::json(settings, results)?);
    Ok(report.write(out)?)
}

/// The rows of one chart each: all in one, or a few beside the first one.
fn groups(rows: usize) -> Vec<Vec<usize>> {
    const MOST: usize = 8;
    const BESIDE: usize = 5;
    if rows <= MOST {
        return vec![(0..rows).collect()];
    }
    let others: Vec<usize> = (1..rows).collect();
    others.chunks(BESIDE).map(|chunk| [&[0], chunk].concat()).collect()
}

/// Progress, the main result, time and device.
fn facts(report: &mut Report, results: &Results<'_>) {
    let mut facts = vec![(
        format!("{} of {}", results.ended(), results.runs.len()),
        "runs finished, searches not counted".to_string(),
    )];
    let main = results.plan.experiments.iter().position(|e| e.shape == Layout::Main);
    facts.extend(main.and_then(|e| losses::change(results, e)));
    if let Some((seconds, busy)) = numbers::busy(results) {
        facts.push((format!("{:.0} min", seconds / 60.0), "from start to end".into()));
        facts.push((
            format!("{:.0}%", 100.0 * busy),
            "busy: seconds of training steps and measurements over seconds times jobs".into(),
        ));
    }
    if let Some(speed) = &results.speed {
        facts.push((speed.device.clone(), "device".into()));
    }
    report.facts(&facts);
}

/// Time and throughput of every run.
fn times(report: &mut Report, results: &Results<'_>) {
    let head = ["run", "parameters", "tokens", "seconds of steps", "tokens/s", "held-out loss"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let mut seen: Vec<&str> = Vec::new();
    for run in &results.runs {
        let Some(summary) = run.summary.as_ref().filter(|_| !seen.contains(&&*run.folder)) else {
            continue;
        };
        seen.push(&run.folder);
        rows.push(vec![
            run.folder.clone(),
            output::grouped(summary.parameters),
            output::grouped(summary.tokens),
            format!("{:.1}", summary.seconds),
            output::grouped(summary.tokens_per_second.round() as u64),
            run.loss().map_or(String::new(), |loss| format!("{loss:.4}")),
        ]);
    }
    report.heading("Time of every run");
    report.text("Runs that share a device slow each other down, so speeds are comparable only with one job at a time.");
    report.table(&rows);
}

/// The main table and the agreement with the paper, for the terminal.
pub fn summary(results: &Results<'_>) -> String {
    let mut report = Report::default();
    for (e, experiment) in results.plan.experiments.iter().enumerate() {
        match experiment.shape {
            Layout::Main if results.runs_of(e, 0).next().is_some() => {
                report.table(&losses::table(results, e));
            }
            Layout::Longer if results.runs_of(e, 0).next().is_some() => {
                report.table(&longer::table(results, e));
            }
            Layout::Ablation => {
                if let Some(agreement) = numbers::agreement(results, e) {
                    report.text(&format!(
                        "{}: {} of {} pairs in the paper's order",
                        experiment.title, agreement.agree, agreement.pairs
                    ));
                }
            }
            _ => {}
        }
    }
    report.text(&format!("{} of {} runs finished", results.ended(), results.runs.len()));
    report.terminal()
}
