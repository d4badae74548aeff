//! `fox eval`: what models predict and find again.

mod loss;
mod needle;
pub mod subjects;

use std::process::ExitCode;

use anyhow::Result;

/// Evaluate checkpoints: loss at every position, needles in a haystack
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Loss(loss::Args),
    Needle(needle::Args),
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.what {
        What::Loss(args) => loss::run(args),
        What::Needle(args) => needle::run(args),
    }
}
