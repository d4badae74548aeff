//! `fox reproduce`: the paper's experiments on one machine, in one report.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use fox_lab::args::count::count;
use fox_lab::provenance;
use fox_lab::reproduce::{self, Settings};

use super::sweep::STOPPED;
use crate::device::DeviceArgs;
use crate::{hints, output};

/// Repeat the experiments of the paper in one report
///
/// The main comparison of all models with seeds, Table 3, kinds of forget gate, training length, model size, short
/// contexts, searches for learning rate and head width, needles, forget matrices of heads, and pruning. CORPUS names
/// the data in the report. Learning rates are searched first, with fewer tokens. Before the first run an estimate of
/// the time is printed.
///
/// Run the same command again to resume. A stop still writes a report of the finished runs: OUT/report.html
/// (self-contained), report.md with pictures/, and report.json. The experiments are TOML files (recipes/reproduce).
#[derive(clap::Args)]
pub struct Args {
    /// Name of the data in the report
    #[arg(value_name = "CORPUS", default_value = "the embedded corpus")]
    corpus: String,
    /// Prepared data with long held-out documents (fox prepare); the embedded corpus by default
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// How large: laptop, minutes, small, 125m, or a TOML file
    #[arg(long, value_name = "NAME", default_value = "laptop")]
    scale: String,
    /// Folder for runs and report
    #[arg(long, value_name = "DIR", required_unless_present_any = ["report", "dry_run"])]
    out: Option<PathBuf>,
    /// Experiments: main, table3, gates, lengths, sizes, short, heads, pruning, rates; all of these by default. Also
    /// longer (a trained Transformer is extended to longer sequences, with and without forget gates), successors (PaTH,
    /// Wall, KDA and hybrids) and start (of the gates)
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Tokens of a run of the main comparison; other runs are scaled in proportion
    #[arg(long, value_name = "N", value_parser = count)]
    tokens: Option<u64>,
    /// Seeds of the repeated rows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: Option<u64>,
    /// Models to train at a time; they share the GPU, or the threads of the CPU
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    #[command(flatten)]
    device: DeviceArgs,
    /// List the runs and estimate their time from a few steps, without training; needs no --out
    #[arg(long)]
    dry_run: bool,
    /// Write the report in DIR again from its files, without training
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "data", "only", "tokens", "seeds"])]
    report: Option<PathBuf>,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    /// Print the numbers of the report, or the estimate of --dry-run, as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(out) = &args.report {
        reproduce::write_report(out)?;
        match args.json {
            true => print_numbers(out)?,
            false => output::print(&format!("written: {}\n", out.join("report.html").display()))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let settings = Settings {
        corpus: args.corpus.clone(),
        data: args.data.clone(),
        scale: args.scale.clone(),
        only: args.only.clone(),
        tokens: args.tokens,
        seeds: args.seeds,
        command: provenance::command(),
    };
    if args.dry_run {
        let out = args.out.clone().unwrap_or_else(|| "reproduction".into());
        let device = args.device.open()?;
        let found = reproduce::dry_run(&settings, &out, args.jobs.into(), &device)?;
        output::print(&match args.json {
            true => format!("{}\n", serde_json::to_string_pretty(&found.estimate?)?),
            false => found.text(),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(out) = &args.out else { bail!("name a folder with --out") };
    hints::results_folder(out)?;
    let scheduler = args.device.scheduler(args.jobs.into(), args.quiet)?;
    let outcome = reproduce::run(&settings, out, &scheduler, &args.device.arguments(1))?;
    if args.json && outcome.summary.is_some() {
        print_numbers(out)?;
    } else if let Some(summary) = &outcome.summary {
        output::print(summary)?;
        for (label, why) in &outcome.failures {
            output::print(&format!("{label} failed: {why}\n"))?;
        }
        output::print(&format!("written: {}\n", out.join("report.html").display()))?;
    }
    if !outcome.complete {
        output::note(STOPPED.trim_end());
        return Ok(ExitCode::from(130));
    }
    Ok(if outcome.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the JSON of the report in a folder.
fn print_numbers(out: &Path) -> Result<()> {
    let path = out.join("report.json");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(output::print(&text)?)
}
