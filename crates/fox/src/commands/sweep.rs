//! `fox sweep`: several recipes on the same data, compared.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;
use fox_lab::sweep::{Search, SweepList};

use crate::device::DeviceArgs;
use crate::output;

/// Printed when an experiment was stopped.
pub const STOPPED: &str = "stopped; run the same command again to resume\n";

/// Train several recipes and compare them in one table and chart
///
/// Each ITEM is a recipe (fox train --list), a built-in sweep such as tiny-table3, or a TOML file with
/// `recipes = [...]` and, in `[set.SECTION]`, overrides for all of them. A key of --set may have several values, e.g.
/// training.seed=0..4 or optimizer.peak_lr=1e-3,3e-3; every combination is trained, and runs that differ only in the
/// seed are also reported as a mean with its interval. OUT gets comparison.md, .csv, .json and .svg and a run folder
/// per run; run the same command again to resume.
#[derive(clap::Args)]
pub struct Args {
    /// Recipes, built-in sweeps or TOML files
    #[arg(value_name = "ITEM", required = true)]
    items: Vec<String>,
    /// Prepared data for all runs; the embedded corpus by default
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Folder for the comparison and the runs
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Override a key of every recipe, e.g. training.tokens=1e6, training.seed=0..4, optimizer.peak_lr=1e-3,3e-3
    #[arg(long = "set", value_name = "KEY=VALUE,...")]
    overrides: Vec<String>,
    /// Search around each recipe instead of training it alone
    #[arg(long, value_enum)]
    search: Option<SearchName>,
    /// Models to train at a time; they share the GPU, or the threads of the CPU
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print only the table
    #[arg(long)]
    quiet: bool,
    /// Print the comparison as JSON
    #[arg(long)]
    json: bool,
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
        items.extend(list.items(&args.overrides, args.data.as_deref(), &args.out)?);
    }
    let search = match args.search {
        Some(SearchName::Lr) => Some(Search::LearningRate),
        Some(SearchName::HeadDim) => Some(Search::HeadDim),
        None => listed_search,
    };
    let scheduler = args.device.scheduler(args.jobs.into(), args.quiet)?;
    let comparison = fox_lab::sweep::run(&args.out, items, search, &scheduler)?;
    output::print(&match args.json {
        true => format!("{}\n", serde_json::to_string_pretty(&comparison)?),
        false => comparison.terminal(),
    })?;
    if !comparison.complete {
        output::note(STOPPED.trim_end());
        return Ok(ExitCode::from(130));
    }
    if !args.json {
        output::print(&format!("table and chart: {}\n", args.out.join("comparison.*").display()))?;
    }
    let failed = comparison.rows.iter().any(|row| row.failed.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
