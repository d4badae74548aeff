//! Models trained at one length and then at another: the loss within both lengths and beyond.

use std::ops::Range;

use fox_eval::stats::SeedMean;
use fox_plot::VerticalMark;

use super::losses;
use crate::output;
use crate::reproduce::results::{Results, RunResults};
use fox_eval::report::Report;

/// Adds table and chart.
pub fn add(report: &mut Report, results: &Results<'_>, e: usize) {
    let experiment = &results.plan.experiments[e];
    report.heading(&experiment.title);
    report.text(&experiment.about);
    report.table(&table(results, e));
    let lengths = lengths(results, e);
    let rows: Vec<usize> = (0..experiment.rows.len()).collect();
    if let Some(mut chart) = losses::position_chart(results, e, &rows) {
        let mark = |length: &usize| VerticalMark { x: *length as f64, label: format!("{length}") };
        chart.marks = lengths.iter().map(mark).collect();
        report.named_charts(vec![("longer contexts".to_string(), chart.fragment())]);
        report.text(
            "Lines are means over seeds, bands reach from the lowest to the highest seed; marks are the two training \
             lengths. Lines are cut where they leave the picture.",
        );
    }
}

/// The training lengths of all rows, the shortest first.
fn lengths(results: &Results<'_>, e: usize) -> Vec<usize> {
    let runs = results.plan.runs.iter().filter(|run| run.experiment == e);
    let mut lengths: Vec<usize> =
        runs.filter_map(|run| Some(run.recipe(1e-3).ok()?.data.sequence_length)).collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// The positions whose losses are shown: the second half of every length, and all after twice the longest.
fn windows(results: &Results<'_>, e: usize) -> Vec<Range<usize>> {
    let lengths = lengths(results, e);
    let mut windows: Vec<Range<usize>> = lengths.iter().map(|length| length / 2..*length).collect();
    windows.extend(lengths.last().map(|length| 2 * length..results.plan.scale.length));
    windows.retain(|window| window.start < window.end && window.end <= results.plan.scale.length);
    windows
}

/// One row per model.
pub fn table(results: &Results<'_>, e: usize) -> Vec<Vec<String>> {
    let windows = windows(results, e);
    let mut head = vec!["model".to_string()];
    head.extend(
        windows.iter().map(|window| format!("loss at {}..{}", window.start, window.end - 1)),
    );
    head.extend(["tokens", "seeds", "peak lr", "tokens/s"].map(String::from));
    let mut rows = vec![head];
    for (r, row) in results.plan.experiments[e].rows.iter().enumerate() {
        let finished: Vec<&RunResults> =
            results.runs_of(e, r).filter(|run| run.summary.is_some()).collect();
        let text = |spread: Option<SeedMean>| spread.map_or("-".into(), |spread| spread.text(4));
        let mut cells = vec![row.name.clone()];
        cells.extend(windows.iter().map(|window| {
            let mean = |run: &RunResults| {
                let curve = run.curve.as_ref().filter(|curve| curve.length >= window.end)?;
                Some(curve.mean_over(window.clone()))
            };
            text(results.mean(e, r, mean))
        }));
        if results.runs_of(e, r).any(|run| run.diverged) {
            cells[1] = "diverged".into();
        }
        let tokens =
            results.plan.runs_of(e, r).next().map_or(0, |run| {
                run.tokens + run.start.as_ref().map_or(0, |start| start.run.tokens)
            });
        let speed = results.mean(e, r, |run| Some(run.summary.as_ref()?.tokens_per_second));
        cells.extend([
            output::grouped(tokens),
            finished.len().to_string(),
            finished.first().map_or("-".into(), |run| format!("{:e}", run.lr)),
            speed.map_or("-".into(), |s| output::grouped(s.mean.round() as u64)),
        ]);
        rows.push(cells);
    }
    rows
}
