//! Needles in held-out text, easy and standard.

use super::doc::Doc;
use crate::commands::reproduce::found::Found;

/// A heat map per model and mode.
pub fn add(doc: &mut Doc, found: &Found<'_>, e: usize) {
    let experiment = &found.plan.experiments[e];
    let mut pictures = Vec::new();
    let mut rows = vec![vec!["model".to_string()]];
    let lengths = &found.plan.scale.needles.lengths;
    for mode in ["easy", "standard"] {
        rows[0].extend(lengths.iter().map(|length| format!("{mode}, {length}")));
    }
    for (r, row) in experiment.rows.iter().enumerate() {
        let Some(run) = found.of(e, r).next() else { continue };
        if run.needles.iter().all(Option::is_none) {
            continue;
        }
        let mut cells = vec![row.name.clone()];
        for (report, mode) in run.needles.iter().zip(["easy", "standard"]) {
            let map = report.as_ref().and_then(|report| Some((report, report.maps.first()?)));
            cells.extend(lengths.iter().map(|length| {
                map.map_or("-".into(), |(_, map)| {
                    let cells = map.cells.iter().filter(|cell| cell.length == *length);
                    let logs: Vec<f64> = cells.map(|cell| cell.log_prob).collect();
                    let mean = logs.iter().sum::<f64>() / logs.len().max(1) as f64;
                    format!("{:.0}% ({mean:.2})", 100.0 * map.accuracy_at(*length))
                })
            }));
            let Some((report, map)) = map else { continue };
            let mut chart = map.accuracy_chart(&report.grid, Some(found.plan.training_length));
            chart.title = format!("{}, {mode}: needles found (%)", row.name);
            pictures.push((format!("needles {} {mode}", row.name), chart.fragment()));
        }
        rows.push(cells);
    }
    if pictures.is_empty() {
        return;
    }
    doc.heading("Needles");
    doc.text(
        "A sentence is hidden in held-out text and asked for at the end; a needle is found when the greedy answer \
         contains it. In the easy mode the hidden sentence contains the question. Means over depths, first seed; in \
         parentheses the log-probability of the right answer per token.",
    );
    doc.table(&rows);
    doc.pictures(pictures);
}
