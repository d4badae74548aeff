//! The grid of lengths and depths, and its pictures.

use std::path::{Path, PathBuf};

use fox_plot::{HeatMap, standalone};
use serde::{Deserialize, Serialize};

use super::{Cases, Reader, Score, score};
use crate::csv::Csv;
use crate::files::{file_stem, json, write_all};
use crate::score_log::ScoreLog;
use crate::{Error, Result};

/// Which cells to test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Tokens of the prompt.
    pub lengths: Vec<usize>,
    /// Where the needle lies, 0 to 1.
    pub depths: Vec<f64>,
    /// Cases per cell.
    pub cases: u64,
}

impl Grid {
    /// `count` depths from 0 to 1, evenly.
    pub fn even_depths(count: usize) -> Vec<f64> {
        let last = count.saturating_sub(1).max(1) as f64;
        (0..count).map(|i| i as f64 / last).collect()
    }

    /// Cases in all.
    pub fn total(&self) -> u64 {
        let cells = self.lengths.len() as u64 * self.depths.len() as u64;
        cells.saturating_mul(self.cases)
    }

    fn check(&self) -> Result<()> {
        if self.total() == 0 {
            return Err(Error::Argument("a needle test needs lengths, depths and cases".into()));
        }
        match self.depths.iter().find(|d| !(0.0..=1.0).contains(*d)) {
            Some(depth) => Err(Error::Argument(format!("a depth of {depth} is not in 0 to 1"))),
            None => Ok(()),
        }
    }
}

/// The result of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Tokens of the prompt.
    pub length: usize,
    /// Where the needle lies.
    pub depth: f64,
    /// Fraction of greedy answers that contain what was expected.
    pub accuracy: f64,
    /// Its standard error.
    pub accuracy_error: f64,
    /// Mean log-probability of the right answer per token.
    pub log_prob: f64,
    /// Fraction of cases in which the right answer is more likely than every wrong one.
    pub preferred: Option<f64>,
    /// Mean of the log-probability of the right answer less that of the best wrong one.
    pub margin: Option<f64>,
    /// Mean rank of the right answer among all candidates, from 1.
    #[serde(default)]
    pub rank: Option<f64>,
}

/// Which case of which cell, in the score file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct CaseKey {
    length: usize,
    /// Index of the depth.
    depth: usize,
    /// Number of the case.
    case: u64,
}

/// The cells of one model, length by length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NeedleMap {
    /// Name of the model.
    pub model: String,
    /// `lengths.len() * depths.len()` cells.
    pub cells: Vec<Cell>,
}

/// Asks every case of the grid. With a file, scores are kept there line by line and not asked again.
/// `progress` receives the number of finished cases.
pub fn run_needle(
    model: &str,
    reader: &mut dyn Reader,
    cases: &dyn Cases,
    grid: &Grid,
    decode: &dyn Fn(&[u32]) -> Result<String>,
    file: Option<(&Path, u64)>,
    mut progress: impl FnMut(u64),
) -> Result<NeedleMap> {
    grid.check()?;
    let (path, fingerprint) = file.unzip();
    let depths: Vec<String> = grid.depths.iter().map(f64::to_string).collect();
    let identity = format!(
        "model {:016x}, {}, depths {}",
        fingerprint.unwrap_or(0),
        cases.identity(),
        depths.join(" ")
    );
    let mut log = ScoreLog::open(path, &identity)?;
    let mut done = 0;
    let mut cells = Vec::new();
    for &length in &grid.lengths {
        for (d, &depth) in grid.depths.iter().enumerate() {
            let mut scores = Vec::new();
            for index in 0..grid.cases {
                let key = CaseKey { length, depth: d, case: index };
                let found = match log.get(&key) {
                    Some(found) => *found,
                    None => {
                        let case = cases.case(length, depth, index)?;
                        let found = score(reader, &case, cases.answer_tokens(), decode)?;
                        log.add(key, found)?;
                        found
                    }
                };
                scores.push(found);
                done += 1;
                progress(done);
            }
            cells.push(Cell::new(length, depth, &scores));
        }
    }
    Ok(NeedleMap { model: model.to_string(), cells })
}

impl Cell {
    fn new(length: usize, depth: f64, scores: &[Score]) -> Self {
        let n = scores.len() as f64;
        let mean = |value: &dyn Fn(&Score) -> f64| scores.iter().map(value).sum::<f64>() / n;
        let accuracy = mean(&|s| f64::from(u8::from(s.found)));
        let margins: Option<Vec<f64>> = scores.iter().map(|s| s.margin).collect();
        let ranks: Option<Vec<usize>> = scores.iter().map(|s| s.rank).collect();
        let preferred = |m: &Vec<f64>| m.iter().filter(|m| **m > 0.0).count() as f64 / n;
        Cell {
            length,
            depth,
            accuracy,
            accuracy_error: (accuracy * (1.0 - accuracy) / (n - 1.0).max(1.0)).sqrt(),
            log_prob: mean(&|s| s.log_prob),
            preferred: margins.as_ref().map(preferred),
            margin: margins.map(|m| m.iter().sum::<f64>() / n),
            rank: ranks.map(|r| r.iter().sum::<usize>() as f64 / n),
        }
    }
}

impl NeedleMap {
    /// Mean accuracy over all cells of a length.
    pub fn accuracy_at(&self, length: usize) -> f64 {
        let found: Vec<f64> =
            self.cells.iter().filter(|c| c.length == length).map(|c| c.accuracy).collect();
        found.iter().sum::<f64>() / found.len() as f64
    }

    /// The fraction of needles found, as a heat map of lengths (across) and depths (down).
    pub fn accuracy_chart(&self, grid: &Grid, training_length: Option<usize>) -> HeatMap {
        self.chart(
            grid,
            training_length,
            "needles found (%)",
            (0.0, 1.0),
            |c| c.accuracy,
            |v| format!("{:.0}", 100.0 * v),
        )
    }

    /// The fraction of cases whose right answer is more likely than every wrong one; `None` without wrong answers.
    pub(crate) fn preferred_chart(
        &self,
        grid: &Grid,
        training_length: Option<usize>,
    ) -> Option<HeatMap> {
        self.cells.iter().all(|c| c.preferred.is_some()).then(|| {
            self.chart(
                grid,
                training_length,
                "most likely of the candidates (%)",
                (0.0, 1.0),
                |c| c.preferred.unwrap_or(f64::NAN),
                |v| format!("{:.0}", 100.0 * v),
            )
        })
    }

    /// The mean log-probability of the right answer.
    pub(crate) fn log_prob_chart(&self, grid: &Grid, training_length: Option<usize>) -> HeatMap {
        let worst = self.cells.iter().map(|c| c.log_prob).fold(-1.0, f64::min);
        let title = "log-probability per token";
        self.chart(
            grid,
            training_length,
            title,
            (worst, 0.0),
            |c| c.log_prob,
            |v| {
                // No "-0.0".
                format!("{:.1}", v + 0.0).replace("-0.0", "0.0")
            },
        )
    }

    fn chart(
        &self,
        grid: &Grid,
        training_length: Option<usize>,
        title: &str,
        range: (f64, f64),
        value: fn(&Cell) -> f64,
        label: fn(f64) -> String,
    ) -> HeatMap {
        let column = |l: &usize| match training_length {
            Some(t) if *l > t => format!("{l} (x{})", trim(*l as f64 / t as f64)),
            _ => l.to_string(),
        };
        let cell = |length: usize, d: usize| {
            let at = grid.lengths.iter().position(|l| *l == length)? * grid.depths.len() + d;
            self.cells.get(at).map(value)
        };
        let values = (0..grid.depths.len()).flat_map(|d| grid.lengths.iter().map(move |l| (*l, d)));
        HeatMap {
            title: format!("{}: {title}", self.model),
            x_label: "length of the prompt (tokens)".into(),
            y_label: "depth of the needle".into(),
            cols: grid.lengths.iter().map(column).collect(),
            rows: grid.depths.iter().map(|d| format!("{:.0}%", 100.0 * d)).collect(),
            values: values.map(|(l, d)| cell(l, d).unwrap_or(f64::NAN)).collect(),
            range,
            label,
        }
    }
}

fn trim(ratio: f64) -> String {
    let text = format!("{ratio:.1}");
    text.strip_suffix(".0").map_or(text.clone(), String::from)
}

/// The maps of several models on the same cases.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NeedleReport {
    /// What was asked.
    pub cases: String,
    /// Fraction of right answers by guessing.
    pub chance: f64,
    /// The cells.
    pub grid: Grid,
    /// One map per model.
    pub maps: Vec<NeedleMap>,
}

impl NeedleReport {
    /// Writes `needle.json`, `needle.csv` and SVG heat maps per model: needles found, log-probabilities, and, where there
    /// are wrong answers, how often the right one is preferred. Returns their paths.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let json = json(&folder.join("needle.json"), self)?;
        let mut files = vec![
            ("needle.json".to_string(), json),
            ("needle.csv".to_string(), self.csv().into_bytes()),
        ];
        for map in &self.maps {
            let stem = file_stem(&map.model);
            let charts = [
                ("accuracy", Some(map.accuracy_chart(&self.grid, None))),
                ("logprob", Some(map.log_prob_chart(&self.grid, None))),
                ("preferred", map.preferred_chart(&self.grid, None)),
            ];
            for (kind, chart) in charts.into_iter().filter_map(|(k, chart)| Some((k, chart?))) {
                let svg = standalone(&chart.fragment()).into_bytes();
                files.push((format!("needle-{stem}-{kind}.svg"), svg));
            }
        }
        write_all(folder, files)
    }

    fn csv(&self) -> String {
        let header = "model,length,depth,accuracy,accuracy_error,log_prob,preferred,margin,rank";
        let mut csv = Csv::new(header);
        for map in &self.maps {
            for c in &map.cells {
                csv.name(&map.model).value(c.length).value(c.depth).value(c.accuracy);
                csv.value(c.accuracy_error).value(c.log_prob);
                csv.optional(c.preferred).optional(c.margin).optional(c.rank).end_row();
            }
        }
        csv.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(found: bool, margin: f64) -> Score {
        Score { found, log_prob: -1.0, margin: Some(margin), rank: Some(2) }
    }

    #[test]
    fn cell_statistics_by_hand() {
        let scores = [scored(true, 1.0), scored(true, 2.0), scored(false, -1.0), scored(true, 2.0)];
        let cell = Cell::new(64, 0.5, &scores);
        assert_eq!((cell.accuracy, cell.preferred, cell.margin), (0.75, Some(0.75), Some(1.0)));
        assert_eq!(cell.rank, Some(2.0));
        // sqrt(p (1 - p) / (n - 1))
        assert!((cell.accuracy_error - 0.25).abs() < 1e-12);
        // A tie with a wrong answer does not count as preferred.
        assert_eq!(Cell::new(64, 0.5, &[scored(true, 0.0)]).preferred, Some(0.0));
    }

    #[test]
    fn map_layout_is_depths_by_lengths() {
        let grid = Grid { lengths: vec![64, 128], depths: vec![0.0, 1.0], cases: 1 };
        let cell = |length, depth, found| Cell::new(length, depth, &[scored(found, 1.0)]);
        let cells = vec![
            cell(64, 0.0, true),
            cell(64, 1.0, false),
            cell(128, 0.0, true),
            cell(128, 1.0, true),
        ];
        let map = NeedleMap { model: "m".into(), cells };
        let chart = map.accuracy_chart(&grid, Some(64));
        assert_eq!(chart.values, [1.0, 1.0, 0.0, 1.0]);
        assert_eq!(chart.cols, ["64", "128 (x2)"]);
        assert_eq!(map.accuracy_at(64), 0.5);
        let report = NeedleReport { cases: "c".into(), chance: 0.1, grid, maps: vec![map] };
        let folder = tempfile::tempdir().unwrap();
        let files = report.write(folder.path()).unwrap();
        assert_eq!(files.len(), 5);
        let csv = std::fs::read_to_string(&files[1]).unwrap();
        assert!(csv.contains("\"m\",64,1,0,0,-1,1,1,2\n"), "{csv}");
    }

    #[test]
    fn rejects_invalid_grids() {
        let grid = |depths: Vec<f64>| Grid { lengths: vec![64], depths, cases: 1 };
        assert!(grid(vec![]).check().is_err());
        // As many as there are numbers are too many to be asked, but not none.
        let many = Grid { cases: u64::MAX, ..grid(vec![0.0, 1.0]) };
        assert_eq!(many.total(), u64::MAX);
        let error = grid(vec![1.5]).check().unwrap_err().to_string();
        assert_eq!(error, "a depth of 1.5 is not in 0 to 1");
        assert_eq!(Grid::even_depths(5), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(Grid::even_depths(1), [0.0]);
    }
}
