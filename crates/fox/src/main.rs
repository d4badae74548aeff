//! The `fox` command: the Forgetting Transformer from the terminal.
// They panic when the reader is gone; see `fox_lab::output`.
#![warn(clippy::print_stdout, clippy::print_stderr)]
// Comments on arguments are the help of the command line, where brackets and addresses mean themselves.
#![allow(rustdoc::bare_urls, rustdoc::broken_intra_doc_links)]

mod commands;
mod flags;
mod help;
mod ranks;
#[cfg(test)]
mod reference;
mod version;

use std::process::ExitCode;

use clap::{FromArgMatches, Parser};
// Commands name these as modules of this crate.
use fox_lab::args::{device, engine, hints, pretrained, sampling, subjects, tolerance};
use fox_lab::{output, progress, signals};

/// The Forgetting Transformer (FoX): prepare data, train, evaluate, inspect, generate, serve, verify and
/// convert models.
#[derive(Parser)]
#[command(name = "fox", version = version::VERSION, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    signals::stop_with_stdin();
    fox_lab::provenance::set_version(version::VERSION);
    // Clap itself answers wrong usage, with exit code 2.
    let matches = help::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match cli.command.run() {
        Ok(code) => code,
        Err(error) => {
            output::fatal(&flags::error_message(&error), false);
            ranks::end_after_failure();
            ExitCode::FAILURE
        }
    }
}
