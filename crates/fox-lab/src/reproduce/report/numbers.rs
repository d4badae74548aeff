//! The figures of the report as JSON.

use anyhow::Result;
use fox_eval::stats::OrderAgreement;
use serde_json::{Value, json};

use super::losses;
use crate::reproduce::results::Results;
use crate::reproduce::{Figure, Layout, RowConfig, Settings};
use crate::search::learning_rate_grid;

/// Seconds of all sessions, and the fraction of them that was spent on training steps and measurements.
pub fn busy(results: &Results<'_>) -> Option<(f64, f64)> {
    let seconds: f64 = results.sessions.iter().map(|s| s.seconds).sum();
    let offered: f64 = results.sessions.iter().map(|s| s.seconds * s.jobs).sum();
    let used: f64 = results.sessions.iter().map(|s| s.training + s.measuring).sum();
    (offered > 0.0).then(|| (seconds, used / offered))
}

/// Whether the rows with a figure of the paper have the paper's order.
pub fn agreement(results: &Results<'_>, e: usize) -> Option<OrderAgreement> {
    let rows = results.plan.experiments[e].rows.iter().enumerate();
    let pairs: Vec<(f64, f64)> = rows
        .filter_map(|(r, row)| Some((row.paper?, results.mean(e, r, |run| run.loss())?.mean)))
        .collect();
    Some(OrderAgreement::of(&pairs)).filter(|agreement| agreement.pairs > 0)
}

/// All numbers of the report.
pub fn json(settings: &Settings, results: &Results<'_>) -> Result<Value> {
    let plan = results.plan;
    let mut experiments = Vec::new();
    for (e, experiment) in plan.experiments.iter().enumerate() {
        let row = |(r, row): (usize, &RowConfig)| {
            let runs: Vec<Value> = results
                .runs_of(e, r)
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
                        "tokens_per_second_alone": run.alone.as_ref().map(|s| s.tokens_per_second),
                        "peak_memory": run.alone.as_ref().map(|s| s.memory.peak),
                    })
                })
                .collect();
            json!({
                "name": row.name,
                "model": row.model,
                "paper": row.paper,
                "loss": results.mean(e, r, |run| run.loss()),
                "inside": losses::at(results, e, r, Figure::Inside),
                "beyond": losses::at(results, e, r, Figure::Beyond),
                "recall": losses::at(results, e, r, Figure::Recall),
                "runs": runs,
            })
        };
        let rows: Vec<Value> = experiment.rows.iter().enumerate().map(row).collect();
        let claims: Vec<Value> = losses::verdicts(results, e)
            .iter()
            .map(|v| json!({"claim": v.claim, "difference": v.difference, "holds": v.holds, "clear": v.clear()}))
            .collect();
        let agreement = match experiment.shape {
            Layout::Ablation => agreement(results, e),
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
    let rates: serde_json::Map<String, Value> = results
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
        "runs": results.runs.len(),
        "finished": results.ended(),
        "device": results.speed.as_ref().map(|speed| speed.device.clone()),
        "seconds": busy(results).map(|(seconds, _)| seconds),
        "busy": busy(results).map(|(_, fraction)| fraction),
        "rates": rates,
        "experiments": experiments,
    }))
}
