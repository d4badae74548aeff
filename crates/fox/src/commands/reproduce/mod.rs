//! `fox reproduce`: the paper's experiments on one machine, in one report.
//!
//! ```text
//! OUT/plan.json           what was asked for
//! OUT/held-out.jsonl      held-out text in pieces, and OUT/held-out/ the same as prepared data
//! OUT/warm-up.json        the measured speed
//! OUT/runs/RUN/           a run folder each
//! OUT/starts/RUN/         weights of a run with forget gates added, for runs that begin with them
//! OUT/evaluation/RUN/     what was measured of it
//! OUT/sessions.jsonl      how long the command was at work
//! OUT/report.{md,html,json}, OUT/pictures/*.svg
//! ```

mod estimate;
mod found;
mod held_out;
mod report;
mod schedule;
mod settings;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use fox_base::durable;
use fox_train::data::RunData;

use crate::device::DeviceArgs;
use crate::pool::Pool;
use crate::{output, signals};
use schedule::Schedule;
use settings::Settings;

/// Repeat the paper's experiments on one machine: all models, ablations, gates, searches, in one report
///
/// The main comparison of all models with seeds, Table 3, kinds of forget gate, training length, model size, short
/// contexts, searches for learning rate and head width, needles, pictures of what heads forget, and pruning. CORPUS is
/// what the report calls the data. Learning rates are searched first, on a part of the tokens. Before the first run an
/// estimate of the time is printed.
///
/// The same command goes on where it was stopped, and a stop still writes a report of what is there: OUT/report.html
/// (self-contained), report.md with pictures/, and report.json. The experiments are TOML files (recipes/reproduce).
#[derive(clap::Args)]
pub struct Args {
    /// What the data are called in the report
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
    /// Experiments: main, table3, gates, lengths, sizes, short, heads, pruning, rates; all of these by default. And
    /// longer: a trained Transformer is taken to longer sequences, with and without forget gates
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Tokens of a run of the main comparison; the others change in proportion
    #[arg(long, value_name = "N", value_parser = count)]
    tokens: Option<u64>,
    /// Seeds of the four main models
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: Option<u64>,
    /// Models that are trained at the same time; they share the GPU, or the threads of the CPU
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    #[command(flatten)]
    device: DeviceArgs,
    /// List the runs and stop
    #[arg(long)]
    dry_run: bool,
    /// Write the report in DIR anew from what is there, without training
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
        let settings = Settings::read(out)?;
        let plan = settings.plan(out)?;
        let found = found::Found::read(&plan, out)?;
        report::write(&settings, &found, out)?;
        output::print(&format!("written: {}\n", out.join("report.html").display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(out) = &args.out else { bail!("name a folder with --out") };
    let settings = Settings {
        corpus: args.corpus.clone(),
        data: args.data.clone(),
        scale: args.scale.clone(),
        only: args.only.clone(),
        tokens: args.tokens,
        seeds: args.seeds,
        command: std::iter::once("fox".to_string())
            .chain(std::env::args().skip(1))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let plan = settings.plan(out)?;
    if args.dry_run {
        output::print(&estimate::runs(&plan))?;
        return Ok(ExitCode::SUCCESS);
    }
    let joined = settings.joined(out)?;
    // Data that are too short are said before anything is written.
    let base = plan.searches.first().or(plan.runs.first());
    let Some(base) = base else { bail!("nothing is to be trained; name other experiments") };
    let recipe = base.recipe(1e-3, args.data.as_deref())?;
    let data = RunData::open(&fox_train::Recipe {
        data: fox_train::recipe::DataRecipe { heldout: None, ..recipe.data.clone() },
        ..recipe.clone()
    })?;
    data.loader(&recipe)?;
    let pieces = held_out::Pieces::find(&data, args.data.as_deref(), &plan.scale)?;
    durable::create_folder(out)?;
    joined.write(out)?;
    if let Some(pieces) = pieces {
        pieces.write(out)?;
    }

    let stop = signals::on_stop(|| {
        output::note("\nstopping all runs with a checkpoint; once more to stop at once");
    })?;
    let pool = Pool { jobs: args.jobs.into(), quiet: args.quiet, stop };
    let begin = Instant::now();
    let Some(speed) = estimate::warm_up(&plan, out, &pool, &args.device.arguments(1))? else {
        output::print("stopped; run the same command again to go on\n")?;
        return Ok(ExitCode::from(130));
    };
    let vocab = data.train.vocab_size();
    output::note(&estimate::table(&plan, &speed, vocab, args.jobs.into())?);
    let device = args.device.arguments(args.jobs.into());
    let mut schedule = Schedule::new(&plan, out, device, vocab, args.quiet)?;
    let complete = pool.run(&mut schedule);
    schedule.note_session(begin.elapsed().as_secs_f64(), args.jobs.into(), &speed)?;
    let complete = complete?;
    let plan = joined.plan(out)?;
    let found = found::Found::read(&plan, out)?;
    report::write(&joined, &found, out)?;
    output::print(&report::summary(&found))?;
    for (label, why) in &schedule.failed {
        output::print(&format!("{label} failed: {why}\n"))?;
    }
    output::print(&format!("written: {}\n", out.join("report.html").display()))?;
    if !complete {
        output::print("stopped; run the same command again to go on\n")?;
        return Ok(ExitCode::from(130));
    }
    Ok(if schedule.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
