//! The smaller experiments: ablation, gates, learning rates, pruning, and plain tables.

use anyhow::Result;
use fox_eval::stats::SeedMean;
use fox_plot::{DotPlot, DotRow, LineChart, Scale};
use fox_train::metrics::{Record, StepRecord};

use super::numbers;
use crate::output;
use crate::reproduce::results::{Results, RunResults};
use crate::search::learning_rate_grid;
use fox_eval::report::Report;

fn add_heading(report: &mut Report, results: &Results<'_>, e: usize) {
    report.heading(&results.plan.experiments[e].title);
    report.text(&results.plan.experiments[e].about);
}

/// The held-out loss of a row, or the reason why it is missing.
fn loss_text(results: &Results<'_>, e: usize, r: usize) -> String {
    match results.mean(e, r, RunResults::loss) {
        Some(spread) => spread.text(4),
        None if results.runs_of(e, r).any(|run| run.diverged) => "diverged".into(),
        None => "not trained".into(),
    }
}

/// Table 3: the components of every row, its loss, the paper's perplexity, and the order of both.
pub fn ablation(report: &mut Report, results: &Results<'_>, e: usize) -> Result<()> {
    add_heading(report, results, e);
    let plan = results.plan;
    let names = ["RoPE", "forget gate", "QK-norm", "output gate", "output norm", "KV-shift"];
    let figures = ["model", "loss", "above FoX (Pro)", "rank", "paper", "its rank"];
    let mut head: Vec<String> = figures.map(String::from).to_vec();
    head.extend(names.map(String::from));
    let rows = &plan.experiments[e].rows;
    let losses: Vec<Option<SeedMean>> =
        (0..rows.len()).map(|r| results.mean(e, r, RunResults::loss)).collect();
    let means: Vec<Option<f64>> = losses.iter().map(|l| l.map(|l| l.mean)).collect();
    let papers: Vec<Option<f64>> = rows.iter().map(|row| row.paper).collect();
    let base = rows.iter().position(|row| row.model == "fox-pro").and_then(|r| means[r]);
    let mut table = vec![head];
    let mut dots = Vec::new();
    for (r, row) in rows.iter().enumerate() {
        let Some(run) = plan.runs_of(e, r).next() else { continue };
        let model = run.recipe(1e-3)?.model;
        let is = |key: &str| model.get(key).and_then(toml::Value::as_bool).unwrap_or(false);
        let gate = model.get("fgate_type").and_then(toml::Value::as_str) != Some("none");
        let components = [
            is("use_rope"),
            gate,
            is("qk_norm"),
            is("use_output_gate"),
            is("use_output_norm"),
            is("use_k_shift"),
        ];
        let mut cells = vec![
            row.name.clone(),
            loss_text(results, e, r),
            means[r].zip(base).map_or("-".into(), |(a, b)| format!("{:+.4}", a - b)),
            rank(&means, r),
            row.paper.map_or("-".into(), |perplexity| format!("{perplexity:.2}")),
            rank(&papers, r),
        ];
        cells.extend(components.map(|has| if has { "✓".to_string() } else { String::new() }));
        table.push(cells);
        if let Some(loss) = losses[r] {
            let spread = loss.half_width.map(|_| loss.ends());
            let color = usize::from(row.model.starts_with("transformer"));
            dots.push(DotRow { name: row.name.clone(), value: loss.mean, spread, color });
        }
    }
    report.table(&table);
    if let Some(agreement) = numbers::agreement(results, e) {
        let percent = 100.0 * agreement.agree as f64 / agreement.pairs as f64;
        report.text(&format!(
            "Of {} pairs of rows that differ in the paper, {} are in the same order here ({percent:.0}%).",
            agreement.pairs, agreement.agree
        ));
    }
    let plot = DotPlot {
        title: "Held-out loss".into(),
        x_label: "nats per token".into(),
        x_scale: Scale::Linear,
        rows: dots,
        legend: vec![("FoX".into(), 0), ("Transformer".into(), 1)],
        marks: Vec::new(),
    };
    report.named_charts(vec![("ablation".into(), plot.fragment())]);
    Ok(())
}

/// The rank of a value, from 1 for the lowest; equal values have the same rank.
fn rank(values: &[Option<f64>], of: usize) -> String {
    let lower = |value: f64| values.iter().flatten().filter(|other| **other < value).count();
    values[of].map_or("-".into(), |value| (lower(value) + 1).to_string())
}

/// Loss over the longest decay time; the data-dependent gate is a horizontal line.
pub fn gates(report: &mut Report, results: &Results<'_>, e: usize) {
    add_heading(report, results, e);
    plain_table(report, results, e);
    let rows = &results.plan.experiments[e].rows;
    let mean = |r: usize| Some(results.mean(e, r, RunResults::loss)?.mean);
    let memories: Vec<f64> = rows.iter().filter_map(|row| Some(row.memory? as f64)).collect();
    let (Some(first), Some(last)) =
        (memories.iter().copied().reduce(f64::min), memories.iter().copied().reduce(f64::max))
    else {
        return;
    };
    let mut chart = LineChart::new("Held-out loss", "T_max (tokens)", "nats per token");
    chart.x_scale = Scale::Log2;
    let mut kinds: Vec<&str> = Vec::new();
    for row in rows {
        let kind = row.name.split(',').next().unwrap_or(&row.name);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for kind in kinds {
        let mut points = Vec::new();
        for (r, row) in rows.iter().enumerate().filter(|(_, row)| row.name.starts_with(kind)) {
            match (row.memory, mean(r)) {
                (Some(memory), Some(loss)) => points.push((memory as f64, loss)),
                (None, Some(loss)) => points.extend([(first, loss), (last, loss)]),
                _ => {}
            }
        }
        chart.add_line(kind, points);
    }
    report.named_charts(vec![("gates".into(), chart.fragment())]);
}

/// Loss over the learning rate, and the best rate of every model.
pub fn rates(report: &mut Report, results: &Results<'_>, e: usize) {
    let known = results.rates.values().any(|bracket| bracket.known().next().is_some());
    if !known {
        return;
    }
    add_heading(report, results, e);
    let mut chart = LineChart::new("Held-out loss", "peak learning rate", "nats per token");
    chart.x_scale = Scale::Log10;
    let mut indexes: Vec<i32> = results
        .rates
        .values()
        .flat_map(|bracket| bracket.known().map(|(index, _)| index))
        .collect();
    indexes.sort_unstable();
    indexes.dedup();
    let mut table = vec![vec!["model".to_string(), "best".into()]];
    table[0].extend(indexes.iter().map(|index| format!("{:e}", learning_rate_grid(*index))));
    for run in &results.plan.searches {
        let name = &results.plan.experiments[e].rows[run.row].name;
        let Some(bracket) = results.rates.get(&run.rate) else { continue };
        let best = bracket.best().map(learning_rate_grid);
        let mut cells = vec![name.clone(), best.map_or("-".into(), |lr| format!("{lr:e}"))];
        cells.extend(indexes.iter().map(|index| {
            match bracket.known().find(|(known, _)| known == index) {
                Some((_, loss)) if loss.is_finite() => format!("{loss:.4}"),
                Some(_) => "diverged".into(),
                None => String::new(),
            }
        }));
        table.push(cells);
        let finite = bracket.known().filter(|(_, loss)| loss.is_finite());
        chart.add_line(name, finite.map(|(i, loss)| (learning_rate_grid(i), loss)).collect());
    }
    report.table(&table);
    report.named_charts(vec![("learning rates".into(), chart.fragment())]);
}

/// One row per model.
pub fn plain(report: &mut Report, results: &Results<'_>, e: usize) {
    add_heading(report, results, e);
    plain_table(report, results, e);
}

fn plain_table(report: &mut Report, results: &Results<'_>, e: usize) {
    let head = ["model", "parameters", "peak lr", "loss", "loss, last half", "tokens/s"];
    let mut table = vec![head.map(String::from).to_vec()];
    for (r, row) in results.plan.experiments[e].rows.iter().enumerate() {
        let run = results.runs_of(e, r).next();
        let summary = run.and_then(|run| run.summary.as_ref());
        table.push(vec![
            row.name.clone(),
            summary.map_or("-".into(), |s| format!("{:.2}M", s.parameters as f64 / 1e6)),
            run.map_or("-".into(), |run| format!("{:e}", run.lr)),
            loss_text(results, e, r),
            results.mean(e, r, RunResults::tail).map_or("-".into(), |spread| spread.text(4)),
            summary.map_or("-".into(), |s| output::grouped(s.tokens_per_second.round() as u64)),
        ]);
    }
    report.table(&table);
}

/// The pruned fraction over training, and the throughput.
pub fn pruning(report: &mut Report, results: &Results<'_>, e: usize) {
    add_heading(report, results, e);
    let rows = &results.plan.experiments[e].rows;
    let mut table =
        vec![["", "loss", "tokens/s, last tenth", "pruned at the end"].map(String::from).to_vec()];
    let mut speeds = Vec::new();
    for (r, row) in rows.iter().enumerate() {
        let Some(run) = results.runs_of(e, r).next() else { continue };
        let fractions = pruned(run);
        let speed = late_speed(run);
        table.push(vec![
            row.name.clone(),
            loss_text(results, e, r),
            speed.map_or("-".into(), |speed| output::grouped(speed.round() as u64)),
            fractions.last().map_or("-".into(), |(_, f)| format!("{:.0}%", 100.0 * f)),
        ]);
        speeds.extend(speed);
    }
    report.table(&table);
    if let [without, with] = speeds[..] {
        report.text(&format!(
            "With pruning a training step is {:.2} times as fast at sequences of {} tokens.",
            with / without,
            results.plan.training_length
        ));
    }
    report.named_charts(over_training(results, e));
}

/// Charts of the pruned fraction and the throughput over training; none where no run prunes.
pub fn over_training(results: &Results<'_>, e: usize) -> Vec<(String, String)> {
    let title = "Attention blocks pruned over training";
    let mut fractions = LineChart::new(title, "tokens seen", "fraction of all blocks");
    let mut speeds = LineChart::new("Throughput over training", "tokens seen", "tokens/s");
    let mut prunes = false;
    for (r, row) in results.plan.experiments[e].rows.iter().enumerate() {
        let Some(run) = results.runs_of(e, r).next() else { continue };
        let pruned = pruned(run);
        prunes |= pruned.iter().any(|(_, fraction)| *fraction > 0.0);
        fractions.add_line(&row.name, pruned);
        speeds.add_line(
            &row.name,
            steps(run).map(|s| (s.tokens as f64, s.tokens_per_second)).collect(),
        );
    }
    let charts = [("pruning", fractions), ("throughput", speeds)];
    charts.into_iter().filter(|_| prunes).map(|(name, c)| (name.into(), c.fragment())).collect()
}

/// The records of training steps.
fn steps(run: &RunResults) -> impl Iterator<Item = &StepRecord> {
    run.records.iter().filter_map(|record| match record {
        Record::Train(step) => Some(step),
        Record::Eval(_) => None,
    })
}

/// The fraction of pruned blocks over tokens, averaged over layers.
fn pruned(run: &RunResults) -> Vec<(f64, f64)> {
    let point = |step: &StepRecord| {
        let layers = step.pruned.as_ref().filter(|layers| !layers.is_empty())?;
        Some((step.tokens as f64, layers.iter().sum::<f64>() / layers.len() as f64))
    };
    steps(run).filter_map(point).collect()
}

/// The median throughput of the last tenth of the records.
fn late_speed(run: &RunResults) -> Option<f64> {
    let mut speeds: Vec<f64> = steps(run).map(|step| step.tokens_per_second).collect();
    let mut late = speeds.split_off(speeds.len() - speeds.len().div_ceil(10));
    late.sort_by(f64::total_cmp);
    late.get(late.len() / 2).copied()
}
