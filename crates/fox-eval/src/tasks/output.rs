//! Results as files and tables.

use std::path::{Path, PathBuf};

use fox_data::{Record, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::metrics::{Figure, Metric};
use super::run::{TaskOptions, TaskResult, run_task};
use super::spec::TaskSpec;
use crate::Result;
use crate::csv::Csv;
use crate::files::{file_stem, json, kept, write_whole};
use crate::subject::Subject;

/// The results of several models and tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// All results, model by model.
    pub results: Vec<TaskResult>,
}

/// Runs a task, or takes its result from `folder` when the same model was asked the same before. The folder
/// gets `MODEL.TASK.json` and, one line per row, `MODEL.TASK.samples.jsonl`.
pub fn result_on_file(
    folder: &Path,
    subject: &Subject<'_>,
    tokenizer: &Tokenizer,
    spec: &TaskSpec,
    rows: &[Record],
    options: &TaskOptions,
    progress: impl FnMut(f64),
) -> Result<TaskResult> {
    let evaluation = identity(subject, tokenizer, spec, rows, options)?;
    let stem = format!("{}.{}", file_stem(subject.name), file_stem(&spec.name));
    let mut result = kept(&folder.join(format!("{stem}.json")), &evaluation, || {
        let (result, samples) = run_task(subject, tokenizer, spec, rows, options, progress)?;
        let lines: Vec<String> = samples.iter().map(Value::to_string).collect();
        let samples = folder.join(format!("{stem}.samples.jsonl"));
        write_whole(&samples, (lines.join("\n") + "\n").as_bytes())?;
        Ok(result)
    })?;
    // Files of two names may share a stem.
    result.model = subject.name.to_string();
    Ok(result)
}

/// Everything that decides a result.
fn identity(
    subject: &Subject<'_>,
    tokenizer: &Tokenizer,
    spec: &TaskSpec,
    rows: &[Record],
    options: &TaskOptions,
) -> Result<String> {
    let mut hash = XxHash3_64::oneshot(spec.source.as_bytes());
    for row in rows {
        let text = serde_json::to_vec(row).unwrap_or_default();
        hash = XxHash3_64::oneshot_with_seed(hash, &text);
    }
    Ok(format!(
        "model {:016x}, {}, {} rows {hash:016x}, {} {options:?} length {:?}",
        subject.fingerprint()?,
        spec.name,
        rows.len(),
        tokenizer.identity(),
        subject.training_length
    ))
}

impl TaskReport {
    /// Writes `tasks.json` and `tasks.csv` into a folder; returns their paths.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let paths = ["tasks.json", "tasks.csv"].map(|name| folder.join(name));
        write_whole(&paths[0], &json(&paths[0], self)?)?;
        write_whole(&paths[1], self.csv().as_bytes())?;
        Ok(paths.to_vec())
    }

    fn csv(&self) -> String {
        let mut csv = Csv::new("model,task,metric,value,stderr,items");
        for result in &self.results {
            for f in &result.figures {
                csv.name(&result.model).value(&result.task).value(f.metric.name());
                csv.value(f.value).optional(f.stderr).value(f.items).end_row();
            }
        }
        csv.finish()
    }

    /// Names of the models, in their order.
    pub fn models(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for result in &self.results {
            if !names.contains(&result.model.as_str()) {
                names.push(&result.model);
            }
        }
        names
    }

    /// The results of some tasks only.
    pub fn only(&self, wanted: impl Fn(&str) -> bool) -> TaskReport {
        TaskReport { results: self.results.iter().filter(|r| wanted(&r.task)).cloned().collect() }
    }

    /// A row per model and a column per task and metric, fractions in percent, each with its standard error. The
    /// last column is the mean of one fraction per task: of `acc_norm` where there is one, as in the paper.
    pub fn table(&self) -> Vec<Vec<String>> {
        let mut columns: Vec<(&str, Metric)> = Vec::new();
        for result in &self.results {
            for figure in &result.figures {
                if !columns.contains(&(&result.task, figure.metric)) {
                    columns.push((&result.task, figure.metric));
                }
            }
        }
        let mut head = vec!["model".to_string()];
        head.extend(columns.iter().map(|(task, metric)| format!("{task} {}", metric.name())));
        head.push("mean share".into());
        let mut rows = vec![head];
        for model in self.models() {
            let of = |task: &str| self.results.iter().find(|r| r.model == model && r.task == task);
            let mut row = vec![model.to_string()];
            row.extend(columns.iter().map(|(task, metric)| {
                of(task).and_then(|r| r.figure(*metric)).map_or("-".into(), cell)
            }));
            row.push(self.mean_share(model).map_or("-".into(), |m| format!("{:.1}", 100.0 * m)));
            rows.push(row);
        }
        rows
    }

    /// Mean of one fraction per task.
    pub(crate) fn mean_share(&self, model: &str) -> Option<f64> {
        let of = |r: &TaskResult| {
            let norm = r.figure(Metric::AccNorm);
            norm.or_else(|| r.figures.iter().find(|f| f.metric.is_share())).map(|f| f.value)
        };
        let shares: Vec<f64> =
            self.results.iter().filter(|r| r.model == model).filter_map(of).collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }
}

fn cell(figure: &Figure) -> String {
    let (scale, digits) = if figure.metric.is_share() { (100.0, 1) } else { (1.0, 3) };
    let error = figure.stderr.map(|e| format!(" ±{:.digits$}", scale * e)).unwrap_or_default();
    format!("{:.digits$}{error}", scale * figure.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(metric: Metric, value: f64, stderr: Option<f64>) -> Figure {
        Figure { metric, value, stderr, items: 4 }
    }

    fn report() -> TaskReport {
        let result =
            |task: &str, figures| TaskResult { task: task.into(), model: "m".into(), figures };
        TaskReport {
            results: vec![
                result(
                    "lambada_openai",
                    vec![
                        figure(Metric::Perplexity, 12.5, Some(0.25)),
                        figure(Metric::Acc, 0.5, Some(0.1)),
                    ],
                ),
                result(
                    "piqa",
                    vec![figure(Metric::Acc, 0.25, None), figure(Metric::AccNorm, 0.75, None)],
                ),
            ],
        }
    }

    #[test]
    fn tables_show_shares_in_percent() {
        let rows = report().table();
        assert_eq!(
            rows[0],
            [
                "model",
                "lambada_openai perplexity",
                "lambada_openai acc",
                "piqa acc",
                "piqa acc_norm",
                "mean share"
            ]
        );
        assert_eq!(rows[1], ["m", "12.500 ±0.250", "50.0 ±10.0", "25.0", "75.0", "62.5"]);
    }

    #[test]
    fn written_files_agree() {
        let folder = tempfile::tempdir().unwrap();
        let files = report().write(folder.path()).unwrap();
        let csv = std::fs::read_to_string(&files[1]).unwrap();
        assert!(csv.contains("\"m\",lambada_openai,perplexity,12.5,0.25,4\n"), "{csv}");
        let read: TaskReport = serde_json::from_slice(&std::fs::read(&files[0]).unwrap()).unwrap();
        assert_eq!(read, report());
    }
}
