//! One file per command: its arguments, and what it does with them.

mod chat;
mod compare;
mod completions;
mod convert;
mod demo;
mod embed;
pub mod eval;
mod generate;
mod info;
mod inspect;
mod launch;
pub mod prepare;
mod reproduce;
mod retrofit;
mod serve;
mod sweep;
mod train;
mod verify;
mod watch;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;
use fox_bench::{bench, selftest};

/// The commands; their help stands with their arguments.
#[derive(Subcommand)]
pub enum Command {
    Demo(demo::Args),
    Prepare(prepare::Args),
    Train(train::Args),
    Watch(watch::Args),
    Launch(launch::Args),
    Sweep(sweep::Args),
    Reproduce(reproduce::Args),
    Eval(eval::Args),
    Inspect(inspect::Args),
    Embed(embed::Args),
    Generate(generate::Args),
    Chat(chat::Args),
    Serve(serve::Args),
    Compare(compare::Args),
    Bench(bench::Args),
    Verify(verify::Args),
    Selftest(selftest::Args),
    Info(info::Args),
    Convert(convert::Args),
    Retrofit(retrofit::Args),
    Completions(completions::Args),
    Man(completions::ManArgs),
}

impl Command {
    /// Runs the command; the exit code says whether what was asked holds.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Command::Demo(args) => demo::run(&args),
            Command::Prepare(args) => prepare::run(&args),
            Command::Train(args) => train::run(&args),
            Command::Watch(args) => watch::run(&args),
            Command::Launch(args) => launch::run(&args),
            Command::Sweep(args) => sweep::run(&args),
            Command::Reproduce(args) => reproduce::run(&args),
            Command::Eval(args) => eval::run(&args),
            Command::Inspect(args) => inspect::run(&args),
            Command::Embed(args) => embed::run(&args),
            Command::Generate(args) => generate::run(&args),
            Command::Chat(args) => chat::run(&args),
            Command::Serve(args) => serve::run(args),
            Command::Compare(args) => compare::run(&args),
            Command::Bench(args) => bench::run(&args),
            Command::Verify(args) => verify::run(&args),
            Command::Selftest(args) => selftest::run(&args),
            Command::Info(args) => info::run(&args),
            Command::Convert(args) => convert::run(&args),
            Command::Retrofit(args) => retrofit::run(&args),
            Command::Completions(args) => completions::run(&args),
            Command::Man(args) => completions::man(&args),
        }
    }
}
