//! What the heads of the trained models remember: half-lives, forget matrices, attention maps.

use fox_eval::inspect::{HeadSummary, Reach, half_life_chart};
use fox_plot::{Image, MatrixImage};
use serde_json::Value;

use super::doc::Doc;
use crate::commands::reproduce::found::Found;

/// Pictures of the models with gates, and a table of all with attention.
pub fn add(doc: &mut Doc, found: &Found<'_>, e: usize) {
    let (mut lives, mut pictures) = (Vec::new(), Vec::new());
    let head = ["model", "local heads", "medium", "global", "blocks pruned at e^-10"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (r, row) in found.plan.experiments[e].rows.iter().enumerate() {
        let Some(seen) = found.of(e, r).next().and_then(|run| run.heads.as_ref()) else { continue };
        let Some(heads) = heads(seen) else { continue };
        rows.push(counts(&row.name, &heads));
        let Some(mut chart) = half_life_chart(&heads) else { continue };
        chart.title = format!("{}: half-life of every head", row.name);
        lives.push((format!("half-lives {}", row.name), chart.fragment()));
        for picture in seen["pictures"].as_array().into_iter().flatten() {
            pictures.extend(matrices(&row.name, picture, seen));
        }
    }
    if rows.len() == 1 {
        return;
    }
    doc.heading("What heads remember");
    doc.text(
        "The half-life is how many tokens it takes until what a head has read weighs half: dots are medians over \
         held-out text, lines reach from the 10% to the 90% quantile. Below, the forget matrix F and the attention map \
         A (log10 of the share) of the heads with the shortest, a middle and the longest memories.",
    );
    doc.table(&rows);
    doc.pictures(lives);
    doc.pictures(pictures);
}

fn heads(seen: &Value) -> Option<Vec<HeadSummary>> {
    serde_json::from_value(seen["heads"].clone()).ok()
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

/// F and A of one head.
fn matrices(model: &str, picture: &Value, seen: &Value) -> Vec<(String, String)> {
    let head = format!("L{} H{}", picture["layer"], picture["head"]);
    let tokens = seen["tokens"].as_array().map_or(0, Vec::len) as f64;
    let image = |title: String, range| Image {
        title,
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
        let svg = forget.fragment(&image(title, (0.0, 1.0)));
        pictures.push((format!("{model} {head} F"), svg));
    }
    if let Some(mut map) = matrix(&picture["attention_map"]) {
        map.values.iter_mut().for_each(|share| *share = share.max(1e-9).log10());
        let title = format!("{model} {head}: attention map A");
        let svg = map.fragment(&image(title, (-3.0, 0.0)));
        pictures.push((format!("{model} {head} A"), svg));
    }
    pictures
}

/// Rows of numbers; null, above the diagonal, is no number.
fn matrix(rows: &Value) -> Option<MatrixImage> {
    let rows = rows.as_array()?;
    let cols = rows.first()?.as_array()?.len();
    let cells = rows.iter().flat_map(|row| row.as_array().into_iter().flatten());
    let values: Vec<f64> = cells.map(|cell| cell.as_f64().unwrap_or(f64::NAN)).collect();
    Some(MatrixImage { rows: rows.len(), cols, values })
}
