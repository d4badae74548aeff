//! `fox demo`: the whole idea in a few minutes on a laptop.

mod report;
mod sample;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use fox_data::{Dataset, SyntheticConfig, SyntheticDataset, SyntheticTokenizer};
use fox_eval::files::write_whole;
use fox_eval::inspect::{InspectOptions, Inspection, inspect};
use fox_eval::loss::{LossCurve, LossOptions, evaluate_loss};
use fox_eval::needle::{Cases, Grid, ModelReader, NeedleMap, SyntheticCases, run_needle};
use fox_model::Pruning;
use fox_tensor::Device;

use crate::commands::train::say_stopping;
use crate::device::DeviceArgs;
use crate::{output, signals};
use train::{Contestant, Trained};

/// Evaluation goes this many times beyond the training length.
const BEYOND: usize = 4;

/// Train FoX and a RoPE Transformer on the embedded corpus and compare them in one report
///
/// Both have the same size and see the same tokens. Then both read documents four times as long as any they
/// were trained on: the loss at every position, a needle test, a sample, and a look at what FoX forgets.
/// OUT gets report.html (self-contained), demo.json and the two run folders; run again with the same OUT,
/// it goes on where it was stopped.
#[derive(clap::Args)]
pub struct Args {
    /// Folder for the report and the runs
    #[arg(long, value_name = "DIR", default_value = "fox-demo")]
    out: PathBuf,
    /// Tokens to train each model on; more takes longer and learns more
    #[arg(long, value_name = "N", default_value_t = train::TOKENS,
          value_parser = clap::value_parser!(u64).range(1..))]
    tokens: u64,
    /// Documents for the loss at every position
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u64).range(1..))]
    documents: u64,
    /// Needles per length and depth
    #[arg(long, value_name = "N", default_value_t = 12,
          value_parser = clap::value_parser!(u64).range(1..))]
    needles: u64,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Everything the report shows.
struct Findings {
    fox: Trained,
    transformer: Trained,
    /// Loss of FoX and of the Transformer.
    curves: Vec<LossCurve>,
    /// Attainable loss with a perfect memory, and with one as long as the training sequences.
    attainable: [Vec<f64>; 2],
    grid: Grid,
    chance: f64,
    needles: Vec<NeedleMap>,
    inspection: Inspection,
    transformer_inspection: Inspection,
    sample: String,
    seconds: f64,
    evaluation_seconds: f64,
    device: String,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let stop = signals::on_stop(say_stopping)?;
    let train = |contestant: Contestant| -> Result<Trained> {
        let trained = contestant.train(&args.out, args.tokens, &device, &stop)?;
        if !trained.finished {
            bail!("stopped; the same command goes on from here");
        }
        Ok(trained)
    };
    let fox = train(Contestant::Fox)?;
    let transformer = train(Contestant::Transformer)?;
    let findings = evaluate(args, &device, fox, transformer)?;
    write_whole(&args.out.join("report.html"), report::page(&findings, args).html().as_bytes())?;
    let numbers = serde_json::to_string_pretty(&report::json(&findings))?;
    write_whole(&args.out.join("demo.json"), numbers.as_bytes())?;
    output::print(&report::text(&findings, args))?;
    Ok(ExitCode::SUCCESS)
}

fn evaluate(args: &Args, device: &Device, fox: Trained, transformer: Trained) -> Result<Findings> {
    let evaluation = Instant::now();
    let trained_on = fox.training_length;
    let length = BEYOND * trained_on;
    let heldout = SyntheticConfig { document_len: length as u64, ..fox.corpus }.held_out();
    let data = SyntheticDataset::new(heldout);
    let options =
        LossOptions { length, documents: args.documents, pruning: Pruning::Tolerance(-10.0) };
    let grid = Grid {
        lengths: vec![trained_on / 2, trained_on, 2 * trained_on, length],
        depths: Grid::even_depths(5),
        cases: args.needles,
    };
    let cases = SyntheticCases { config: heldout };
    let decode = |ids: &[u32]| Ok(SyntheticTokenizer.decode(ids)?);
    let (mut curves, mut needles) = (Vec::new(), Vec::new());
    for trained in [&fox, &transformer] {
        output::note(&format!(
            "{}: loss at every position of {} documents",
            trained.name, args.documents
        ));
        let subject = trained.subject();
        let sums = evaluate_loss(&subject, &data, &options, None, |_| ())?;
        curves.push(LossCurve::new(&trained.name, &sums, Some(trained_on)));
        output::note(&format!("{}: {} needles", trained.name, grid.total()));
        let mut reader = ModelReader::new(subject, Pruning::Tolerance(-10.0));
        needles.push(run_needle(&trained.name, &mut reader, &cases, &grid, &decode, None, |_| ())?);
    }
    output::note("looking inside");
    let mut ids = vec![0; length];
    data.read(0, 0, &mut ids)?;
    ids.insert(0, SyntheticTokenizer::BOS);
    ids.truncate(length);
    let options = InspectOptions { pixels: 256, ..InspectOptions::default() };
    let inspection = inspect(&fox.subject(), &ids, &options)?;
    let last_layer = transformer.model.config().num_layers - 1;
    let options = InspectOptions { heads: vec![(last_layer, 0)], ..options };
    let transformer_inspection = inspect(&transformer.subject(), &ids, &options)?;
    let attainable = [u64::MAX, trained_on as u64]
        .map(|reach| heldout.attainable_loss(args.documents, length, reach));
    Ok(Findings {
        sample: sample::generate(&fox.folder, &ids[..trained_on / 4], device)?,
        chance: cases.chance(),
        // Training that was stopped and resumed counts in full.
        seconds: fox.seconds + transformer.seconds + evaluation.elapsed().as_secs_f64(),
        evaluation_seconds: evaluation.elapsed().as_secs_f64(),
        device: device.to_string(),
        fox,
        transformer,
        curves,
        attainable,
        grid,
        needles,
        inspection,
        transformer_inspection,
    })
}
