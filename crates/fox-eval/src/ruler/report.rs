//! Scores by task and length: table, JSON, CSV and heat maps.

use std::path::{Path, PathBuf};

use fox_plot::{HeatMap, standalone};
use serde::{Deserialize, Serialize};

use super::{RulerTask, SampleScore};
use crate::Result;
use crate::csv::Csv;
use crate::files::{file_stem, json, write_all};

/// Scores of one task and length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// RULER's name of the task.
    pub task: String,
    /// Tokens of prompt and answer.
    pub length: usize,
    /// Number of samples.
    pub samples: usize,
    /// RULER's string match, 0 to 1.
    pub matched: f64,
    /// Its standard error.
    pub matched_error: f64,
    /// Fraction of right answers among as many of the most likely candidates; absent without candidates.
    pub top: Option<f64>,
    /// Its standard error.
    pub top_error: Option<f64>,
    /// Fraction of right and wrong candidates in the right order.
    pub auc: Option<f64>,
    /// `top` of a random order.
    pub chance: Option<f64>,
}

/// The cells of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelCells {
    /// Name of the model.
    pub model: String,
    /// Length by length, task by task.
    pub cells: Vec<Cell>,
}

/// Several models on the same samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RulerReport {
    /// What was asked.
    pub samples: String,
    /// The models.
    pub models: Vec<ModelCells>,
}

impl Cell {
    pub(super) fn new(task: &str, length: usize, scores: &[SampleScore]) -> Cell {
        let of = |pick: fn(&SampleScore) -> Option<f64>| -> Option<Vec<f64>> {
            scores.iter().map(pick).collect()
        };
        let matched: Vec<f64> = scores.iter().map(|score| score.matched).collect();
        let top = of(|score| score.top);
        Cell {
            task: task.into(),
            length,
            samples: scores.len(),
            matched: mean(&matched),
            matched_error: standard_error(&matched),
            top: top.as_deref().map(mean),
            top_error: top.as_deref().map(standard_error),
            auc: of(|score| score.auc).as_deref().map(mean),
            chance: of(|score| score.chance).as_deref().map(mean),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn standard_error(values: &[f64]) -> f64 {
    let (n, mean) = (values.len() as f64, mean(values));
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (squares / (n - 1.0).max(1.0) / n.max(1.0)).sqrt()
}

impl ModelCells {
    /// Mean over the tasks at a length, without PhoneBook, which is not one of RULER's.
    pub fn average(&self, length: usize, value: fn(&Cell) -> Option<f64>) -> Option<f64> {
        let phonebook = RulerTask::Phonebook.name();
        let cells = self.cells.iter().filter(|c| c.length == length && c.task != phonebook);
        let values: Option<Vec<f64>> = cells.map(value).collect();
        values.filter(|values| !values.is_empty()).map(|values| mean(&values))
    }

    fn cell(&self, task: &str, length: usize) -> Option<&Cell> {
        self.cells.iter().find(|c| c.task == task && c.length == length)
    }
}

impl RulerReport {
    /// Lengths in ascending order.
    pub fn lengths(&self) -> Vec<usize> {
        let mut lengths: Vec<usize> = self.cells().map(|cell| cell.length).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }

    fn tasks(&self) -> Vec<&str> {
        let mut tasks: Vec<&str> = Vec::new();
        for cell in self.cells() {
            if !tasks.contains(&cell.task.as_str()) {
                tasks.push(&cell.task);
            }
        }
        tasks
    }

    fn cells(&self) -> impl Iterator<Item = &Cell> {
        self.models.iter().flat_map(|model| &model.cells)
    }

    /// A row per model and task, a column per length: string match in percent and, behind a slash, right answers among the
    /// most likely candidates; then the averages of RULER's tasks.
    pub fn table(&self) -> Vec<Vec<String>> {
        let lengths = self.lengths();
        let mut rows = vec![vec!["model".to_string(), "task".into()]];
        rows[0].extend(lengths.iter().map(usize::to_string));
        let shown = |matched: Option<f64>, top: Option<f64>| {
            let Some(matched) = matched else { return "-".to_string() };
            let top = top.map_or(String::new(), |top| format!(" / {:.1}", 100.0 * top));
            format!("{:.1}{top}", 100.0 * matched)
        };
        for model in &self.models {
            for task in self.tasks() {
                let cell = |length: &usize| {
                    let cell = model.cell(task, *length);
                    shown(cell.map(|c| c.matched), cell.and_then(|c| c.top))
                };
                let name = [model.model.clone(), task.to_string()];
                rows.push(name.into_iter().chain(lengths.iter().map(cell)).collect());
            }
            let average = |length: &usize| {
                shown(
                    model.average(*length, |c| Some(c.matched)),
                    model.average(*length, |c| c.top),
                )
            };
            let name = [model.model.clone(), "average of RULER's".to_string()];
            rows.push(name.into_iter().chain(lengths.iter().map(average)).collect());
        }
        rows
    }

    /// Writes `ruler.json`, `ruler.csv` and heat maps of every model; returns their paths.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut files = vec![
            ("ruler.json".to_string(), json(&folder.join("ruler.json"), self)?),
            ("ruler.csv".to_string(), self.csv().into_bytes()),
        ];
        for model in &self.models {
            let stem = file_stem(&model.model);
            let mut add = |kind: &str, chart: HeatMap| {
                let svg = standalone(&chart.fragment()).into_bytes();
                files.push((format!("ruler-{stem}-{kind}.svg"), svg));
            };
            add("match", self.chart(model, "string match (%)", |c| Some(c.matched)));
            if model.cells.iter().any(|cell| cell.top.is_some()) {
                add("top", self.chart(model, "right among the most likely (%)", |c| c.top));
            }
        }
        write_all(folder, files)
    }

    fn chart(&self, model: &ModelCells, title: &str, value: fn(&Cell) -> Option<f64>) -> HeatMap {
        let (tasks, lengths) = (self.tasks(), self.lengths());
        let of = |task: &str, length: usize| model.cell(task, length).and_then(value);
        let row = |task: &&str| -> Vec<f64> {
            lengths.iter().map(|length| of(task, *length).unwrap_or(f64::NAN)).collect()
        };
        HeatMap {
            title: format!("{}: {title}", model.model),
            x_label: "length (tokens)".into(),
            y_label: String::new(),
            cols: lengths.iter().map(usize::to_string).collect(),
            rows: tasks.iter().map(|task| task.to_string()).collect(),
            values: tasks.iter().flat_map(row).collect(),
            range: (0.0, 1.0),
            label: |v| format!("{:.0}", 100.0 * v),
        }
    }

    fn csv(&self) -> String {
        let header = "model,task,length,samples,matched,matched_error,top,top_error,auc,chance";
        let mut csv = Csv::new(header);
        for model in &self.models {
            for c in &model.cells {
                csv.name(&model.model).name(&c.task).value(c.length).value(c.samples);
                csv.value(c.matched).value(c.matched_error);
                csv.optional(c.top).optional(c.top_error).optional(c.auc).optional(c.chance);
                csv.end_row();
            }
        }
        csv.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(task: &str, length: usize, matched: [f64; 2]) -> Cell {
        let score = |matched| SampleScore {
            matched,
            top: Some(0.5),
            auc: Some(0.75),
            chance: Some(0.25),
            said: String::new(),
        };
        Cell::new(task, length, &matched.map(score))
    }

    #[test]
    fn averages_leave_out_the_phone_book() {
        let cells = vec![
            cell("vt", 1024, [0.0, 1.0]),
            cell("phonebook", 1024, [1.0, 1.0]),
            cell("vt", 2048, [0.2, 0.2]),
        ];
        assert!((cells[0].matched_error - 0.5).abs() < 1e-12);
        let report = RulerReport {
            samples: "s".into(),
            models: vec![ModelCells { model: "m".into(), cells }],
        };
        let table = report.table();
        assert_eq!(table[0], ["model", "task", "1024", "2048"]);
        assert_eq!(table[1], ["m", "vt", "50.0 / 50.0", "20.0 / 50.0"]);
        assert_eq!(table[2], ["m", "phonebook", "100.0 / 50.0", "-"]);
        assert_eq!(table[3], ["m", "average of RULER's", "50.0 / 50.0", "20.0 / 50.0"]);
        let folder = tempfile::tempdir().unwrap();
        let files = report.write(folder.path()).unwrap();
        assert_eq!(files.len(), 4);
        let csv = std::fs::read_to_string(&files[1]).unwrap();
        assert!(csv.contains("\"m\",\"vt\",1024,2,0.5,0.5,0.5,0,0.75,0.25\n"), "{csv}");
    }
}
