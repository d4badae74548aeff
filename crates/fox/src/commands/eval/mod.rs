//! `fox eval`: what models predict and find again.

mod accuracy;
pub mod loss;
pub mod needle;
pub mod tasks;

use std::process::ExitCode;

use anyhow::Result;
pub use fox_lab::args::{corpus, subjects};

use crate::signals;

/// Evaluate checkpoints: loss by position, needles, tasks
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    evaluation: Evaluation,
}

#[derive(clap::Subcommand)]
enum Evaluation {
    Accuracy(accuracy::Args),
    Loss(loss::Args),
    Needle(needle::Args),
    Tasks(tasks::Args),
}

/// Message after an interrupt.
pub const STOPPED: &str = "stopped; finished work is kept, and the same command resumes";

pub fn run(args: &Args) -> Result<ExitCode> {
    signals::exit_on_signal(STOPPED)?;
    match &args.evaluation {
        Evaluation::Accuracy(args) => accuracy::run(args),
        Evaluation::Loss(args) => loss::run(args),
        Evaluation::Needle(args) => needle::run(args),
        Evaluation::Tasks(args) => tasks::run(args),
    }
}
