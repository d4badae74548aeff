//! `fox reproduce`: the paper's experiments on one machine, in one report.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_lab::reproduce::{self, Settings};

use super::sweep::STOPPED;
use crate::device::DeviceArgs;
use crate::output;

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
    /// How large: laptop, small, 125m, or a TOML file
    #[arg(long, value_name = "NAME", default_value = "laptop")]
    scale: String,
    /// Folder for runs and report
    #[arg(long, value_name = "DIR", required_unless_present = "report")]
    out: Option<PathBuf>,
    /// Experiments: main, table3, gates, lengths, sizes, short, heads, pruning, rates; all of these by default. Also
    /// longer: a trained Transformer is extended to longer sequences, with and without forget gates
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Tokens of a run of the main comparison; other runs are scaled in proportion
    #[arg(long, value_name = "N", value_parser = count)]
    tokens: Option<u64>,
    /// Seeds of the four main models
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: Option<u64>,
    /// Models to train at a time; they share the GPU, or the threads of the CPU
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    #[command(flatten)]
    device: DeviceArgs,
    /// List the runs without training
    #[arg(long)]
    dry_run: bool,
    /// Write the report in DIR again from its files, without training
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "data", "only", "tokens", "seeds"])]
    report: Option<PathBuf>,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
}

/// A number of tokens, also written as 4e7 or 40_000_000.
fn count(text: &str) -> Result<u64, String> {
    let number: Result<f64, _> = text.replace('_', "").parse();
    match number {
        Ok(x) if (1.0..1e15).contains(&x) && x.fract() == 0.0 => Ok(x as u64),
        _ => Err("a number of tokens is a whole number above 0, e.g. 4e7".into()),
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(out) = &args.report {
        reproduce::write_report(out)?;
        output::print(&format!("written: {}\n", out.join("report.html").display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(out) = &args.out else { bail!("name a folder with --out") };
    let command: Vec<String> =
        std::iter::once("fox".to_string()).chain(std::env::args().skip(1)).collect();
    let settings = Settings {
        corpus: args.corpus.clone(),
        data: args.data.clone(),
        scale: args.scale.clone(),
        only: args.only.clone(),
        tokens: args.tokens,
        seeds: args.seeds,
        command: command.join(" "),
    };
    if args.dry_run {
        output::print(&reproduce::dry_run(&settings, out)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let scheduler = args.device.scheduler(args.jobs.into(), args.quiet)?;
    let outcome = reproduce::run(&settings, out, &scheduler, &args.device.arguments(1))?;
    if let Some(summary) = &outcome.summary {
        output::print(summary)?;
        for (label, why) in &outcome.failures {
            output::print(&format!("{label} failed: {why}\n"))?;
        }
        output::print(&format!("written: {}\n", out.join("report.html").display()))?;
    }
    if !outcome.complete {
        output::print(STOPPED)?;
        return Ok(ExitCode::from(130));
    }
    Ok(if outcome.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
