//! `fox eval`: what models predict and find again.

mod accuracy;
pub mod loss;
pub mod needle;
pub mod tasks;

use std::process::ExitCode;

use anyhow::Result;
pub use fox_lab::args::{corpus, subjects};

use crate::signals;

/// Evaluate checkpoints: loss at every position, needles in a haystack, tasks, accuracy on small tasks
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Accuracy(accuracy::Args),
    Loss(loss::Args),
    Needle(needle::Args),
    Tasks(tasks::Args),
}

/// What an interrupt is answered with.
pub const STOPPED: &str = "stopped; what is finished is kept, and the same command goes on";

pub fn run(args: &Args) -> Result<ExitCode> {
    signals::exit_on_signal(STOPPED)?;
    match &args.what {
        What::Accuracy(args) => accuracy::run(args),
        What::Loss(args) => loss::run(args),
        What::Needle(args) => needle::run(args),
        What::Tasks(args) => tasks::run(args),
    }
}
