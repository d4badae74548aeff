//! The smaller experiments: ablation, gates, rates, pruning, and plain tables.

use anyhow::Result;
use fox_plot::{DotPlot, DotRow, LineChart, Scale};
use fox_train::metrics::Record;
use fox_train::sweep::{Spread, learning_rate_grid};

use super::doc::Doc;
use super::numbers;
use crate::commands::reproduce::found::{Found, RunFound};
use crate::output;

fn begin(doc: &mut Doc, found: &Found<'_>, e: usize) {
    doc.heading(&found.plan.experiments[e].title);
    doc.text(&found.plan.experiments[e].about);
}

/// The held-out loss of a row, or why there is none.
fn loss_text(found: &Found<'_>, e: usize, r: usize) -> String {
    match found.spread(e, r, RunFound::loss) {
        Some(spread) => spread.text(4),
        None if found.of(e, r).any(|run| run.diverged) => "diverged".into(),
        None => "not trained".into(),
    }
}

/// Table 3: the parts of every row, the loss here, the perplexity there, and the order of both.
pub fn ablation(doc: &mut Doc, found: &Found<'_>, e: usize) -> Result<()> {
    begin(doc, found, e);
    let plan = found.plan;
    let names = ["RoPE", "forget gate", "QK-norm", "output gate", "output norm", "KV-shift"];
    let figures = ["model", "loss", "above FoX (Pro)", "place", "paper", "its place"];
    let mut head: Vec<String> = figures.map(String::from).to_vec();
    head.extend(names.map(String::from));
    let rows = &plan.experiments[e].rows;
    let losses: Vec<Option<Spread>> =
        (0..rows.len()).map(|r| found.spread(e, r, RunFound::loss)).collect();
    let means: Vec<Option<f64>> = losses.iter().map(|l| l.map(|l| l.mean)).collect();
    let papers: Vec<Option<f64>> = rows.iter().map(|row| row.paper).collect();
    let base = rows.iter().position(|row| row.model == "fox-pro").and_then(|r| means[r]);
    let mut table = vec![head];
    let mut dots = Vec::new();
    for (r, row) in rows.iter().enumerate() {
        let Some(run) = plan.runs_of(e, r).next() else { continue };
        let model = run.recipe(1e-3, None)?.model;
        let is = |key: &str| model.get(key).and_then(toml::Value::as_bool).unwrap_or(false);
        let gate = model.get("fgate_type").and_then(toml::Value::as_str) != Some("none");
        let parts = [
            is("use_rope"),
            gate,
            is("qk_norm"),
            is("use_output_gate"),
            is("use_output_norm"),
            is("use_k_shift"),
        ];
        let mut cells = vec![
            row.name.clone(),
            loss_text(found, e, r),
            means[r].zip(base).map_or("-".into(), |(a, b)| format!("{:+.4}", a - b)),
            place(&means, r),
            row.paper.map_or("-".into(), |perplexity| format!("{perplexity:.2}")),
            place(&papers, r),
        ];
        cells.extend(parts.map(|has| if has { "✓".to_string() } else { String::new() }));
        table.push(cells);
        if let Some(loss) = losses[r] {
            let spread = loss.half_width.map(|_| loss.ends());
            let color = usize::from(row.model.starts_with("transformer"));
            dots.push(DotRow { name: row.name.clone(), value: loss.mean, spread, color });
        }
    }
    doc.table(&table);
    if let Some(agreement) = numbers::agreement(found, e) {
        let share = 100.0 * agreement.agree as f64 / agreement.pairs as f64;
        doc.text(&format!(
            "Of {} pairs of rows that differ in the paper, {} are in the same order here ({share:.0}%).",
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
    doc.pictures(vec![("ablation".into(), plot.fragment())]);
    Ok(())
}

/// The place of a value among all, from 1 for the lowest; equal values share one.
fn place(values: &[Option<f64>], of: usize) -> String {
    let lower = |value: f64| values.iter().flatten().filter(|other| **other < value).count();
    values[of].map_or("-".into(), |value| (lower(value) + 1).to_string())
}

/// Loss over the longest decay time; the data-dependent gate is a level line.
pub fn gates(doc: &mut Doc, found: &Found<'_>, e: usize) {
    begin(doc, found, e);
    plain_table(doc, found, e);
    let rows = &found.plan.experiments[e].rows;
    let mean = |r: usize| Some(found.spread(e, r, RunFound::loss)?.mean);
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
    doc.pictures(vec![("gates".into(), chart.fragment())]);
}

/// Loss over the learning rate, and the best of every model.
pub fn rates(doc: &mut Doc, found: &Found<'_>, e: usize) {
    let known = found.rates.values().any(|bracket| bracket.known().next().is_some());
    if !known {
        return;
    }
    begin(doc, found, e);
    let mut chart = LineChart::new("Held-out loss", "peak learning rate", "nats per token");
    chart.x_scale = Scale::Log10;
    let mut indexes: Vec<i32> =
        found.rates.values().flat_map(|bracket| bracket.known().map(|(index, _)| index)).collect();
    indexes.sort_unstable();
    indexes.dedup();
    let mut table = vec![vec!["model".to_string(), "best".into()]];
    table[0].extend(indexes.iter().map(|index| format!("{:e}", learning_rate_grid(*index))));
    for run in &found.plan.searches {
        let name = &found.plan.experiments[e].rows[run.row].name;
        let Some(bracket) = found.rates.get(&run.rate) else { continue };
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
    doc.table(&table);
    doc.pictures(vec![("learning rates".into(), chart.fragment())]);
}

/// A row per model.
pub fn plain(doc: &mut Doc, found: &Found<'_>, e: usize) {
    begin(doc, found, e);
    plain_table(doc, found, e);
}

fn plain_table(doc: &mut Doc, found: &Found<'_>, e: usize) {
    let head = ["model", "parameters", "peak lr", "loss", "loss, last half", "tokens/s"];
    let mut table = vec![head.map(String::from).to_vec()];
    for (r, row) in found.plan.experiments[e].rows.iter().enumerate() {
        let run = found.of(e, r).next();
        let summary = run.and_then(|run| run.summary.as_ref());
        table.push(vec![
            row.name.clone(),
            summary.map_or("-".into(), |s| format!("{:.2}M", s.parameters as f64 / 1e6)),
            run.map_or("-".into(), |run| format!("{:e}", run.lr)),
            loss_text(found, e, r),
            found.spread(e, r, RunFound::tail).map_or("-".into(), |spread| spread.text(4)),
            summary.map_or("-".into(), |s| output::grouped(s.tokens_per_second.round() as u64)),
        ]);
    }
    doc.table(&table);
}

/// Pruned share over training, and the speed.
pub fn pruning(doc: &mut Doc, found: &Found<'_>, e: usize) {
    begin(doc, found, e);
    let rows = &found.plan.experiments[e].rows;
    let mut chart = LineChart::new(
        "Attention blocks pruned over training",
        "tokens seen",
        "share of all blocks",
    );
    let mut table =
        vec![["", "loss", "tokens/s, last tenth", "pruned at the end"].map(String::from).to_vec()];
    let mut speeds = Vec::new();
    for (r, row) in rows.iter().enumerate() {
        let Some(run) = found.of(e, r).next() else { continue };
        let shares = pruned(run);
        let speed = late_speed(run);
        table.push(vec![
            row.name.clone(),
            loss_text(found, e, r),
            speed.map_or("-".into(), |speed| output::grouped(speed.round() as u64)),
            shares.last().map_or("-".into(), |(_, share)| format!("{:.0}%", 100.0 * share)),
        ]);
        speeds.extend(speed);
        chart.add_line(&row.name, shares);
    }
    doc.table(&table);
    if let [without, with] = speeds[..] {
        doc.text(&format!(
            "With pruning a training step is {:.2} times as fast at sequences of {} tokens.",
            with / without,
            found.plan.training_length
        ));
    }
    doc.pictures(vec![("pruning".into(), chart.fragment())]);
}

/// Tokens seen, and the share of blocks pruned, mean over layers.
fn pruned(run: &RunFound) -> Vec<(f64, f64)> {
    let share = |record: &Record| match record {
        Record::Train(step) => {
            let layers = step.pruned.as_ref().filter(|layers| !layers.is_empty())?;
            let mean = layers.iter().sum::<f64>() / layers.len() as f64;
            Some((step.tokens as f64, mean))
        }
        Record::Eval(_) => None,
    };
    run.records.iter().filter_map(share).collect()
}

/// Median speed of the last tenth of the lines.
fn late_speed(run: &RunFound) -> Option<f64> {
    let mut speeds: Vec<f64> = run
        .records
        .iter()
        .filter_map(|record| match record {
            Record::Train(step) => Some(step.tokens_per_second),
            Record::Eval(_) => None,
        })
        .collect();
    let mut late = speeds.split_off(speeds.len() - speeds.len().div_ceil(10));
    late.sort_by(f64::total_cmp);
    late.get(late.len() / 2).copied()
}
