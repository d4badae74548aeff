//! One file per command: its arguments, and what it does with them.

mod bench;
mod convert;
mod info;
mod sweep;
mod train;
mod verify;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

/// The commands; their help stands with their arguments.
#[derive(Subcommand)]
pub enum Command {
    Train(train::Args),
    Sweep(sweep::Args),
    Bench(bench::Args),
    Verify(verify::Args),
    Info(info::Args),
    Convert(convert::Args),
}

impl Command {
    /// Runs the command; the exit code says whether what was asked holds.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Command::Train(args) => train::run(&args),
            Command::Sweep(args) => sweep::run(&args),
            Command::Bench(args) => bench::run(&args),
            Command::Verify(args) => verify::run(&args),
            Command::Info(args) => info::run(&args),
            Command::Convert(args) => convert::run(&args),
        }
    }
}
