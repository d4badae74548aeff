//! The report: the paper's tables and figures with our figures, as a page, as Markdown and as JSON.

mod doc;
mod heads;
mod longer;
mod losses;
mod needles;
mod numbers;
mod tables;

use std::path::Path;

use anyhow::Result;
use fox_train::reproduce::Shape;

use super::found::Found;
use super::settings::Settings;
use crate::output;
use doc::Doc;

/// Writes report.html, report.md, report.json and the pictures.
pub fn write(settings: &Settings, found: &Found<'_>, out: &Path) -> Result<()> {
    let scale = &found.plan.scale;
    let mut doc = Doc::new(
        &format!("The Forgetting Transformer on {}", settings.corpus),
        &format!(
            "The experiments of Lin et al., ICLR 2025 (arXiv 2503.02130), at the scale {}: {}. {} tokens a run in \
             the main comparison. Losses are in nats per token of the data. A seed decides the initial weights and the order of the \
             data; intervals over seeds are 95% (Student's t).",
            scale.name,
            scale.description,
            output::grouped(found.plan.tokens()),
        ),
    );
    facts(&mut doc, found);
    // The search comes before everything else in time, and after the main results in the report.
    let mut order: Vec<usize> = (0..found.plan.experiments.len()).collect();
    order.sort_by_key(|e| found.plan.experiments[*e].shape == Shape::Rates);
    for e in order {
        let experiment = &found.plan.experiments[e];
        let any =
            found.plan.runs.iter().zip(&found.runs).any(|(run, found)| {
                run.experiment == e && (found.summary.is_some() || found.diverged)
            });
        if !any && experiment.shape != Shape::Rates {
            continue;
        }
        match experiment.shape {
            Shape::Main => {
                losses::add(&mut doc, found, e);
                needles::add(&mut doc, found, e);
                heads::add(&mut doc, found, e);
            }
            Shape::Ablation => tables::ablation(&mut doc, found, e)?,
            Shape::Gates => tables::gates(&mut doc, found, e),
            Shape::Rates => tables::rates(&mut doc, found, e),
            Shape::Table => tables::plain(&mut doc, found, e),
            Shape::Pruning => tables::pruning(&mut doc, found, e),
            Shape::Longer => {
                longer::add(&mut doc, found, e);
                needles::add(&mut doc, found, e);
            }
        }
    }
    times(&mut doc, found);
    doc.heading("How it was made");
    doc.code(&settings.command);
    doc.write(out, &numbers::json(settings, found)?)
}

/// How far it is, and on what.
fn facts(doc: &mut Doc, found: &Found<'_>) {
    let mut facts = vec![(
        format!("{} of {}", found.over(), found.runs.len()),
        "runs finished, searches not counted".to_string(),
    )];
    let main = found.plan.experiments.iter().position(|e| e.shape == Shape::Main);
    facts.extend(main.and_then(|e| losses::change(found, e)));
    if let Some((seconds, busy)) = numbers::busy(found) {
        facts.push((format!("{:.0} min", seconds / 60.0), "from start to end".into()));
        facts.push((
            format!("{:.0}%", 100.0 * busy),
            "busy: seconds of training steps and measurements over seconds times jobs".into(),
        ));
    }
    if let Some(speed) = &found.speed {
        facts.push((speed.device.clone(), "device".into()));
    }
    doc.facts(&facts);
}

/// Time and speed of every run.
fn times(doc: &mut Doc, found: &Found<'_>) {
    let head = ["run", "parameters", "tokens", "seconds of steps", "tokens/s", "held-out loss"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let mut seen: Vec<&str> = Vec::new();
    for run in &found.runs {
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
    doc.heading("Time of every run");
    doc.text("Runs that share a device slow each other down, so speeds are comparable only with one job at a time.");
    doc.table(&rows);
}

/// The main table and the agreement, for the terminal.
pub fn summary(found: &Found<'_>) -> String {
    let mut text = String::new();
    for (e, experiment) in found.plan.experiments.iter().enumerate() {
        match experiment.shape {
            Shape::Main if found.of(e, 0).next().is_some() => {
                text += &output::table(&losses::table(found, e));
            }
            Shape::Longer if found.of(e, 0).next().is_some() => {
                text += &output::table(&longer::table(found, e));
            }
            Shape::Ablation => {
                if let Some(agreement) = numbers::agreement(found, e) {
                    text += &format!(
                        "{}: {} of {} pairs in the paper's order\n",
                        experiment.title, agreement.agree, agreement.pairs
                    );
                }
            }
            _ => {}
        }
    }
    text + &format!("{} of {} runs finished\n", found.over(), found.runs.len())
}
