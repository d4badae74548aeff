//! `fox watch`: the curves of a run as a page.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use fox_eval::files::write_whole;
use fox_lab::watch;
use fox_train::RunFolder;

use crate::{hints, output, signals};

/// Show the curves of a run as a page while it trains
///
/// Loss, speed, learning rate and the half-lives of the heads, read from the run folder; the run may be under way, in
/// another process, or finished. The page is served on this machine alone and loads itself again every few seconds.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Port of the page; 0 for any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8001)]
    port: u16,
    /// Write the page to this file instead, once
    #[arg(long, value_name = "FILE", conflicts_with = "port")]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if !RunFolder::is_run(&args.run) {
        bail!(hints::no_run(&args.run));
    }
    if let Some(out) = &args.out {
        write_whole(out, watch::page(&args.run)?.html().as_bytes())?;
        output::print(&format!("written: {}\n", out.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    signals::exit_on_signal("stopped; the run itself is not touched")?;
    let listener = TcpListener::bind(("127.0.0.1", args.port)).with_context(|| {
        format!("cannot listen on port {}; choose another one with --port", args.port)
    })?;
    output::print(&format!("{}: http://{}/\n", args.run.display(), listener.local_addr()?))?;
    watch::serve(&listener, &args.run)?;
    Ok(ExitCode::SUCCESS)
}
