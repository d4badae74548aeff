//! Several recipes on the same data: one table, one picture, and the searches of the paper.
//!
//! ```text
//! OUT/runs/LABEL/       a run folder each; a finished one is not trained again
//! OUT/comparison.{md,csv,json,svg}
//! ```
//!
//! A [`Sweep`] decides what runs next and keeps the comparison; whoever drives it trains the runs, one after the
//! other or several at a time, and tells how each ended.

pub mod grid;
mod list;
mod search;
mod spread;
mod table;

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};

use fox_base::durable;

pub use list::{Search, SweepItem, SweepList};
pub use search::{Bracket, learning_rate_grid};
pub use spread::Spread;
pub use table::{Comparison, Repeated, Row};

use crate::run_folder::finished_run;
use crate::{Error, Result};

/// What says in a run folder that the run diverged.
const DIVERGED: &str = "diverged.txt";

/// How a run ended that was not stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With a summary in its folder.
    Well,
    /// Its gradients stayed non-finite; the sentence that says so.
    Diverged(String),
    /// It could not be trained; why.
    Failed(String),
}

/// A sweep under way.
pub struct Sweep {
    out: PathBuf,
    chains: Vec<Chain>,
    rows: Vec<(usize, Row)>,
}

/// Runs of which one may depend on another.
struct Chain {
    item: SweepItem,
    waiting: VecDeque<SweepItem>,
    running: Vec<String>,
    /// A search for the learning rate, and its points that were handed out.
    search: Option<(Bracket, Vec<i32>)>,
}

impl Sweep {
    /// A sweep of these recipes, or of a search around each, in the folder `out`.
    ///
    /// # Errors
    /// Two recipes of the same name.
    pub fn new(out: &Path, items: Vec<SweepItem>, search: Option<Search>) -> Result<Sweep> {
        for (i, item) in items.iter().enumerate() {
            if items[..i].iter().any(|earlier| earlier.label == item.label) {
                return Err(Error::SameLabel { label: item.label.clone() });
            }
        }
        let chain = |item: SweepItem| {
            let waiting = match search {
                None => VecDeque::from([item.clone()]),
                Some(Search::HeadDim) => head_dims(&item)?,
                Some(Search::LearningRate) => VecDeque::new(),
            };
            let lr = item.recipe.optimizer.peak_lr;
            let bracket = (search == Some(Search::LearningRate)).then(|| Bracket::around(lr));
            let search = bracket.map(|bracket| (bracket, Vec::new()));
            Ok(Chain { item, waiting, running: Vec::new(), search })
        };
        let chains = items.into_iter().map(chain).collect::<Result<_>>()?;
        durable::create_folder(&out.join("runs"))?;
        Ok(Sweep { out: out.to_path_buf(), chains, rows: Vec::new() })
    }

    /// The next run to train; `None` when all are under way or known.
    pub fn next_run(&mut self) -> Result<Option<SweepItem>> {
        for number in 0..self.chains.len() {
            while let Some(item) = self.chains[number].next()? {
                match self.known(&item)? {
                    Some(row) => self.record(number, row)?,
                    None => {
                        self.chains[number].running.push(item.label.clone());
                        return Ok(Some(item));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Where a run is trained.
    pub fn folder(&self, label: &str) -> PathBuf {
        self.out.join("runs").join(folder_name(label))
    }

    /// Takes note of the end of a run and writes the comparison so far.
    pub fn ended(&mut self, item: &SweepItem, ended: Ended) -> Result<()> {
        let folder = self.folder(&item.label);
        let row = match ended {
            Ended::Well => match finished_run(&folder, &item.recipe)? {
                Some(summary) => Row::finished(item, summary, &folder)?,
                None => Row { failed: Some("it left no summary".into()), ..Row::new(item) },
            },
            Ended::Diverged(why) => {
                durable::write(&folder.join(DIVERGED), why.as_bytes())?;
                Row { diverged: Some(why), ..Row::new(item) }
            }
            Ended::Failed(why) => Row { failed: Some(why), ..Row::new(item) },
        };
        let is_running = |chain: &Chain| chain.running.contains(&item.label);
        let Some(number) = self.chains.iter().position(is_running) else { return Ok(()) };
        self.chains[number].running.retain(|label| *label != item.label);
        self.record(number, row)
    }

    /// The runs so far, those of one recipe together.
    pub fn comparison(&self) -> Comparison {
        let mut rows = self.rows.clone();
        rows.sort_by_key(|(chain, _)| *chain);
        let rows: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
        let complete = self.chains.iter().all(Chain::is_over);
        Comparison { complete, seeds: Comparison::repeated(&rows), rows }
    }

    /// The row of a run that is over already.
    fn known(&self, item: &SweepItem) -> Result<Option<Row>> {
        let folder = self.folder(&item.label);
        let note = folder.join(DIVERGED);
        if note.exists() {
            let why = fs::read_to_string(&note).map_err(Error::io("read", &note))?;
            return Ok(Some(Row { diverged: Some(why), ..Row::new(item) }));
        }
        let summary = finished_run(&folder, &item.recipe)?;
        summary.map(|summary| Row::finished(item, summary, &folder)).transpose()
    }

    fn record(&mut self, number: usize, row: Row) -> Result<()> {
        let chain = &mut self.chains[number];
        // A search cannot go on around a loss that nobody knows.
        if row.failed.is_some() {
            chain.search = None;
        }
        if let Some((bracket, asked)) = &mut chain.search {
            let same = |index: &i32| learning_rate_grid(*index) == row.peak_lr;
            if let Some(index) = asked.iter().copied().find(same) {
                bracket.record(index, row.loss().unwrap_or(f64::INFINITY));
            }
        }
        self.rows.push((number, row));
        self.comparison().write(&self.out)
    }
}

impl Chain {
    fn next(&mut self) -> Result<Option<SweepItem>> {
        if let Some((bracket, asked)) = &mut self.search {
            for index in bracket.wanted() {
                if !asked.contains(&index) {
                    asked.push(index);
                    let lr = learning_rate_grid(index);
                    let item = self
                        .item
                        .with(&format!("lr {lr:e}"), format!("optimizer.peak_lr={lr:e}"))?;
                    self.waiting.push_back(item);
                }
            }
        }
        Ok(self.waiting.pop_front())
    }

    fn is_over(&self) -> bool {
        let searching = self.search.as_ref().is_some_and(|(b, _)| !b.wanted().is_empty());
        !searching && self.waiting.is_empty() && self.running.is_empty()
    }
}

/// Heads of width 64 and 128, where the model's width allows.
fn head_dims(item: &SweepItem) -> Result<VecDeque<SweepItem>> {
    let width = item.recipe.model.get("hidden_size").and_then(toml::Value::as_integer);
    let heads = |dim: i64| width.filter(|w| w % dim == 0).map(|w| w / dim);
    let dims = [64, 128].into_iter().filter_map(|dim| Some((dim, heads(dim)?)));
    dims.map(|(dim, heads)| {
        item.with(&format!("head dim {dim}"), format!("model.num_heads={heads}"))
    })
    .collect()
}

/// A label as the name of a folder.
pub fn folder_name(label: &str) -> String {
    let plain = |c: char| if c.is_alphanumeric() || "+-_.".contains(c) { c } else { '_' };
    label.chars().map(plain).collect()
}
