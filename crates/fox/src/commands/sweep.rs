//! `fox sweep`: several recipes on the same data, compared.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;
use fox_train::sweep::{Ended, Search, Sweep, SweepItem, SweepList};

use crate::device::DeviceArgs;
use crate::pool::{Pool, Task, Work};
use crate::{output, signals};

/// Train several recipes on the same data and compare them in one table and picture
///
/// Each ITEM is a recipe (fox train --list), a built-in sweep such as tiny-table3, or a TOML file with
/// `recipes = [...]` and, in `[set.SECTION]`, keys for all of them. A key of --set may have several values, e.g.
/// training.seed=0..4 or optimizer.peak_lr=1e-3,3e-3; every combination is trained, and runs that differ only in the
/// seed are also given as a mean with its interval. OUT gets comparison.md, .csv, .json and .svg and a run
/// folder per run; the same command goes on where it was stopped.
#[derive(clap::Args)]
pub struct Args {
    /// Recipes, sweeps or lists
    #[arg(value_name = "ITEM", required = true)]
    items: Vec<String>,
    /// Prepared data for all of them; the embedded corpus by default
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Folder for the comparison and the runs
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Change a key of every recipe, e.g. training.tokens=1e6, training.seed=0..4, optimizer.peak_lr=1e-3,3e-3
    #[arg(long = "set", value_name = "KEY=VALUE,...")]
    overrides: Vec<String>,
    /// Search around each recipe instead of training it alone
    #[arg(long, value_enum)]
    search: Option<SearchName>,
    /// Models that are trained at the same time; they share the GPU, or the threads of the CPU
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print only the table
    #[arg(long)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum SearchName {
    /// Learning rates {1, 2, 5} x 10^i until a local optimum is bracketed
    Lr,
    /// Heads of width 64 and 128
    HeadDim,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (lists, listed_search) = SweepList::gather(&args.items)?;
    let mut items = Vec::new();
    for list in &lists {
        items.extend(list.items(&args.overrides, args.data.as_deref())?);
    }
    let search = match args.search {
        Some(SearchName::Lr) => Some(Search::LearningRate),
        Some(SearchName::HeadDim) => Some(Search::HeadDim),
        None => listed_search,
    };
    let mut work = Runs {
        device: args.device.arguments(args.jobs.into()),
        sweep: Sweep::new(&args.out, items, search)?,
        running: Vec::new(),
    };
    let stop = signals::on_stop(|| {
        output::note("\nstopping all runs with a checkpoint; once more to stop at once");
    })?;
    let pool = Pool { jobs: args.jobs.into(), quiet: args.quiet, stop };
    pool.run(&mut work)?;
    let comparison = work.sweep.comparison();
    output::print(&comparison.markdown())?;
    if !comparison.complete {
        output::print("stopped; run the same command again to go on\n")?;
        return Ok(ExitCode::from(130));
    }
    output::print(&format!("{} has the table and the picture\n", args.out.display()))?;
    let failed = comparison.rows.iter().any(|row| row.failed.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The runs of a sweep as processes.
struct Runs {
    sweep: Sweep,
    device: Vec<String>,
    running: Vec<SweepItem>,
}

impl Work for Runs {
    fn next(&mut self) -> Result<Option<Task>> {
        let Some(item) = self.sweep.next_run()? else { return Ok(None) };
        let out = self.sweep.folder(&item.label);
        let data = item.recipe.data.path.as_deref();
        let mut arguments = training(&item.spec, &item.settings, data, &out);
        arguments.extend(self.device.iter().cloned());
        let label = item.label.clone();
        self.running.push(item);
        Ok(Some(Task { label, arguments, alone: false }))
    }

    fn ended(&mut self, label: &str, ended: Ended, _: f64) -> Result<()> {
        let Some(at) = self.running.iter().position(|item| item.label == label) else {
            return Ok(());
        };
        let item = self.running.remove(at);
        Ok(self.sweep.ended(&item, ended)?)
    }
}

/// The arguments of `fox train`.
pub fn training(
    spec: &str,
    settings: &[String],
    data: Option<&std::path::Path>,
    out: &std::path::Path,
) -> Vec<String> {
    let mut arguments = vec!["train".to_string(), spec.to_string()];
    for setting in settings {
        arguments.extend(["--set".to_string(), setting.clone()]);
    }
    if let Some(path) = data {
        arguments.extend(["--data".to_string(), path.display().to_string()]);
    }
    arguments.extend(["--out".to_string(), out.display().to_string()]);
    arguments
}
