//! Needle tests in held-out text: easy, standard, and one word out of several.

use fox_eval::needle::{Cell, NeedleMap, NeedleReport};
use fox_eval::report::Report;
use fox_plot::{LineChart, Scale, Series, VerticalMark};

use super::groups;
use crate::reproduce::results::{CANDIDATES, NEEDLES, Results};

/// The reports of a row, one per seed, each with the map of its only model.
fn maps<'a>(
    results: &'a Results<'_>,
    (e, r): (usize, usize),
    kind: usize,
) -> Vec<(&'a NeedleReport, &'a NeedleMap)> {
    let reports = results.runs_of(e, r).filter_map(|run| run.needles[kind].as_ref());
    reports.filter_map(|report| Some((report, report.maps.first()?))).collect()
}

/// The mean of a figure over the cells of a length and over seeds.
fn at(
    maps: &[(&NeedleReport, &NeedleMap)],
    length: usize,
    figure: impl Fn(&Cell) -> Option<f64>,
) -> Option<f64> {
    let cells = maps.iter().flat_map(|(_, map)| &map.cells);
    let values: Vec<f64> = cells.filter(|cell| cell.length == length).filter_map(figure).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Adds a table, a heat map per model and mode, and lines of the candidates.
pub fn add(report: &mut Report, results: &Results<'_>, e: usize) {
    let rows = &results.plan.experiments[e].rows;
    let lengths = &results.plan.scale.needles.lengths;
    let any = |kind: usize| (0..rows.len()).any(|r| !maps(results, (e, r), kind).is_empty());
    let kinds = (0..NEEDLES.len()).filter(|kind| any(*kind)).collect::<Vec<_>>();
    if kinds.is_empty() {
        return;
    }
    let mut table = vec![vec!["model".to_string()]];
    for &kind in &kinds {
        table[0].extend(lengths.iter().map(|length| format!("{}, {length}", NEEDLES[kind])));
    }
    let mut pictures = Vec::new();
    for (r, row) in rows.iter().enumerate() {
        let mut cells = vec![row.name.clone()];
        for &kind in &kinds {
            let maps = maps(results, (e, r), kind);
            cells.extend(lengths.iter().map(|&length| {
                let text = match NEEDLES[kind] {
                    CANDIDATES => at(&maps, length, |cell| cell.preferred)
                        .zip(at(&maps, length, |cell| cell.rank))
                        .map(|(first, rank)| format!("{:.0}% ({rank:.1})", 100.0 * first)),
                    _ => at(&maps, length, |cell| Some(cell.accuracy))
                        .zip(at(&maps, length, |cell| Some(cell.log_prob)))
                        .map(|(found, log)| format!("{:.0}% ({log:.2})", 100.0 * found)),
                };
                text.unwrap_or("-".into())
            }));
            let Some((report, map)) = maps.first() else { continue };
            if NEEDLES[kind] != CANDIDATES {
                let mut chart =
                    map.accuracy_chart(&report.grid, Some(results.plan.training_length));
                chart.title = format!("{}, {}: needles found (%)", row.name, NEEDLES[kind]);
                let name = format!("needles {} {}", row.name, NEEDLES[kind]);
                pictures.push((name, chart.fragment()));
            }
        }
        if cells[1..].iter().any(|cell| cell != "-") {
            table.push(cells);
        }
    }
    for rows in groups(rows.len()) {
        let chart = candidates_chart(results, e, &rows);
        pictures.extend(chart.map(|chart| (CANDIDATES.to_string(), chart.fragment())));
    }
    report.heading("Needles");
    report.text(
        "A sentence is hidden in held-out text and asked for at the end; a needle is found when the greedy answer \
         contains it (in parentheses the log-probability of the right answer per token). In the easy mode the hidden \
         sentence contains the question. Candidates: the answer is one word out of several; the percentage is how \
         often it is the most likely of them (in parentheses its mean rank). Means over depths and the seeds that \
         were asked; heat maps are of the first seed.",
    );
    report.table(&table);
    report.named_charts(pictures);
}

/// How often the right word is the most likely candidate, over the length; `None` without results of these rows.
fn candidates_chart(results: &Results<'_>, e: usize, rows: &[usize]) -> Option<LineChart> {
    let lengths = &results.plan.scale.needles.lengths;
    let title = "Right word most likely of the candidates";
    let mut chart = LineChart::new(title, "length (tokens)", "fraction of cases");
    (chart.x_scale, chart.y_range) = (Scale::Log2, Some((0.0, 1.0)));
    let trained = results.plan.training_length as f64;
    chart.marks = vec![VerticalMark { x: trained, label: "training length".into() }];
    let mut chance = None;
    for &r in rows {
        let maps = maps(results, (e, r), 2);
        let point =
            |&length: &usize| Some((length as f64, at(&maps, length, |cell| cell.preferred)?));
        let points: Vec<(f64, f64)> = lengths.iter().filter_map(point).collect();
        if !points.is_empty() {
            chance = maps.first().map(|(report, _)| report.chance);
            chart.add_line(&results.plan.experiments[e].rows[r].name, points);
        }
    }
    let ends = [lengths.first()?, lengths.last()?].map(|length| (*length as f64, chance));
    let points = ends.into_iter().filter_map(|(x, y)| Some((x, y?))).collect();
    let color = chart.series.len();
    chart.series.push(Series { dashed: true, ..Series::new("chance", color, points) });
    chance.is_some().then_some(chart)
}
