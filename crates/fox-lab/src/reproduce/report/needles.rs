//! Needle tests in held-out text, easy and standard.

use crate::reproduce::results::Results;
use fox_eval::report::Report;

/// Adds a table, and a heat map per model and mode.
pub fn add(report: &mut Report, results: &Results<'_>, e: usize) {
    let experiment = &results.plan.experiments[e];
    let mut pictures = Vec::new();
    let mut rows = vec![vec!["model".to_string()]];
    let lengths = &results.plan.scale.needles.lengths;
    for mode in ["easy", "standard"] {
        rows[0].extend(lengths.iter().map(|length| format!("{mode}, {length}")));
    }
    for (r, row) in experiment.rows.iter().enumerate() {
        if results.runs_of(e, r).all(|run| run.needles.iter().all(Option::is_none)) {
            continue;
        }
        let mut cells = vec![row.name.clone()];
        for (m, mode) in ["easy", "standard"].into_iter().enumerate() {
            let reports = results.runs_of(e, r).filter_map(|run| run.needles[m].as_ref());
            let maps: Vec<_> =
                reports.filter_map(|report| Some((report, report.maps.first()?))).collect();
            cells.extend(lengths.iter().map(|length| {
                let cells = maps.iter().flat_map(|(_, map)| &map.cells);
                let logs: Vec<f64> =
                    cells.filter(|cell| cell.length == *length).map(|cell| cell.log_prob).collect();
                let right: Vec<f64> =
                    maps.iter().map(|(_, map)| map.accuracy_at(*length)).collect();
                match (mean(&right), mean(&logs)) {
                    (Some(right), Some(log)) => format!("{:.0}% ({log:.2})", 100.0 * right),
                    _ => "-".into(),
                }
            }));
            let Some((report, map)) = maps.first() else { continue };
            let mut chart = map.accuracy_chart(&report.grid, Some(results.plan.training_length));
            chart.title = format!("{}, {mode}: needles found (%)", row.name);
            pictures.push((format!("needles {} {mode}", row.name), chart.fragment()));
        }
        rows.push(cells);
    }
    if pictures.is_empty() {
        return;
    }
    report.heading("Needles");
    report.text(
        "A sentence is hidden in held-out text and asked for at the end; a needle is found when the greedy answer \
         contains it. In the easy mode the hidden sentence contains the question. Means over depths and the seeds that \
         were asked; in parentheses the log-probability of the right answer per token. Pictures: first seed.",
    );
    report.table(&rows);
    report.named_charts(pictures);
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}
