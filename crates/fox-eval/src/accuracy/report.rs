//! Accuracies of several models side by side: table, JSON and pictures.

use std::path::{Path, PathBuf};

use fox_plot::{HeatMap, standalone};
use serde::Serialize;

use super::CellScore;
use crate::Result;
use crate::files::{json, write_all};
use crate::stats::{Interval, fraction_over_seeds, wilson};

/// Everything that was found about a task.
#[derive(Clone, Debug, Default, Serialize)]
pub struct AccuracyReport {
    /// Name of the task.
    pub task: String,
    /// What its difficulty counts; empty when it has only lengths.
    pub difficulty: String,
    /// Fraction of right answers of a guess among all possible ones.
    pub chance: f64,
    /// Length and difficulty of what the models were trained on.
    pub trained_on: Vec<(usize, f64)>,
    /// The models, each with all its seeds.
    pub models: Vec<ModelAccuracy>,
}

/// A recipe and its runs.
#[derive(Clone, Debug, Serialize)]
pub struct ModelAccuracy {
    /// In tables and pictures.
    pub name: String,
    /// Over all runs, setting by setting.
    pub cells: Vec<CellAccuracy>,
    /// Run by run.
    pub runs: Vec<RunAccuracy>,
}

/// One run of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunAccuracy {
    /// What the run is called.
    pub name: String,
    /// Seed of its initial weights.
    pub seed: u64,
    /// Setting by setting.
    pub scores: Vec<CellScore>,
}

/// Accuracy at one length and difficulty.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CellAccuracy {
    /// Tokens of a case.
    pub length: usize,
    /// Difficulty of the cases.
    pub difficulty: f64,
    /// Fraction of right answers.
    pub answers: Interval,
    /// Fraction of cases all of whose answers are right.
    pub cases: Interval,
}

impl ModelAccuracy {
    /// Of one run, the intervals are Wilson's over cases; the answers of a case go together, so cases are counted
    /// for both shares. Of several runs, they are Student's over seeds.
    pub fn new(name: &str, runs: Vec<RunAccuracy>) -> Self {
        let cell = |at: usize| {
            let scores: Vec<&CellScore> =
                runs.iter().filter_map(|run| run.scores.get(at)).collect();
            let first = scores.first()?;
            let share = |right: fn(&CellScore) -> (u64, u64)| {
                let shares: Vec<f64> = scores
                    .iter()
                    .map(|score| right(score))
                    .map(|(right, all)| right as f64 / all.max(1) as f64)
                    .collect();
                match shares[..] {
                    [share] => wilson(share, first.cases),
                    _ => fraction_over_seeds(&shares),
                }
            };
            Some(CellAccuracy {
                length: first.length,
                difficulty: first.difficulty,
                answers: share(|score| (score.answers_right, score.answers)),
                cases: share(|score| (score.cases_right, score.cases)),
            })
        };
        let cells = runs.first().map_or(0, |run| run.scores.len());
        ModelAccuracy { name: name.into(), cells: (0..cells).filter_map(cell).collect(), runs }
    }
}

impl AccuracyReport {
    /// Whether cases have several answers, so that the two shares differ.
    pub fn has_several_answers(&self) -> bool {
        let scores = self.models.iter().flat_map(|m| &m.runs).flat_map(|run| &run.scores);
        scores.into_iter().any(|score| score.answers > score.cases)
    }

    /// A row per model, a column per setting: fractions in percent with their intervals.
    pub fn table(&self, share: fn(&CellAccuracy) -> Interval, title: &str) -> Vec<Vec<String>> {
        let mut rows = vec![[vec![title.to_string()], self.columns()].concat()];
        for model in &self.models {
            let percent = |cell: &CellAccuracy| {
                let Interval { value, low, high } = share(cell);
                format!("{:.2} ({:.1}..{:.1})", 100.0 * value, 100.0 * low, 100.0 * high)
            };
            let cells: Vec<String> = model.cells.iter().map(percent).collect();
            rows.push([vec![model.name.clone()], cells].concat());
        }
        rows
    }

    /// Length and difficulty of every setting; a star marks those that were not trained on.
    fn columns(&self) -> Vec<String> {
        let cells = self.models.first().map_or(&[][..], |model| &model.cells);
        let column = |cell: &CellAccuracy| {
            let known = self.trained_on.contains(&(cell.length, cell.difficulty));
            let difficulty = match self.difficulty.is_empty() {
                true => String::new(),
                false => format!(" x {}", cell.difficulty),
            };
            format!("{}{difficulty}{}", cell.length, if known { "" } else { "*" })
        };
        cells.iter().map(column).collect()
    }

    /// What the columns are.
    pub fn legend(&self) -> String {
        let what = match self.difficulty.is_empty() {
            true => "length in tokens".to_string(),
            false => format!("length in tokens x {}", self.difficulty),
        };
        format!("{what}; * not trained on; a guess finds {:.2}%", 100.0 * self.chance)
    }

    /// The shares as a picture: models down, settings across.
    pub fn chart(&self, share: fn(&CellAccuracy) -> Interval, title: &str) -> HeatMap {
        let values = self.models.iter().flat_map(|m| &m.cells).map(|cell| share(cell).value);
        HeatMap {
            title: format!("{}: {title}", self.task),
            x_label: self.legend(),
            y_label: String::new(),
            // Two short lines are narrower than a long one.
            cols: self.columns().iter().map(|name| name.replacen(" x ", "\nx ", 1)).collect(),
            rows: self.models.iter().map(|model| model.name.clone()).collect(),
            values: values.collect(),
            range: (0.0, 1.0),
            label: |value| format!("{:.0}", 100.0 * value),
        }
    }

    /// Writes `accuracy.json`, `answers.svg` and, where cases have several answers, `cases.svg` into a folder; returns
    /// their paths.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let picture = |chart: HeatMap| standalone(&chart.fragment()).into_bytes();
        let mut files = vec![
            ("accuracy.json", json(&folder.join("accuracy.json"), self)?),
            ("answers.svg", picture(self.chart(|cell| cell.answers, "answers right (%)"))),
        ];
        if self.has_several_answers() {
            files.push(("cases.svg", picture(self.chart(|cell| cell.cases, "cases right (%)"))));
        }
        write_all(folder, files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seed: u64, answers_right: u64, cases_right: u64) -> RunAccuracy {
        let score = CellScore {
            length: 64,
            difficulty: 4.0,
            cases: 100,
            answers: 400,
            answers_right,
            cases_right,
        };
        RunAccuracy { name: format!("run {seed}"), seed, scores: vec![score] }
    }

    #[test]
    fn intervals_of_one_run_are_over_cases() {
        let model = ModelAccuracy::new("m", vec![run(0, 200, 50)]);
        let cell = model.cells[0];
        assert_eq!((cell.answers.value, cell.cases.value), (0.5, 0.5));
        // 400 answers of 100 cases are no better known than 100 cases.
        assert_eq!(cell.answers, cell.cases);
        assert!((cell.cases.low - 0.4038).abs() < 1e-4 && (cell.cases.high - 0.5962).abs() < 1e-4);
    }

    #[test]
    fn intervals_of_several_runs_are_over_seeds() {
        let model =
            ModelAccuracy::new("m", vec![run(0, 320, 60), run(1, 360, 80), run(2, 400, 100)]);
        let cell = model.cells[0];
        assert!((cell.answers.value - 0.9).abs() < 1e-12 && (cell.cases.value - 0.8).abs() < 1e-12);
        // Standard error 0.2 / sqrt(3), times 4.303 for two degrees of freedom, and no share is above 1.
        assert!((cell.cases.low - (0.8 - 4.303 * 0.2 / 3f64.sqrt())).abs() < 1e-3, "{cell:?}");
        assert_eq!(cell.cases.high, 1.0);
    }

    #[test]
    fn report_marks_settings_beyond_training() {
        let report = AccuracyReport {
            task: "mqar".into(),
            difficulty: "pairs".into(),
            chance: 0.25,
            trained_on: vec![(64, 8.0)],
            models: vec![ModelAccuracy::new("m", vec![run(0, 200, 50)])],
        };
        let table = report.table(|cell| cell.answers, "answers right (%)");
        assert_eq!(table[0], ["answers right (%)", "64 x 4*"]);
        assert_eq!(table[1], ["m", "50.00 (40.4..59.6)"]);
        assert_eq!(
            report.legend(),
            "length in tokens x pairs; * not trained on; a guess finds 25.00%"
        );
        let folder = tempfile::tempdir().unwrap();
        let written = report.write(folder.path()).unwrap();
        assert_eq!(written.len(), 3);
        let svg = std::fs::read_to_string(&written[1]).unwrap();
        assert!(svg.contains(">x 4*<") && svg.contains(">50<"), "{svg}");
    }
}
