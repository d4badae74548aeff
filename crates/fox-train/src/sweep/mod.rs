//! Several recipes on the same data: one table, one picture, and the searches of the paper.
//!
//! ```text
//! OUT/runs/LABEL/       a run folder each; a finished one is not trained again
//! OUT/comparison.{md,csv,json,svg}
//! ```

mod list;
mod search;
mod table;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use fox_base::durable;
use fox_tensor::Device;

pub use list::{Search, SweepItem, SweepList};
pub use search::{Bracket, learning_rate_grid};
pub use table::{Comparison, Row};

use crate::trainer::{Event, Job, train};
use crate::{Error, Recipe, Result};

/// Where the runs of a sweep go.
pub struct SweepJob {
    /// The sweep's folder.
    pub out: PathBuf,
    /// Where to compute.
    pub device: Device,
    /// The command line, for the record.
    pub command: Vec<String>,
}

/// The callback of a sweep: the label of the run and what happens in it.
pub type SweepObserver<'a> = dyn FnMut(&str, &Event<'_>) -> ControlFlow<()> + 'a;

/// Runs all items, then the search if there is one, and writes the comparison after every run.
///
/// Returns the comparison so far; it is not complete when the observer asked to stop.
pub fn sweep(
    job: &SweepJob,
    items: &[SweepItem],
    search: Option<Search>,
    observe: &mut SweepObserver<'_>,
) -> Result<Comparison> {
    for (i, item) in items.iter().enumerate() {
        if items[..i].iter().any(|earlier| earlier.label == item.label) {
            return Err(Error::SameLabel { label: item.label.clone() });
        }
    }
    durable::create_folder(&job.out.join("runs"))?;
    let mut comparison = Comparison::default();
    for item in items {
        let complete = match search {
            None => run_one(job, &item.label, &item.recipe, observe, &mut comparison)?.is_some(),
            Some(Search::LearningRate) => {
                search_learning_rate(job, item, observe, &mut comparison)?
            }
            Some(Search::HeadDim) => search_head_dim(job, item, observe, &mut comparison)?,
        };
        if !complete {
            return Ok(comparison);
        }
    }
    comparison.complete = true;
    comparison.write(&job.out)?;
    Ok(comparison)
}

/// The loss of one run, trained or read; infinite when it diverged, `None` when it was stopped.
fn run_one(
    job: &SweepJob,
    label: &str,
    recipe: &Recipe,
    observe: &mut SweepObserver<'_>,
    comparison: &mut Comparison,
) -> Result<Option<f64>> {
    let out = job.out.join("runs").join(folder_name(label));
    let diverged = out.join("diverged.txt");
    let row = if diverged.exists() {
        Row::diverged(label, recipe, read_note(&diverged)?)
    } else {
        let run = Job {
            recipe: recipe.clone(),
            out: out.clone(),
            device: job.device.clone(),
            command: job.command.clone(),
        };
        match train(&run, &mut |event| observe(label, event)) {
            Ok(outcome) if !outcome.summary.finished => return Ok(None),
            Ok(outcome) => Row::finished(label, recipe, outcome.summary, &out)?,
            Err(error @ Error::NotFinite { .. }) => {
                durable::write(&diverged, error.to_string().as_bytes())?;
                Row::diverged(label, recipe, error.to_string())
            }
            Err(error) => return Err(error),
        }
    };
    let loss = row.loss().unwrap_or(f64::INFINITY);
    comparison.rows.push(row);
    comparison.write(&job.out)?;
    Ok(Some(loss))
}

/// Learning rates {1, 2, 5} x 10^i around the recipe's own until both neighbours of the best are worse.
fn search_learning_rate(
    job: &SweepJob,
    item: &SweepItem,
    observe: &mut SweepObserver<'_>,
    comparison: &mut Comparison,
) -> Result<bool> {
    let mut bracket = Bracket::around(item.recipe.optimizer.peak_lr);
    while let Some(index) = bracket.next() {
        let lr = learning_rate_grid(index);
        let mut recipe = item.recipe.clone();
        recipe.optimizer.peak_lr = lr;
        let label = format!("{} lr {lr:e}", item.label);
        match run_one(job, &label, &recipe, observe, comparison)? {
            Some(loss) => bracket.record(index, loss),
            None => return Ok(false),
        }
    }
    Ok(true)
}

/// Heads of width 64 and 128, where the model's width allows.
fn search_head_dim(
    job: &SweepJob,
    item: &SweepItem,
    observe: &mut SweepObserver<'_>,
    comparison: &mut Comparison,
) -> Result<bool> {
    let width = item.recipe.model.get("hidden_size").and_then(toml::Value::as_integer);
    for dim in [64, 128] {
        let Some(heads) = width.filter(|w| w % dim == 0).map(|w| w / dim) else { continue };
        let mut recipe = item.recipe.clone();
        recipe.model.insert("num_heads".into(), toml::Value::Integer(heads));
        let label = format!("{} head dim {dim}", item.label);
        if run_one(job, &label, &recipe, observe, comparison)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn read_note(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(Error::io("read", path))
}

/// A label as the name of a folder.
fn folder_name(label: &str) -> String {
    let plain = |c: char| if c.is_alphanumeric() || "+-_.".contains(c) { c } else { '_' };
    label.chars().map(plain).collect()
}
