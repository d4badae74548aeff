//! `fox demo`: what a forget gate is for, in four minutes on a laptop.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use fox_lab::args::count::count;
use fox_lab::demo::{self, Options};

use super::sweep::STOPPED;
use crate::device::DeviceArgs;
use crate::{hints, output};

/// Compare FoX with RoPE Transformers: four minutes, one report
///
/// FoX and two RoPE Transformers are trained on the embedded corpus. All have the same size and see the same number of tokens, once per seed. Then they are evaluated on documents four
/// times as long as the training sequences: loss by position beside the lowest possible loss, needles after an
/// outdated fact, and the forget gates of FoX. OUT gets report.html (self-contained), demo.json and the run folders;
/// run the same command again to resume.
#[derive(clap::Args)]
pub struct Args {
    /// Folder for the report and the runs
    #[arg(long, value_name = "DIR", default_value = "fox-demo")]
    out: PathBuf,
    /// Tokens to train each model on; more takes longer and learns more
    #[arg(long, value_name = "N", default_value_t = demo::TOKENS, value_parser = count)]
    tokens: u64,
    /// Tokens of a training sequence, a power of two; evaluation is four times as long
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = training_length)]
    length: u64,
    /// The first seed: initial weights and order of the training data
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..1 << 62))]
    seed: u64,
    /// Number of seeds per model
    #[arg(long, value_name = "K", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Documents for the loss by position
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u64).range(1..))]
    documents: u64,
    /// Needles per length and depth
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(1..))]
    needles: u64,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Parses a training length whose fractions are edges of the bins of positions.
fn training_length(text: &str) -> Result<u64, String> {
    let length = text.parse().ok().filter(|n: &u64| n.is_power_of_two());
    length
        .filter(|n| (64..=4096).contains(n))
        .ok_or_else(|| "64, 128, 256, 512, 1024, 2048 or 4096".into())
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let options = Options {
        out: args.out.clone(),
        tokens: args.tokens,
        length: args.length,
        seed: args.seed,
        seeds: args.seeds,
        documents: args.documents,
        needles: args.needles,
    };
    hints::results_folder(&args.out)?;
    let devices = args.device.open_shared(options.runs())?;
    let scheduler = args.device.scheduler(devices.len(), true)?;
    let Some((text, json)) = demo::run(&options, &devices, &scheduler)? else {
        output::print(STOPPED)?;
        return Ok(ExitCode::from(130));
    };
    output::print(if args.json { &json } else { &text })?;
    Ok(ExitCode::SUCCESS)
}
