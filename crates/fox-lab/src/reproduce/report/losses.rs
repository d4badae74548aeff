//! The main comparison: loss by position, and the paper's claims about it.

use fox_eval::learning::{Learning, learning_chart};
use fox_eval::stats::SeedMean;
use fox_plot::{DotPlot, DotRow, LineChart, Scale, VerticalMark};
use fox_train::metrics::Record;

use super::{groups, tables};
use crate::output;
use crate::reproduce::results::{Results, RunResults};
use crate::reproduce::{Claim, Figure, RowConfig};
use fox_eval::report::Report;

/// Nats above the highest loss within the training length at which lines of a chart are cut.
const HEADROOM: f64 = 0.15;

/// Adds table, charts and claims.
pub fn add(report: &mut Report, results: &Results<'_>, e: usize) {
    let experiment = &results.plan.experiments[e];
    report.heading(&experiment.title);
    report.text(&experiment.about);
    report.table(&table(results, e));
    let mut pictures: Vec<(String, String)> =
        dots(results, e).map(|plot| ("losses".to_string(), plot.fragment())).into_iter().collect();
    let groups = groups(experiment.rows.len());
    for rows in &groups {
        let chart = position_chart(results, e, rows);
        pictures.extend(chart.map(|chart| ("loss by position".to_string(), chart.fragment())));
    }
    for rows in &groups {
        let learning = learning(results, e, rows);
        if !learning.is_empty() {
            pictures.push(("learning curves".to_string(), learning_chart(&learning).fragment()));
        }
    }
    pictures.extend(tables::over_training(results, e));
    if !pictures.is_empty() {
        report.named_charts(pictures);
        report.text(
            "Lines are means over seeds, bands reach from the lowest to the highest seed; intervals of dots are 95%. \
             Lines are cut where they leave the picture.",
        );
    }
    claims(report, results, e);
}

/// Mean loss of the second half of the training length.
fn inside(results: &Results<'_>, run: &RunResults) -> Option<f64> {
    let length = results.plan.training_length;
    let curve = run.curve.as_ref().filter(|curve| curve.length >= length)?;
    Some(curve.mean_over(length / 2..length))
}

/// Mean loss of everything after twice the training length.
fn beyond(results: &Results<'_>, run: &RunResults) -> Option<f64> {
    let length = 2 * results.plan.training_length;
    let curve = run.curve.as_ref().filter(|curve| curve.length > length)?;
    Some(curve.mean_over(length..curve.length))
}

/// A figure of a run.
fn figure(results: &Results<'_>, run: &RunResults, figure: Figure) -> Option<f64> {
    match figure {
        Figure::Inside => inside(results, run),
        Figure::Beyond => beyond(results, run),
        Figure::Recall => run.recall(),
        Figure::Speed => Some(run.alone.as_ref()?.tokens_per_second),
    }
}

/// The mean of a figure over the seeds of a row.
pub fn at(results: &Results<'_>, e: usize, row: usize, of: Figure) -> Option<SeedMean> {
    results.mean(e, row, |run| figure(results, run, of))
}

/// The change of the loss of the first two models from within the training length to beyond it.
pub fn change(results: &Results<'_>, e: usize) -> Option<(String, String)> {
    let rows = &results.plan.experiments[e].rows;
    let of = |r: usize| {
        Some(at(results, e, r, Figure::Beyond)?.mean - at(results, e, r, Figure::Inside)?.mean)
    };
    let (first, second) = (of(0)?, of(1)?);
    let names = format!("{} / {}", rows[0].name, rows[1].name);
    Some((
        format!("{first:+.3} / {second:+.3}"),
        format!("change of the loss from inside the training length to beyond: {names}"),
    ))
}

/// One row per model.
pub fn table(results: &Results<'_>, e: usize) -> Vec<Vec<String>> {
    let (plan, length) = (results.plan, results.plan.training_length);
    let mut head = vec![
        "model".to_string(),
        format!("loss at {}..{}", length / 2, length - 1),
        format!("at {}..{}", 2 * length, plan.scale.length - 1),
        "mean".into(),
        "dL/d ln i beyond".into(),
        "seeds".into(),
        "peak lr".into(),
        "parameters".into(),
        "tokens/s".into(),
    ];
    let of_experiment = plan.runs.iter().zip(&results.runs).filter(|(run, _)| run.experiment == e);
    let timed = of_experiment.map(|(_, run)| run).any(|run| run.alone.is_some());
    if timed {
        head.extend(["tokens/s alone", "peak memory"].map(String::from));
    }
    let mut rows = vec![head];
    for (r, row) in plan.experiments[e].rows.iter().enumerate() {
        let finished: Vec<&RunResults> =
            results.runs_of(e, r).filter(|run| run.summary.is_some()).collect();
        let text = |spread: Option<SeedMean>, digits: usize| {
            spread.map_or("-".to_string(), |spread| spread.text(digits))
        };
        let figure = |figure: fn(&RunResults) -> Option<f64>| results.mean(e, r, figure);
        let speed = figure(|run| Some(run.summary.as_ref()?.tokens_per_second));
        let parameters = finished.first().and_then(|run| run.summary.as_ref());
        let diverged = results.runs_of(e, r).any(|run| run.diverged);
        rows.push(vec![
            row.name.clone(),
            if diverged { "diverged".into() } else { text(at(results, e, r, Figure::Inside), 4) },
            text(at(results, e, r, Figure::Beyond), 4),
            text(figure(|run| Some(run.curve.as_ref()?.mean.value)), 4),
            text(figure(|run| Some(run.curve.as_ref()?.slope_beyond_training?.value)), 3),
            finished.len().to_string(),
            finished.first().map_or("-".into(), |run| format!("{:e}", run.lr)),
            parameters.map_or("-".into(), |s| format!("{:.2}M", s.parameters as f64 / 1e6)),
            speed.map_or("-".into(), |s| output::grouped(s.mean.round() as u64)),
        ]);
        if timed && let Some(cells) = rows.last_mut() {
            let alone = results.runs_of(e, r).find_map(|run| run.alone.as_ref());
            cells.extend([
                alone.map_or("-".into(), |s| output::grouped(s.tokens_per_second.round() as u64)),
                alone.map_or("-".into(), |s| output::bytes(s.memory.peak as f64)),
            ]);
        }
    }
    rows
}

/// The losses inside the training length as dots, where there are too many rows for one chart by position.
fn dots(results: &Results<'_>, e: usize) -> Option<DotPlot> {
    let rows = &results.plan.experiments[e].rows;
    let dot = |(r, row): (usize, &RowConfig)| {
        let loss = at(results, e, r, Figure::Inside)?;
        let spread = loss.half_width.map(|_| loss.ends());
        Some(DotRow { name: row.name.clone(), value: loss.mean, spread, color: 0 })
    };
    let dots: Vec<DotRow> = rows.iter().enumerate().filter_map(dot).collect();
    (groups(rows.len()).len() > 1 && dots.len() > 1).then(|| DotPlot {
        title: "Loss in the second half of the training length".into(),
        x_label: "nats per token".into(),
        x_scale: Scale::Linear,
        rows: dots,
        legend: Vec::new(),
        marks: Vec::new(),
    })
}

/// The smoothed loss by position of some rows, averaged over seeds.
pub fn position_chart(results: &Results<'_>, e: usize, rows: &[usize]) -> Option<LineChart> {
    let (plan, length) = (results.plan, results.plan.training_length as f64);
    let mut chart =
        LineChart::new("Loss at every position", "position i (tokens)", "loss L(i), nats");
    chart.x_scale = Scale::Log2;
    chart.marks = vec![VerticalMark { x: length, label: "training length".into() }];
    let first = length / 16.0;
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for &r in rows {
        let row = &plan.experiments[e].rows[r];
        let curves: Vec<_> = results.runs_of(e, r).filter_map(|run| run.curve.as_ref()).collect();
        let Some(one) = curves.first() else { continue };
        let (mut line, mut band) = (Vec::new(), Vec::new());
        for (i, point) in one.smooth.iter().enumerate().filter(|(_, p)| p.position >= first) {
            let losses: Vec<f64> =
                curves.iter().filter_map(|c| Some(c.smooth.get(i)?.loss.value)).collect();
            let Some(spread) = SeedMean::of(&losses) else { continue };
            let lowest = losses.iter().copied().fold(f64::INFINITY, f64::min);
            let highest = losses.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            line.push((point.position, spread.mean));
            band.push((point.position, lowest, highest));
            low = low.min(spread.mean);
            if point.position <= length {
                high = high.max(spread.mean);
            }
        }
        let color = chart.series.len();
        chart.add_line(&row.name, line);
        if curves.len() > 1 {
            chart.series[color].band = band;
        }
    }
    if low < high {
        chart.y_range = Some((low - 0.02, high + HEADROOM));
    }
    (!chart.series.is_empty()).then_some(chart)
}

/// Training losses of the first seeds.
fn learning(results: &Results<'_>, e: usize, rows: &[usize]) -> Vec<Learning> {
    rows.iter()
        .filter_map(|&r| {
            let row = &results.plan.experiments[e].rows[r];
            let run = results.runs_of(e, r).next()?;
            let losses: Vec<(f64, f64)> = run
                .records
                .iter()
                .filter_map(|record| match record {
                    Record::Train(step) => Some((step.tokens as f64, step.loss?)),
                    Record::Eval(_) => None,
                })
                .collect();
            (!losses.is_empty()).then(|| Learning { model: row.name.clone(), losses })
        })
        .collect()
}

/// A published claim, and the result here.
pub struct Verdict {
    /// The claim.
    pub claim: String,
    /// The figure of the better row minus that of the worse one, paired by seed.
    pub difference: SeedMean,
    /// Whether the difference has the sign of the claim.
    pub holds: bool,
    /// Digits behind the point with which the difference is shown.
    digits: usize,
}

impl Verdict {
    /// Whether the interval excludes 0; `None` for a single seed.
    pub fn clear(&self) -> Option<bool> {
        let (low, high) = self.difference.ends();
        self.difference.half_width.map(|_| low > 0.0 || high < 0.0)
    }
}

/// The claims for which both rows have results.
pub fn verdicts(results: &Results<'_>, e: usize) -> Vec<Verdict> {
    let experiment = &results.plan.experiments[e];
    let row = |name: &str| experiment.rows.iter().position(|row| row.name == name);
    let judge = |claim: &Claim| {
        let (what, relation, digits) = match claim.at {
            Figure::Inside => ("inside", '<', 4),
            Figure::Beyond => ("beyond", '<', 4),
            Figure::Recall => ("recall", '>', 3),
            Figure::Speed => ("tokens/s alone", '>', 0),
        };
        // Runs with the same seed see the same batches.
        let (better, worse) = (row(&claim.better)?, row(&claim.worse)?);
        let pairs = results.runs_of(e, better).zip(results.runs_of(e, worse));
        let of = |run: &RunResults| figure(results, run, claim.at);
        let differences: Vec<f64> = pairs.filter_map(|(a, b)| Some(of(a)? - of(b)?)).collect();
        let difference = SeedMean::of(&differences)?;
        let source = claim.source.as_ref().map_or(String::new(), |source| format!(" ({source})"));
        Some(Verdict {
            claim: format!("{what}: {} {relation} {}{source}", claim.better, claim.worse),
            difference,
            holds: difference.mean != 0.0 && (difference.mean < 0.0) == claim.at.is_loss(),
            digits,
        })
    };
    experiment.claims.iter().filter_map(judge).collect()
}

fn claims(report: &mut Report, results: &Results<'_>, e: usize) {
    let verdicts = verdicts(results, e);
    if verdicts.is_empty() {
        return;
    }
    let holding = verdicts.iter().filter(|v| v.holds).count();
    report.text(&format!(
        "Published claims about losses, inside (the second half of the training length) and beyond (from twice the \
         training length on), and about recall and speed where they were measured: {holding} of {} hold here. \
         Differences are taken seed by seed.",
        verdicts.len()
    ));
    let head = ["published claim", "difference here", "holds", "beyond doubt"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let yes = |holds: bool| if holds { "yes" } else { "no" }.to_string();
    for v in &verdicts {
        rows.push(vec![
            v.claim.clone(),
            v.difference.text(v.digits),
            yes(v.holds),
            v.clear().map_or("one seed".into(), yes),
        ]);
    }
    report.table(&rows);
}
