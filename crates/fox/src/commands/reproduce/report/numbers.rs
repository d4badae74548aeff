//! The figures of the report as JSON.

use anyhow::Result;
use fox_train::reproduce::{Agreement, Place, Shape};
use fox_train::sweep::learning_rate_grid;
use serde_json::{Value, json};

use super::losses;
use crate::commands::reproduce::found::Found;
use crate::commands::reproduce::settings::Settings;

/// Seconds of all sessions, and the part of them in which something was computed.
pub fn busy(found: &Found<'_>) -> Option<(f64, f64)> {
    let seconds: f64 = found.sessions.iter().map(|s| s.seconds).sum();
    let offered: f64 = found.sessions.iter().map(|s| s.seconds * s.jobs).sum();
    let used: f64 = found.sessions.iter().map(|s| s.training + s.measuring).sum();
    (offered > 0.0).then(|| (seconds, used / offered))
}

/// Whether the rows with a figure of the paper are in its order.
pub fn agreement(found: &Found<'_>, e: usize) -> Option<Agreement> {
    let rows = found.plan.experiments[e].rows.iter().enumerate();
    let pairs: Vec<(f64, f64)> = rows
        .filter_map(|(r, row)| Some((row.paper?, found.spread(e, r, |run| run.loss())?.mean)))
        .collect();
    Some(Agreement::of(&pairs)).filter(|agreement| agreement.pairs > 0)
}

/// Everything in the report.
pub fn json(settings: &Settings, found: &Found<'_>) -> Result<Value> {
    let plan = found.plan;
    let mut experiments = Vec::new();
    for (e, experiment) in plan.experiments.iter().enumerate() {
        let row = |(r, row): (usize, &fox_train::reproduce::RowPlan)| {
            let runs: Vec<Value> = found
                .of(e, r)
                .map(|run| {
                    json!({
                        "folder": run.folder,
                        "peak_lr": run.lr,
                        "finished": run.summary.is_some(),
                        "diverged": run.diverged,
                        "loss": run.loss(),
                        "last_positions": run.tail(),
                        "mean_by_position": run.curve.as_ref().map(|curve| curve.mean),
                        "slope_beyond": run.curve.as_ref().and_then(|c| c.slope_beyond_training),
                        "parameters": run.summary.as_ref().map(|s| s.parameters),
                        "tokens": run.summary.as_ref().map(|s| s.tokens),
                        "seconds": run.summary.as_ref().map(|s| s.seconds),
                        "tokens_per_second": run.summary.as_ref().map(|s| s.tokens_per_second),
                    })
                })
                .collect();
            json!({
                "name": row.name,
                "model": row.model,
                "paper": row.paper,
                "loss": found.spread(e, r, |run| run.loss()),
                "inside": losses::at(found, e, r, Place::Inside),
                "beyond": losses::at(found, e, r, Place::Beyond),
                "runs": runs,
            })
        };
        let rows: Vec<Value> = experiment.rows.iter().enumerate().map(row).collect();
        let claims: Vec<Value> = losses::verdicts(found, e)
            .iter()
            .map(|v| json!({"claim": v.claim, "difference": v.difference, "clear": v.clear()}))
            .collect();
        let agreement = match experiment.shape {
            Shape::Ablation => agreement(found, e),
            _ => None,
        };
        experiments.push(json!({
            "name": experiment.name,
            "title": experiment.title,
            "rows": rows,
            "claims": claims,
            "agreement": agreement,
        }));
    }
    let rates: serde_json::Map<String, Value> = found
        .rates
        .iter()
        .map(|(model, bracket)| {
            let tried: Vec<Value> = bracket
                .known()
                .map(|(index, loss)| {
                    let loss = loss.is_finite().then_some(loss);
                    json!({"peak_lr": learning_rate_grid(index), "loss": loss})
                })
                .collect();
            let best = bracket.best().map(learning_rate_grid);
            (model.clone(), json!({"best": best, "tried": tried}))
        })
        .collect();
    Ok(json!({
        "settings": serde_json::to_value(settings)?,
        "training_length": plan.training_length,
        "tokens": plan.tokens(),
        "seeds": plan.seeds(),
        "runs": found.runs.len(),
        "finished": found.over(),
        "device": found.speed.as_ref().map(|speed| speed.device.clone()),
        "seconds": busy(found).map(|(seconds, _)| seconds),
        "busy": busy(found).map(|(_, share)| share),
        "rates": rates,
        "experiments": experiments,
    }))
}
