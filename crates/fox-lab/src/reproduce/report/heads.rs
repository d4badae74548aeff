//! The memory of the heads of trained models: half-lives, forget matrices, attention maps.

use fox_eval::inspect::{HeadSummary, Reach, half_life_chart};
use fox_plot::{Image, MatrixImage};
use serde_json::Value;

use crate::reproduce::results::Results;
use fox_eval::report::Report;

/// Adds charts of the models with forget gates, and a table of all models with attention.
pub fn add(report: &mut Report, results: &Results<'_>, e: usize) {
    let (mut lives, mut pictures) = (Vec::new(), Vec::new());
    let head = ["model", "local heads", "medium", "global", "blocks pruned at e^-10"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (r, row) in results.plan.experiments[e].rows.iter().enumerate() {
        let Some(inspection) = results.runs_of(e, r).next().and_then(|run| run.heads.as_ref())
        else {
            continue;
        };
        let Some(heads) = heads(inspection) else { continue };
        rows.push(counts(&row.name, &heads));
        let Some(mut chart) = half_life_chart(&heads) else { continue };
        chart.title = format!("{}: half-life of every head", row.name);
        lives.push((format!("half-lives {}", row.name), chart.fragment()));
        for picture in inspection["pictures"].as_array().into_iter().flatten() {
            pictures.extend(matrices(&row.name, picture, inspection));
        }
    }
    if rows.len() == 1 {
        return;
    }
    report.heading("What heads remember");
    report.text(
        "The half-life is how many tokens it takes until what a head has read weighs half: dots are medians over \
         held-out text, lines reach from the 10% to the 90% quantile. Below, the forget matrix F and the attention map \
         A (log10 of the weight) of the heads with the shortest, a middle and the longest memories.",
    );
    report.table(&rows);
    report.named_charts(lives);
    report.named_charts(pictures);
}

fn heads(inspection: &Value) -> Option<Vec<HeadSummary>> {
    serde_json::from_value(inspection["heads"].clone()).ok()
}

fn counts(name: &str, heads: &[HeadSummary]) -> Vec<String> {
    let gated = heads.iter().any(|head| head.half_life.is_some());
    let count = |reach: Reach| {
        let of = |head: &&HeadSummary| head.half_life.is_some_and(|life| life.reach == reach);
        if gated { heads.iter().filter(of).count().to_string() } else { "-".into() }
    };
    let sum = |pick: fn(&HeadSummary) -> i64| heads.iter().map(pick).sum::<i64>() as f64;
    let pruned = 1.0 - sum(|h| h.blocks_visited) / sum(|h| h.blocks).max(1.0);
    vec![
        name.to_string(),
        count(Reach::Local),
        count(Reach::Medium),
        count(Reach::Global),
        format!("{:.0}%", 100.0 * pruned),
    ]
}

/// The forget matrix F and the attention map A of one head.
fn matrices(model: &str, picture: &Value, inspection: &Value) -> Vec<(String, String)> {
    let head = format!("L{} H{}", picture["layer"], picture["head"]);
    let tokens = inspection["tokens"].as_array().map_or(0, Vec::len) as f64;
    let image = |title: String, color_label: &str, range| Image {
        title,
        color_label: color_label.into(),
        x_label: "key j (tokens)".into(),
        y_label: "query i".into(),
        x_max: tokens,
        y_max: tokens,
        range,
        aspect: 1.0,
        row_names: Vec::new(),
        diagonal: Vec::new(),
    };
    let mut pictures = Vec::new();
    if let Some(forget) = matrix(&picture["forget_matrix"]) {
        let title = format!("{model} {head}: forget matrix F");
        let svg = forget.fragment(&image(title, "fraction of key j that is left", (0.0, 1.0)));
        pictures.push((format!("{model} {head} F"), svg));
    }
    if let Some(mut map) = matrix(&picture["attention_map"]) {
        map.values.iter_mut().for_each(|weight| *weight = weight.max(1e-9).log10());
        let title = format!("{model} {head}: attention map A");
        let svg = map.fragment(&image(title, "log10 of the attention weight", (-3.0, 0.0)));
        pictures.push((format!("{model} {head} A"), svg));
    }
    pictures
}

/// A matrix from rows of numbers; null, above the diagonal, becomes NaN.
fn matrix(rows: &Value) -> Option<MatrixImage> {
    let rows = rows.as_array()?;
    let cols = rows.first()?.as_array()?.len();
    let cells = rows.iter().flat_map(|row| row.as_array().into_iter().flatten());
    let values: Vec<f64> = cells.map(|cell| cell.as_f64().unwrap_or(f64::NAN)).collect();
    Some(MatrixImage { rows: rows.len(), cols, values })
}
