//! Several recipes on the same data: one table, one chart, and the searches of the paper.
//!
//! ```text
//! OUT/runs/LABEL/       a run folder each; a finished run is not trained again
//! OUT/comparison.{md,csv,json,svg}
//! ```

mod grid;
mod list;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fox_base::durable;

pub(crate) use list::recipe_settings;
pub use list::{SWEEPS, Search, SweepItem, SweepList};
pub use table::{Comparison, Repeated, Row};

use crate::Scheduler;
use crate::graph::{Experiment, Node, NodeId, RunGraph};
use crate::search::RateSearch;

/// A sweep.
pub struct Sweep {
    out: PathBuf,
    chains: Vec<Chain>,
}

/// A recipe of the sweep, or the search around it.
struct Chain {
    item: SweepItem,
    search: Option<RateSearch>,
    /// Its runs.
    runs: Vec<(SweepItem, NodeId)>,
}

/// Trains all runs of a sweep and writes the comparison, also of what is finished when it is stopped.
pub fn run(
    out: &Path,
    items: Vec<SweepItem>,
    search: Option<Search>,
    scheduler: &Scheduler,
) -> Result<Comparison> {
    for (i, item) in items.iter().enumerate() {
        let label = &item.run.label;
        if items[..i].iter().any(|earlier| earlier.run.label == *label) {
            bail!("two recipes of the sweep are called `{label}`; rename a file or leave one out");
        }
    }
    let mut graph = RunGraph::default();
    let mut chains = Vec::new();
    for item in items {
        let variants = match search {
            None => vec![item.clone()],
            Some(Search::HeadDim) => head_dims(&item, out)?,
            Some(Search::LearningRate) => Vec::new(),
        };
        let lr = item.recipe.optimizer.peak_lr;
        let search = (search == Some(Search::LearningRate)).then(|| RateSearch::around(lr));
        let add = |item: SweepItem| -> Result<(SweepItem, NodeId)> {
            let id = graph.add(Node::train(item.run.clone()))?;
            Ok((item, id))
        };
        let runs = variants.into_iter().map(add).collect::<Result<_>>()?;
        chains.push(Chain { item, search, runs });
    }
    durable::create_folder(&out.join("runs"))?;
    let mut sweep = Sweep { out: out.to_path_buf(), chains };
    scheduler.run(&mut graph, &mut sweep)?;
    sweep.comparison(&graph)
}

impl Experiment for Sweep {
    fn update(&mut self, graph: &mut RunGraph, _: Option<(NodeId, f64)>) -> Result<()> {
        for chain in &mut self.chains {
            let Some(search) = &mut chain.search else { continue };
            let item = |lr: f64| {
                chain.item.with(
                    &format!("lr {lr:e}"),
                    format!("optimizer.peak_lr={lr:e}"),
                    &self.out,
                )
            };
            search.update(graph, 0, |lr| Ok(item(lr)?.run))?;
            for (index, id) in &search.nodes[chain.runs.len()..] {
                chain.runs.push((item(crate::search::learning_rate_grid(*index))?, *id));
            }
        }
        let comparison = self.comparison(graph)?;
        if comparison.rows.is_empty() {
            return Ok(());
        }
        comparison.write(&self.out)
    }
}

impl Sweep {
    /// The runs that have ended, those of one recipe together.
    fn comparison(&self, graph: &RunGraph) -> Result<Comparison> {
        let mut rows = Vec::new();
        for (item, id) in self.chains.iter().flat_map(|chain| &chain.runs) {
            if let Some(outcome) = &graph.node(*id).outcome {
                rows.push(Row::new(item, outcome)?);
            }
        }
        let over = |chain: &Chain| chain.search.as_ref().is_none_or(RateSearch::is_over);
        let complete =
            self.chains.iter().all(over) && graph.nodes().iter().all(|node| node.outcome.is_some());
        Ok(Comparison { complete, seeds: Comparison::over_seeds(&rows), rows })
    }
}

/// Heads of width 64 and 128, if they divide the model's width.
fn head_dims(item: &SweepItem, out: &Path) -> Result<Vec<SweepItem>> {
    let width = item.recipe.model.get("hidden_size").and_then(toml::Value::as_integer);
    let heads = |dim: i64| width.filter(|w| w % dim == 0).map(|w| w / dim);
    let dims = [64, 128].into_iter().filter_map(|dim| Some((dim, heads(dim)?)));
    dims.map(|(dim, heads)| {
        item.with(&format!("head dim {dim}"), format!("model.num_heads={heads}"), out)
    })
    .collect()
}
