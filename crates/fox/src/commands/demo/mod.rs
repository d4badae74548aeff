//! `fox demo`: what a forget gate is for, in four minutes on a laptop.

mod contest;
mod figures;
mod heads;
mod models;
mod page;
mod sample;
mod summary;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use fox_data::{SyntheticConfig, SyntheticDataset};
use fox_eval::files::write_whole;
use fox_eval::loss::LossOptions;
use fox_eval::needle::{Cases, Grid, SyntheticCases};
use fox_model::Pruning;

use crate::commands::train::say_stopping;
use crate::device::DeviceArgs;
use crate::{output, signals};
use contest::Run;
use figures::Figures;
use heads::Head;
use models::Contestant;

/// Evaluation goes this many times beyond the training length.
const BEYOND: usize = 4;

/// Train FoX and two RoPE Transformers on the embedded corpus and compare them in one report
///
/// All have the same size and see the same number of tokens, once per seed. Then they read documents four times as long
/// as any they were trained on: the loss at every position beside the lowest loss there is, needles with a void fact
/// before them, and a look at what FoX forgets. OUT gets report.html (self-contained), demo.json and the run folders;
/// run again with the same OUT, it goes on where it was stopped.
#[derive(clap::Args)]
pub struct Args {
    /// Folder for the report and the runs
    #[arg(long, value_name = "DIR", default_value = "fox-demo")]
    out: PathBuf,
    /// Tokens to train each model on; more takes longer and learns more
    #[arg(long, value_name = "N", default_value_t = models::TOKENS,
          value_parser = clap::value_parser!(u64).range(1..))]
    tokens: u64,
    /// Tokens of a training sequence, a power of two; evaluation goes four times as far
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = training_length)]
    length: u64,
    /// The first seed: initial weights and order of the training data
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..1 << 62))]
    seed: u64,
    /// How many seeds each model is trained with
    #[arg(long, value_name = "K", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Documents for the loss at every position
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

/// Training lengths whose parts are edges of the bins that losses are summed over.
fn training_length(text: &str) -> Result<u64, String> {
    let length = text.parse().ok().filter(|n: &u64| n.is_power_of_two());
    length
        .filter(|n| (64..=4096).contains(n))
        .ok_or_else(|| "64, 128, 256, 512, 1024, 2048 or 4096".into())
}

/// What every model is asked.
struct Questions {
    /// Held-out documents, as long as the evaluation.
    corpus: SyntheticConfig,
    data: SyntheticDataset,
    loss: LossOptions,
    cases: SyntheticCases,
    grid: Grid,
    /// Tokens of a training sequence.
    trained_on: usize,
}

impl Questions {
    fn new(args: &Args) -> Self {
        let trained_on = args.length as usize;
        let length = BEYOND * trained_on;
        let corpus = SyntheticConfig { document_len: length as u64, ..models::CORPUS }.held_out();
        Questions {
            corpus,
            data: SyntheticDataset::new(corpus),
            loss: LossOptions {
                length,
                documents: args.documents,
                pruning: Pruning::Tolerance(-10.0),
            },
            cases: SyntheticCases { config: corpus },
            grid: Grid {
                lengths: vec![trained_on / 2, trained_on, 2 * trained_on, length],
                depths: Grid::even_depths(5),
                cases: args.needles,
            },
            trained_on,
        }
    }

    /// Tokens of the longest documents and prompts.
    fn length(&self) -> usize {
        BEYOND * self.trained_on
    }
}

/// Everything the report shows.
struct Findings {
    questions: Questions,
    /// Every contestant with its runs, one per seed.
    models: Vec<(Contestant, Vec<Run>)>,
    figures: Figures,
    /// Loss of a reader who knows the rules: with perfect memory, and with one as long as the training sequences.
    attainable: [Vec<f64>; 2],
    head: Head,
    sample: String,
    chance: f64,
    /// Training and evaluation of all runs, also of those that were stopped and resumed, as if one after the other.
    machine_seconds: f64,
    /// From the start of this command to the report.
    seconds: f64,
    device: String,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let start = std::time::Instant::now();
    let contestants = Contestant::all();
    let seeds: Vec<u64> = (args.seed..args.seed + args.seeds).collect();
    let devices = args.device.open_shared(contestants.len() * seeds.len())?;
    let stop = signals::on_stop(say_stopping)?;
    let questions = Questions::new(args);
    let models = contest::hold(args, contestants, &seeds, &questions, &devices, &stop)?;
    output::note("looking inside FoX");
    let fox = &models[0].1[0];
    let head = heads::best(fox, &questions)?;
    let prompt = &head.seen.tokens[..questions.trained_on / 4];
    let attainable = [u64::MAX, questions.trained_on as u64]
        .map(|reach| questions.corpus.attainable_loss(args.documents, questions.length(), reach));
    let findings = Findings {
        sample: sample::generate(&fox.folder, prompt, &devices[0])?,
        figures: Figures::new(&models, &questions, &attainable[0]),
        chance: questions.cases.chance(),
        machine_seconds: models
            .iter()
            .flat_map(|m| &m.1)
            .map(|r| r.seconds + r.evaluation_seconds)
            .sum(),
        seconds: start.elapsed().as_secs_f64(),
        device: match devices.len() {
            1 => devices[0].to_string(),
            n => format!("{} ({n} models side by side)", devices[0]),
        },
        questions,
        models,
        attainable,
        head,
    };
    let numbers = format!("{:#}\n", summary::json(&findings, args));
    write_whole(&args.out.join("report.html"), page::page(&findings, args).html().as_bytes())?;
    write_whole(&args.out.join("demo.json"), numbers.as_bytes())?;
    output::print(&if args.json { numbers } else { summary::text(&findings, args) })?;
    Ok(ExitCode::SUCCESS)
}
