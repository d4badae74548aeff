//! The results of the demo as JSON, and as text for the terminal.

use fox_eval::report::Report;
use fox_eval::stats::Interval;
use serde_json::{Value, json};

use super::figures::{Comparison, ModelFigures};
use super::{Options, Results};

/// All numbers of the report.
pub fn json(f: &Results, options: &Options) -> Value {
    let length = f.evaluation.length();
    let model = |(i, of): (usize, &ModelFigures)| {
        let (model, runs) = &f.models[i];
        let seeds = of.seeds.iter().zip(runs).map(|(figures, run)| {
            json!({
                "seed": figures.seed,
                "change": figures.change,
                "needles": figures.needles,
                "loss_inside": figures.loss_inside,
                "loss_beyond": figures.loss_beyond,
                "folder": run.folder,
                "training_seconds": run.seconds,
                "evaluation_seconds": run.evaluation_seconds,
                "tokens_per_second": run.tokens_per_second,
                "training_losses": run.learning.losses,
                "loss_per_position": run.losses.mean(),
                "needle_cells": run.needles.cells,
            })
        });
        json!({
            "name": of.name,
            "recipe": model.recipe,
            "parameters": runs[0].model.params().count(),
            "change": of.change.interval(),
            "needles": of.needles_at(length).interval(),
            "loss_inside": of.inside.interval(),
            "loss_beyond": of.beyond.interval(),
            "seeds": seeds.collect::<Vec<_>>(),
        })
    };
    json!({
        "training_length": f.evaluation.trained_on,
        "evaluation_length": length,
        "training_tokens": options.tokens,
        "needle_grid": f.evaluation.grid,
        "chance": f.chance,
        "attainable_inside": f.figures.attainable[0],
        "attainable_beyond": f.figures.attainable[1],
        "attainable_per_position": f.attainable[0],
        "models": f.figures.models.iter().enumerate().map(model).collect::<Vec<_>>(),
        "comparisons": f.figures.comparisons.iter().map(comparison).collect::<Vec<_>>(),
        "verdict": f.figures.verdict(&f.evaluation, true),
        "where_fox_loses": f.figures.losses(),
        "heads": f.head.inspection.heads,
        "shown_head": f.head.name(),
        "sample": f.sample,
        "seconds": f.seconds,
        "device": f.device,
    })
}

fn comparison(c: &Comparison) -> Value {
    json!({
        "what": c.what,
        "fox": c.fox,
        "other": c.other,
        "other_name": c.other_name,
        "difference": c.difference,
        "better": c.better,
    })
}

/// The table of models.
pub fn rows(f: &Results) -> Vec<Vec<String>> {
    let (t, length) = (f.evaluation.trained_on, f.evaluation.length());
    let mut rows = vec![
        [
            "",
            &format!("loss at {}..{}", t / 2, t - 1),
            &format!("loss at {}..{}", 2 * t, length - 1),
            "change",
            &format!("needles at {length}"),
            "tokens/s",
        ]
        .map(String::from)
        .to_vec(),
    ];
    for m in &f.figures.models {
        rows.push(vec![
            m.name.to_string(),
            format!("{:.4}", m.inside.value),
            format!("{:.4}", m.beyond.value),
            change(&m.change.interval()),
            percent(&m.needles_at(length).interval()),
            format!("{:.0}", m.speed),
        ]);
    }
    let [inside, beyond] = f.figures.attainable;
    rows.push(vec![
        "attainable".into(),
        format!("{inside:.4}"),
        format!("{beyond:.4}"),
        format!("{:+.3}", beyond - inside),
        "100%".into(),
        String::new(),
    ]);
    rows
}

/// A change with its interval.
pub fn change(interval: &Interval) -> String {
    format!("{:+.3} ({:+.3}..{:+.3})", interval.value, interval.low, interval.high)
}

/// A fraction with its interval.
pub fn percent(interval: &Interval) -> String {
    let [value, low, high] = [interval.value, interval.low, interval.high].map(|v| 100.0 * v);
    format!("{value:.0}% ({low:.0}..{high:.0})")
}

/// The text for the terminal.
pub fn terminal(f: &Results, options: &Options) -> String {
    let seeds = f.models[0].1.len();
    let mut report = Report::default();
    report.table(&rows(f)).text(&f.figures.verdict(&f.evaluation, true)).text(&f.figures.losses());
    report.text(&format!(
        "means over {seeds} seed{} with 95% intervals; {:.0} s in total; report: {}",
        if seeds == 1 { "" } else { "s" },
        f.seconds,
        options.out.join("report.html").display()
    ));
    report.terminal()
}
