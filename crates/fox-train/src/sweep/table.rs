//! The comparison of a sweep, as Markdown, CSV, JSON and a picture.

use std::fmt::Write as _;
use std::path::Path;

use fox_base::durable;
use fox_plot::{LineChart, standalone};
use serde::Serialize;

use super::{Spread, SweepItem};
use crate::metrics::{MetricsLog, Record};
use crate::{Result, Summary, files};

/// All runs of a sweep so far.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// Whether every run of the sweep is in it.
    pub complete: bool,
    /// One per run, in order.
    pub rows: Vec<Row>,
    /// Runs that differ only in their seed, as one; empty where seeds do not vary.
    pub seeds: Vec<Repeated>,
}

/// Runs that differ only in their seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Repeated {
    /// What they have in common.
    pub label: String,
    /// The loss that runs are compared by.
    pub loss: Spread,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name in the sweep.
    pub label: String,
    /// Its name without the seed.
    pub group: String,
    /// Its peak learning rate.
    pub peak_lr: f64,
    /// Its figures; `None` when it diverged or failed.
    pub summary: Option<Summary>,
    /// Why there are none: the gradients stayed non-finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diverged: Option<String>,
    /// Why there are none: anything else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Loss over tokens: held-out where it was measured, else in training.
    pub curve: Vec<(f64, f64)>,
}

impl Row {
    /// A run without figures.
    pub(super) fn new(item: &SweepItem) -> Row {
        Row {
            label: item.label.clone(),
            group: item.group.clone(),
            peak_lr: item.recipe.optimizer.peak_lr,
            summary: None,
            diverged: None,
            failed: None,
            curve: Vec::new(),
        }
    }

    pub(super) fn finished(item: &SweepItem, summary: Summary, run: &Path) -> Result<Row> {
        let curve = curve(&MetricsLog::read(run)?.records);
        Ok(Row { summary: Some(summary), curve, ..Row::new(item) })
    }

    /// The loss that runs are compared by: held-out where it was measured, else in training.
    pub fn loss(&self) -> Option<f64> {
        let summary = self.summary.as_ref()?;
        summary.evaluation.as_ref().map(|e| e.loss).or(summary.train_loss)
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
        files::write_json(&out.join("comparison.json"), self)?;
        durable::write(&out.join("comparison.md"), self.markdown().as_bytes())?;
        durable::write(&out.join("comparison.csv"), self.csv().as_bytes())?;
        let picture = standalone(&self.chart().fragment());
        Ok(durable::write(&out.join("comparison.svg"), picture.as_bytes())?)
    }

    /// The losses of all runs over the tokens seen.
    fn chart(&self) -> LineChart {
        let mut chart = LineChart::new("Loss over training", "tokens", "nats per token");
        for row in &self.rows {
            chart.add_line(&row.label, row.curve.clone());
        }
        chart
    }

    /// Means over the seeds, in the order of the first runs.
    pub(super) fn repeated(rows: &[Row]) -> Vec<Repeated> {
        let mut groups: Vec<&str> = rows.iter().map(|row| row.group.as_str()).collect();
        let mut seen = Vec::new();
        groups.retain(|group| {
            !seen.contains(group) && {
                seen.push(group);
                true
            }
        });
        let of = |group: &str| {
            let same = rows.iter().filter(|row| row.group == group);
            let losses: Vec<f64> = same.filter_map(Row::loss).collect();
            let loss = Spread::of(&losses).filter(|loss| loss.count > 1)?;
            Some(Repeated { label: group.to_string(), loss })
        };
        groups.into_iter().filter_map(of).collect()
    }

    fn best(&self) -> Option<f64> {
        self.rows.iter().filter_map(Row::loss).min_by(f64::total_cmp)
    }

    /// A table for people; the best run is in bold.
    pub fn markdown(&self) -> String {
        let best = self.best();
        let mut text = String::from(
            "| run | parameters | tokens | peak lr | loss | above best | last positions | training loss | tokens/s |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
        );
        let number = |x: Option<f64>| x.map_or("".to_string(), |x| format!("{x:.4}"));
        for row in &self.rows {
            let Some(summary) = &row.summary else {
                let (label, lr) = (&row.label, row.peak_lr);
                let word = if row.failed.is_some() { "failed" } else { "diverged" };
                let _ = writeln!(text, "| {label} | | | {lr:e} | {word} | | | | |");
                continue;
            };
            let loss = number(row.loss());
            let loss = if row.loss() == best { format!("**{loss}**") } else { loss };
            let above = row.loss().zip(best).map(|(loss, best)| loss - best);
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:e} | {loss} | {} | {} | {} | {:.0} |",
                row.label,
                summary.parameters,
                summary.tokens,
                row.peak_lr,
                number(above),
                number(row.last_window()),
                number(summary.train_loss),
                summary.tokens_per_second,
            );
        }
        if !self.seeds.is_empty() {
            text += "\n| mean over seeds | seeds | loss, 95% interval |\n|---|---:|---:|\n";
            for Repeated { label, loss } in &self.seeds {
                let _ = writeln!(text, "| {label} | {} | {} |", loss.count, loss.text(4));
            }
        }
        for row in &self.rows {
            if let Some(why) = &row.failed {
                let _ = writeln!(text, "\n{} failed: {why}", row.label);
            }
        }
        text
    }

    /// The same for programs.
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "run,parameters,tokens,peak_lr,loss,last_positions_loss,train_loss,tokens_per_second,seconds,diverged,failed\n",
        );
        let number = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
        for row in &self.rows {
            let s = row.summary.as_ref();
            let cells = [
                format!("\"{}\"", row.label.replace('"', "\"\"")),
                number(s.map(|s| s.parameters as f64)),
                number(s.map(|s| s.tokens as f64)),
                row.peak_lr.to_string(),
                number(row.loss()),
                number(row.last_window()),
                number(s.and_then(|s| s.train_loss)),
                number(s.map(|s| s.tokens_per_second)),
                number(s.map(|s| s.seconds)),
                row.diverged.is_some().to_string(),
                row.failed.is_some().to_string(),
            ];
            text += &cells.join(",");
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_has_every_run_and_survives_odd_values() {
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
