//! Gates at boundaries as a table, JSON and pictures.

use std::path::{Path, PathBuf};

use fox_plot::{Image, LineChart, VerticalMark, standalone};
use serde_json::{Value, json};

use super::boundary::{Boundaries, MarkedMatrix};
use crate::Result;
use crate::files::{file_stem, json as to_json, write_all};

/// Lines of the chart.
const LINES: usize = 6;
/// Marks on a forget matrix with labels; more would overlap.
const LABELS: usize = 12;

impl Boundaries {
    /// All numbers.
    pub fn json(&self) -> Value {
        json!({
            "model": self.model,
            "pattern": self.pattern,
            "before": self.span.before,
            "after": self.span.after,
            "windows": self.windows,
            "boundaries": self.count,
            "heads": self.heads,
        })
    }

    /// A row per head, at most `rows` of them.
    pub fn table(&self, rows: usize) -> Vec<Vec<String>> {
        let columns =
            ["head", "kept elsewhere", "kept over a boundary", "extra nats", "strongest at"];
        let mut table = vec![columns.map(String::from).to_vec()];
        table.extend(self.heads.iter().take(rows).map(|head| {
            vec![
                head.name(),
                format!("{:.1}%", 100.0 * head.kept_elsewhere),
                format!("{:.1}%", 100.0 * head.kept),
                format!("{:.2} ±{:.2}", head.extra, head.extra_error),
                format!("{:+}", head.strongest(self.span)),
            ]
        }));
        table
    }

    /// Gates of the first heads by distance from a boundary.
    pub fn chart(&self) -> LineChart {
        let mut chart = LineChart::new(
            format!("{}: gates at {}", self.model, self.pattern),
            "distance from the boundary (tokens)",
            "gate (geometric mean)",
        );
        for head in self.heads.iter().take(LINES) {
            let point = |(i, gate): (usize, &f64)| (i as f64 - self.span.before as f64, gate.exp());
            chart.add_line(head.name(), head.log_gates.iter().enumerate().map(point).collect());
        }
        chart.marks.push(VerticalMark { x: 0.0, label: "boundary".into() });
        // Room for the label above gates of 1.
        chart.y_range = Some((0.0, 1.1));
        chart
    }

    /// Writes `STEM.json`, `STEM.svg` with the gates by distance, and a forget matrix of each pictured head; returns their
    /// paths. `stem` is made a file name.
    pub fn write(&self, folder: &Path, stem: &str) -> Result<Vec<PathBuf>> {
        let stem = file_stem(stem);
        let numbers = format!("{stem}.json");
        let mut files = vec![
            (numbers.clone(), to_json(&folder.join(numbers), &self.json())?),
            (format!("{stem}.svg"), standalone(&self.chart().fragment()).into_bytes()),
        ];
        for picture in &self.pictures {
            let (layer, head) = picture.place;
            let svg = standalone(&picture.fragment()).into_bytes();
            files.push((format!("{stem}-L{layer}-H{head}.svg"), svg));
        }
        write_all(folder, files)
    }
}

impl MarkedMatrix {
    fn fragment(&self) -> String {
        let n = self.tokens as f64;
        let label = |i: usize| if i < LABELS { format!("{}", i + 1) } else { String::new() };
        let marks = self.boundaries.iter().enumerate().map(|(i, at)| (*at as f64, label(i)));
        self.forget.fragment(&Image {
            title: format!(
                "L{} H{}: forget matrix F, boundaries marked",
                self.place.0, self.place.1
            ),
            x_label: "key j (tokens)".into(),
            y_label: "query i".into(),
            x_max: n,
            y_max: n,
            range: (0.0, 1.0),
            color_label: "fraction of key j that is left".into(),
            aspect: 1.0,
            row_names: Vec::new(),
            diagonal: marks.collect(),
        })
    }
}
