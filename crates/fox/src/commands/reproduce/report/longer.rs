//! Models that were trained at one length and then at another: the loss up to both lengths and beyond.

use std::ops::Range;

use fox_plot::VerticalMark;
use fox_train::sweep::Spread;

use super::doc::Doc;
use super::losses;
use crate::commands::reproduce::found::{Found, RunFound};
use crate::output;

/// Table and picture.
pub fn add(doc: &mut Doc, found: &Found<'_>, e: usize) {
    let experiment = &found.plan.experiments[e];
    doc.heading(&experiment.title);
    doc.text(&experiment.about);
    doc.table(&table(found, e));
    let lengths = lengths(found, e);
    if let Some(mut chart) = losses::position_chart(found, e) {
        let mark = |length: &usize| VerticalMark { x: *length as f64, label: format!("{length}") };
        chart.marks = lengths.iter().map(mark).collect();
        doc.pictures(vec![("longer contexts".to_string(), chart.fragment())]);
        doc.text(
            "Lines are means over seeds, bands reach from the lowest to the highest seed; marks are the two training \
             lengths. Lines are cut where they leave the picture.",
        );
    }
}

/// The lengths that rows are trained at, the shortest first.
fn lengths(found: &Found<'_>, e: usize) -> Vec<usize> {
    let runs = found.plan.runs.iter().filter(|run| run.experiment == e);
    let mut lengths: Vec<usize> =
        runs.filter_map(|run| Some(run.recipe(1e-3, None).ok()?.data.sequence_length)).collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// The positions whose losses are shown: the second half of every length, and everything after twice the longest.
fn places(found: &Found<'_>, e: usize) -> Vec<Range<usize>> {
    let lengths = lengths(found, e);
    let mut places: Vec<Range<usize>> = lengths.iter().map(|length| length / 2..*length).collect();
    places.extend(lengths.last().map(|length| 2 * length..found.plan.scale.length));
    places.retain(|place| place.start < place.end && place.end <= found.plan.scale.length);
    places
}

/// A row per model.
pub fn table(found: &Found<'_>, e: usize) -> Vec<Vec<String>> {
    let places = places(found, e);
    let mut head = vec!["model".to_string()];
    head.extend(places.iter().map(|place| format!("loss at {}..{}", place.start, place.end - 1)));
    head.extend(["tokens", "seeds", "peak lr", "tokens/s"].map(String::from));
    let mut rows = vec![head];
    for (r, row) in found.plan.experiments[e].rows.iter().enumerate() {
        let finished: Vec<&RunFound> = found.of(e, r).filter(|run| run.summary.is_some()).collect();
        let text = |spread: Option<Spread>| spread.map_or("-".into(), |spread| spread.text(4));
        let mut cells = vec![row.name.clone()];
        cells.extend(places.iter().map(|place| {
            let mean = |run: &RunFound| {
                let curve = run.curve.as_ref().filter(|curve| curve.length >= place.end)?;
                Some(curve.mean_over(place.clone()))
            };
            text(found.spread(e, r, mean))
        }));
        if found.of(e, r).any(|run| run.diverged) {
            cells[1] = "diverged".into();
        }
        let seen =
            found.plan.runs_of(e, r).next().map_or(0, |run| {
                run.tokens + run.start.as_ref().map_or(0, |start| start.run.tokens)
            });
        let speed = found.spread(e, r, |run| Some(run.summary.as_ref()?.tokens_per_second));
        cells.extend([
            output::grouped(seen),
            finished.len().to_string(),
            finished.first().map_or("-".into(), |run| format!("{:e}", run.lr)),
            speed.map_or("-".into(), |s| output::grouped(s.mean.round() as u64)),
        ]);
        rows.push(cells);
    }
    rows
}
