//! `fox sweep`: several recipes on the same data, compared.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Result;
use clap::ValueEnum;
use fox_train::Event;
use fox_train::sweep::{Search, SweepJob, SweepList, sweep};

use super::train::{Progress, say_stopping};
use crate::device::DeviceArgs;
use crate::{output, signals};

/// Train several recipes on the same data and compare them in one table and picture
///
/// Each ITEM is a recipe (fox train --list), a built-in sweep such as tiny-table3, or a TOML file with
/// `recipes = [...]` and, in `[set.SECTION]`, keys for all of them. OUT gets comparison.md, .csv, .json and .svg and a run
/// folder per recipe; the same command goes on where it was stopped.
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
    /// Change a key of every recipe, e.g. training.tokens=1e6
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Search around each recipe instead of training it alone
    #[arg(long, value_enum)]
    search: Option<SearchName>,
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
    let job = SweepJob {
        out: args.out.clone(),
        device: args.device.open()?,
        command: std::env::args().collect(),
    };
    let stop = signals::on_stop(say_stopping)?;
    let (mut progress, mut current) = (Progress::new(args.quiet), String::new());
    let comparison = sweep(&job, &items, search, &mut |label, event| {
        if matches!(event, Event::Started(_)) && label != current {
            progress.finish();
            progress = Progress::new(args.quiet);
            current = label.to_string();
        }
        progress.show(event);
        if stop.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    progress.finish();
    output::print(&comparison.markdown())?;
    if !comparison.complete {
        output::print("stopped; run the same command again to go on\n")?;
        return Ok(ExitCode::from(130));
    }
    output::print(&format!("{} has the table and the picture\n", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}
