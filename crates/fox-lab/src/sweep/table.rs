//! The comparison of a sweep, as Markdown, CSV, JSON and a chart.

use std::path::Path;

use anyhow::Result;
use fox_base::durable;
use fox_eval::csv::Csv;
use fox_eval::report::Report;
use fox_eval::stats::SeedMean;
use fox_plot::{LineChart, learning_range, standalone};
use fox_train::Summary;
use fox_train::metrics::{MetricsLog, Record};
use serde::Serialize;

use super::SweepItem;
use crate::graph::{RunOutcome, comparable_loss};

/// The runs of a sweep that have ended.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// Whether these are all runs.
    pub complete: bool,
    /// One row per run.
    pub rows: Vec<Row>,
    /// Means over runs that differ only in the seed; empty unless seeds vary.
    pub seeds: Vec<Repeated>,
}

/// Runs that differ only in their seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Repeated {
    /// Their label without the seed.
    pub label: String,
    /// The loss by which runs are compared.
    pub loss: SeedMean,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its label.
    pub label: String,
    /// Its label without the seed.
    pub group: String,
    /// Its peak learning rate.
    pub peak_lr: f64,
    /// Its results; `None` if it diverged or failed.
    pub summary: Option<Summary>,
    /// The message of a run that diverged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diverged: Option<String>,
    /// The message of a run that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Loss over tokens: held-out where it was measured, else in training.
    pub curve: Vec<(f64, f64)>,
}

impl Row {
    /// The row of a run that has ended.
    pub(super) fn new(item: &SweepItem, outcome: &RunOutcome) -> Result<Row> {
        let mut row = Row {
            label: item.run.label.clone(),
            group: item.group.clone(),
            peak_lr: item.recipe.optimizer.peak_lr,
            summary: None,
            diverged: None,
            failed: None,
            curve: Vec::new(),
        };
        match outcome {
            RunOutcome::Finished => {
                row.summary = Summary::read(&item.run.folder)?;
                row.curve = curve(&MetricsLog::read(&item.run.folder)?.records);
            }
            RunOutcome::Diverged(why) => row.diverged = Some(why.clone()),
            RunOutcome::Failed(why) => row.failed = Some(why.clone()),
        }
        Ok(row)
    }

    /// The loss by which runs are compared.
    pub fn loss(&self) -> Option<f64> {
        comparable_loss(self.summary.as_ref()?)
    }

    /// Loss of the last window of positions.
    fn last_window(&self) -> Option<f64> {
        Some(self.summary.as_ref()?.evaluation.as_ref()?.by_position.last()?.loss)
    }
}

fn curve(records: &[Record]) -> Vec<(f64, f64)> {
    let points = |held_out: bool| -> Vec<(f64, f64)> {
        let point = |record: &Record| match record {
            Record::Eval(r) if held_out => Some((r.tokens as f64, r.evaluation.loss)),
            Record::Train(r) if !held_out => Some((r.tokens as f64, r.loss?)),
            _ => None,
        };
        records.iter().filter_map(point).collect()
    };
    let held_out = points(true);
    if held_out.len() > 1 { held_out } else { points(false) }
}

impl Comparison {
    /// Writes comparison.md, .csv, .json and .svg.
    pub fn write(&self, out: &Path) -> Result<()> {
        let json = format!("{}\n", serde_json::to_string_pretty(self)?);
        let svg = standalone(&self.chart().fragment());
        let files = [("json", json), ("md", self.markdown()), ("csv", self.csv()), ("svg", svg)];
        for (ending, text) in files {
            durable::write(&out.join(format!("comparison.{ending}")), text.as_bytes())?;
        }
        Ok(())
    }

    /// The losses of all runs over the tokens seen.
    fn chart(&self) -> LineChart {
        let mut chart = LineChart::new("Loss over training", "tokens", "nats per token");
        chart.y_range = learning_range(self.rows.iter().map(|row| row.curve.as_slice()));
        for row in &self.rows {
            chart.add_line(&row.label, row.curve.clone());
        }
        chart
    }

    /// Means over seeds, in the order of the first runs.
    pub(super) fn over_seeds(rows: &[Row]) -> Vec<Repeated> {
        let mut groups: Vec<&str> = Vec::new();
        for row in rows {
            if !groups.contains(&row.group.as_str()) {
                groups.push(&row.group);
            }
        }
        let mean = |group: &str| {
            let same = rows.iter().filter(|row| row.group == group);
            let losses: Vec<f64> = same.filter_map(Row::loss).collect();
            let loss = SeedMean::of(&losses).filter(|loss| loss.count > 1)?;
            Some(Repeated { label: group.to_string(), loss })
        };
        groups.into_iter().filter_map(mean).collect()
    }

    fn best(&self) -> Option<f64> {
        self.rows.iter().filter_map(Row::loss).min_by(f64::total_cmp)
    }

    /// A table of all runs, with the best in bold, and one of the means over seeds.
    pub fn markdown(&self) -> String {
        self.report(true).markdown()
    }

    /// The same for a terminal.
    pub fn terminal(&self) -> String {
        self.report(false).terminal()
    }

    fn report(&self, bold: bool) -> Report {
        let best = self.best();
        let head = [
            "run",
            "parameters",
            "tokens",
            "peak lr",
            "loss",
            "above best",
            "last positions",
            "training loss",
            "tokens/s",
        ];
        let mut rows = vec![head.map(String::from).to_vec()];
        let number = |x: Option<f64>| x.map_or(String::new(), |x| format!("{x:.4}"));
        for row in &self.rows {
            let s = row.summary.as_ref();
            let loss = match (row.loss(), s) {
                (Some(loss), _) if bold && Some(loss) == best => format!("**{loss:.4}**"),
                (loss, Some(_)) => number(loss),
                (_, None) if row.failed.is_some() => "failed".into(),
                (_, None) => "diverged".into(),
            };
            rows.push(vec![
                row.label.clone(),
                s.map_or(String::new(), |s| s.parameters.to_string()),
                s.map_or(String::new(), |s| s.tokens.to_string()),
                format!("{:e}", row.peak_lr),
                loss,
                number(row.loss().zip(best).map(|(loss, best)| loss - best)),
                number(row.last_window()),
                number(s.and_then(|s| s.train_loss)),
                s.map_or(String::new(), |s| format!("{:.0}", s.tokens_per_second)),
            ]);
        }
        let mut report = Report::default();
        report.table(&rows);
        if !self.seeds.is_empty() {
            let head = ["mean over seeds", "seeds", "loss, 95% interval"];
            let mut rows = vec![head.map(String::from).to_vec()];
            rows.extend(self.seeds.iter().map(|Repeated { label, loss }| {
                vec![label.clone(), loss.count.to_string(), loss.text(4)]
            }));
            report.table(&rows);
        }
        for row in &self.rows {
            if let Some(why) = &row.failed {
                report.text(&format!("{} failed: {why}", row.label));
            }
        }
        report
    }

    /// The same as CSV.
    pub fn csv(&self) -> String {
        let mut csv = Csv::new(
            "run,parameters,tokens,peak_lr,loss,last_positions_loss,train_loss,tokens_per_second,seconds,diverged,failed",
        );
        for row in &self.rows {
            let s = row.summary.as_ref();
            csv.name(&row.label).optional(s.map(|s| s.parameters)).optional(s.map(|s| s.tokens));
            csv.value(row.peak_lr).optional(row.loss()).optional(row.last_window());
            csv.optional(s.and_then(|s| s.train_loss)).optional(s.map(|s| s.tokens_per_second));
            csv.optional(s.map(|s| s.seconds));
            csv.value(row.diverged.is_some()).value(row.failed.is_some()).end_row();
        }
        csv.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_has_every_run_and_skips_nan() {
        let row = |label: &str, curve: &[(f64, f64)]| Row {
            label: label.into(),
            group: label.into(),
            peak_lr: 1e-3,
            summary: None,
            diverged: None,
            failed: None,
            curve: curve.to_vec(),
        };
        let rows = vec![
            row("lr<1", &[(0.0, 3.0), (10.0, f64::NAN), (20.0, 2.0), (30.0, 1.5)]),
            row("diverged", &[]),
        ];
        let svg = Comparison { complete: true, rows, seeds: Vec::new() }.chart().fragment();
        // One sample in the legend and one line for each.
        assert_eq!(svg.matches("class=\"line\"").count(), 4);
        assert!(svg.contains("lr&lt;1") && !svg.contains("NaN"), "{svg}");
    }
}
