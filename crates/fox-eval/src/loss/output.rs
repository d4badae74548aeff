//! The results as files: JSON, CSV and pictures.

use std::path::{Path, PathBuf};

use fox_plot::{LineChart, Scale, Series, VerticalMark, standalone};
use serde::{Deserialize, Serialize};

use super::{CurvePoint, LossCurve};
use crate::Result;
use crate::csv::Csv;
use crate::files::{json, write_all};
use crate::stats::Interval;

/// The curves of several models on the same data.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LossReport {
    /// Which data.
    pub data: String,
    /// Whether the models were trained on them, so that these are not held-out losses.
    #[serde(default)]
    pub trained_on: bool,
    /// Of encoders: one token of so many was masked at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masked_every: Option<usize>,
    /// One curve per model.
    pub curves: Vec<LossCurve>,
}

impl LossReport {
    /// What the mean losses are called: a figure of this name is the same wherever it stands.
    pub fn mean_name(&self) -> String {
        let kind = if self.trained_on { "training" } else { "held-out" };
        let of = |curve: &LossCurve| format!(" ({} x {} tokens)", curve.chunks, curve.length);
        let masked = self.masked_every.map_or(String::new(), |n| format!(", 1 of {n} masked"));
        format!("{kind} loss{masked}{}", self.curves.first().map_or_else(String::new, of))
    }

    /// Writes `loss.json` (everything), `loss.csv` (L(i) per position and model), `loss.svg` and
    /// `slope.svg` into a folder; returns their paths.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let json = json(&folder.join("loss.json"), self)?;
        let files = [
            ("loss.json", json),
            ("loss.csv", self.csv().into_bytes()),
            ("loss.svg", standalone(&loss_chart(&self.curves).fragment()).into_bytes()),
            ("slope.svg", standalone(&slope_chart(&self.curves).fragment()).into_bytes()),
        ];
        write_all(folder, files)
    }

    /// One line per position, counted from 1, one column per model.
    fn csv(&self) -> String {
        let mut csv = Csv::default();
        csv.value("position");
        self.curves.iter().for_each(|curve| _ = csv.name(&curve.model));
        csv.end_row();
        let longest = self.curves.iter().map(|c| c.length).max().unwrap_or(0);
        for i in 0..longest {
            csv.value(i + 1);
            self.curves.iter().for_each(|curve| _ = csv.optional(curve.per_position.get(i)));
            csv.end_row();
        }
        csv.finish()
    }
}

/// L(i), smoothed, with 95% bands, on a logarithmic axis of positions.
pub fn loss_chart(curves: &[LossCurve]) -> LineChart {
    let mut chart =
        LineChart::new("Loss at every position", "position i (tokens)", "loss L(i), nats");
    chart.x_scale = Scale::Log2;
    chart.marks = training_marks(curves);
    // The first few positions are so much worse than the rest that they would flatten everything else.
    let first = curves.iter().map(|c| c.length).max().unwrap_or(0) as f64 / 32.0;
    chart.series = curves_from(curves, first, |p| p.loss);
    chart
}

/// Lines with bands from position `first` on.
fn curves_from(
    curves: &[LossCurve],
    first: f64,
    value: fn(&CurvePoint) -> Interval,
) -> Vec<Series> {
    let series = |(color, curve): (usize, &LossCurve)| {
        let points = || curve.smooth.iter().filter(|p| p.position >= first);
        let line = points().map(|p| (p.position, value(p).value)).collect();
        let band = points().map(|p| (p.position, value(p).low, value(p).high)).collect();
        Series { band, ..Series::new(&curve.model, color, line) }
    };
    curves.iter().enumerate().map(series).collect()
}

/// dL/d(ln i) with 95% bands; below 0, more context still helps.
pub(crate) fn slope_chart(curves: &[LossCurve]) -> LineChart {
    let mut chart = LineChart::new(
        "Slope of the loss",
        "position i (tokens)",
        "dL / d ln i (below 0: improving)",
    );
    chart.x_scale = Scale::Log2;
    chart.marks = training_marks(curves);
    let last = curves.iter().map(|c| c.length).max().unwrap_or(0) as f64;
    let first = last / 32.0;
    chart.series = curves_from(curves, first, |p| p.slope);
    let zero = Series {
        points: vec![(first.max(1.0), 0.0), (last, 0.0)],
        color: 5,
        dashed: true,
        ..Series::default()
    };
    chart.series.push(zero);
    chart
}

fn training_marks(curves: &[LossCurve]) -> Vec<VerticalMark> {
    let mut lengths: Vec<usize> = curves.iter().filter_map(|c| c.training_length).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mark = |l: usize| VerticalMark { x: l as f64, label: "training length".into() };
    lengths.into_iter().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Bins, LossSums};
    use super::*;

    fn curve(name: &str, length: usize) -> LossCurve {
        let mut sums = LossSums::new(length);
        sums.add(0, &vec![2.0; length], &Bins::new(length));
        LossCurve::new(name, &sums, Some(length / 2))
    }

    #[test]
    fn written_files_agree() {
        let folder = tempfile::tempdir().unwrap();
        let report = LossReport {
            data: "d".into(),
            trained_on: false,
            masked_every: None,
            curves: vec![curve("a", 8), curve("b\"", 4)],
        };
        let files = report.write(folder.path()).unwrap();
        assert_eq!(files.len(), 4);
        let csv = std::fs::read_to_string(&files[1]).unwrap();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!((lines[0], lines[1], lines[8]), ("position,\"a\",\"b\"\"\"", "1,2,2", "8,2,"));
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&files[0]).unwrap()).unwrap();
        assert_eq!(json["curves"][0]["per_position"][7], 2.0);
        assert_eq!(json["curves"][0]["training_length"], 4);
    }
}
