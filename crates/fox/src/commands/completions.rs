//! `fox completions` and `fox man`: what a shell and `man` can know of the command line.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap_complete::Shell;

use crate::{help, output};

/// Print a script that completes commands in a shell
///
/// For bash: `fox completions bash > ~/.local/share/bash-completion/completions/fox`; for zsh, into `_fox` in a folder
/// of $fpath; for fish: `fox completions fish > ~/.config/fish/completions/fox.fish`.
#[derive(clap::Args)]
pub struct Args {
    /// The shell
    shell: Shell,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut help::command(), "fox", &mut script);
    output::print(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Write the manual pages
///
/// One page for every command.
///
/// `man -l DIR/fox-train.1` shows one; copied to a folder man1 of $MANPATH, they are found by name.
#[derive(clap::Args)]
pub struct ManArgs {
    /// Folder to write to
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

pub fn man(args: &ManArgs) -> Result<ExitCode> {
    let write = || {
        std::fs::create_dir_all(&args.dir)?;
        clap_mangen::generate_to(help::command(), &args.dir)
    };
    write().with_context(|| format!("cannot write manual pages to {}", args.dir.display()))?;
    Ok(ExitCode::SUCCESS)
}
