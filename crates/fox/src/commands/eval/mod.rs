//! `fox eval`: what models predict and find again.

mod accuracy;
mod boundaries;
pub mod loss;
pub mod needle;
mod ruler;
pub mod tasks;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
pub use fox_lab::args::{corpus, subjects};
use serde_json::Value;

use crate::{output, signals};

/// Evaluate checkpoints: loss by position, needles, RULER, tasks
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    evaluation: Evaluation,
}

#[derive(clap::Subcommand)]
enum Evaluation {
    Accuracy(accuracy::Args),
    Boundaries(boundaries::Args),
    Loss(loss::Args),
    Needle(needle::Args),
    Ruler(ruler::Args),
    Tasks(tasks::Args),
}

/// Message after an interrupt.
pub const STOPPED: &str = "stopped; finished work is kept, and the same command resumes";

pub fn run(args: &Args) -> Result<ExitCode> {
    signals::exit_on_signal(STOPPED)?;
    match &args.evaluation {
        Evaluation::Accuracy(args) => accuracy::run(args),
        Evaluation::Boundaries(args) => boundaries::run(args),
        Evaluation::Loss(args) => loss::run(args),
        Evaluation::Needle(args) => needle::run(args),
        Evaluation::Ruler(args) => ruler::run(args),
        Evaluation::Tasks(args) => tasks::run(args),
    }
}

/// Prints a report as JSON, or its text and the names of its files.
fn print_report(
    json: bool,
    report: serde_json::Result<Value>,
    text: &str,
    written: &[PathBuf],
) -> Result<ExitCode> {
    if json {
        output::print(&format!("{:#}\n", report?))?;
    } else {
        let names: Vec<String> = written.iter().map(|p| p.display().to_string()).collect();
        output::print(&format!("{text}written: {}\n", names.join(", ")))?;
    }
    Ok(ExitCode::SUCCESS)
}
