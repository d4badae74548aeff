//! FoX beside two RoPE Transformers on the embedded corpus: what a forget gate is for, in four minutes on a laptop.
//!
//! ```text
//! OUT/MODEL-seed-N/    a run folder each
//! OUT/report.html, OUT/demo.json
//! ```

mod figures;
mod heads;
mod models;
mod page;
mod runs;
mod sample;
mod summary;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use fox_data::{SyntheticConfig, SyntheticDataset};
use fox_eval::files::write_whole;
use fox_eval::loss::{LossOptions, MASK_EVERY};
use fox_eval::needle::{Cases, Grid, SyntheticCases};
use fox_model::Pruning;
use fox_tensor::Device;

use crate::{Scheduler, output};
use figures::Figures;
use heads::InspectedHead;
use models::DemoModel;
pub use models::TOKENS;
use runs::ModelRuns;

/// Evaluation length as a multiple of the training length.
const BEYOND: usize = 4;

/// Options of the demo.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder for the report and the runs.
    pub out: PathBuf,
    /// Training tokens of each run.
    pub tokens: u64,
    /// Tokens of a training sequence, a power of two.
    pub length: u64,
    /// The first seed.
    pub seed: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// Documents for the loss by position.
    pub documents: u64,
    /// Needles per length and depth.
    pub needles: u64,
}

impl Options {
    /// Number of training runs.
    pub fn runs(&self) -> usize {
        DemoModel::all().len() * self.seeds as usize
    }
}

/// The evaluation of every model.
struct Evaluation {
    /// Held-out documents of the evaluation length.
    corpus: SyntheticConfig,
    data: SyntheticDataset,
    loss: LossOptions,
    cases: SyntheticCases,
    grid: Grid,
    /// Tokens of a training sequence.
    trained_on: usize,
}

impl Evaluation {
    fn new(options: &Options) -> Self {
        let trained_on = options.length as usize;
        let length = BEYOND * trained_on;
        let corpus = SyntheticConfig { document_len: length as u64, ..models::CORPUS }.held_out();
        Evaluation {
            corpus,
            data: SyntheticDataset::new(corpus),
            loss: LossOptions {
                length,
                documents: options.documents,
                pruning: Pruning::Tolerance(-10.0),
                mask_every: MASK_EVERY,
            },
            cases: SyntheticCases { config: corpus },
            grid: Grid {
                lengths: vec![trained_on / 2, trained_on, 2 * trained_on, length],
                depths: Grid::even_depths(5),
                cases: options.needles,
            },
            trained_on,
        }
    }

    /// Tokens of the longest documents and prompts.
    fn length(&self) -> usize {
        BEYOND * self.trained_on
    }
}

/// All results that the report shows.
struct Results {
    evaluation: Evaluation,
    models: Vec<ModelRuns>,
    figures: Figures,
    /// Loss of a predictor that knows the rules of the corpus: with unlimited memory, and with that of the training
    /// length.
    attainable: [Vec<f64>; 2],
    head: InspectedHead,
    sample: String,
    chance: f64,
    /// Training and evaluation time, summed over all runs.
    machine_seconds: f64,
    /// Duration of this command.
    seconds: f64,
    device: String,
}

/// Trains what is missing, evaluates all models and writes the report; `None` when it was stopped. Returns the text for
/// the terminal and the JSON.
pub fn run(
    options: &Options,
    devices: &[Device],
    scheduler: &Scheduler,
) -> Result<Option<(String, String)>> {
    let start = Instant::now();
    let evaluation = Evaluation::new(options);
    let Some(models) = runs::run_all(options, &evaluation, devices, scheduler)? else {
        return Ok(None);
    };
    output::note("inspecting the heads of FoX");
    let fox = &models[0].1[0];
    let head = heads::most_selective(fox, &evaluation)?;
    let prompt = &head.inspection.tokens[..evaluation.trained_on / 4];
    let attainable = [u64::MAX, evaluation.trained_on as u64].map(|reach| {
        evaluation.corpus.attainable_loss(options.documents, evaluation.length(), reach)
    });
    let times = models.iter().flat_map(|m| &m.1).map(|run| run.seconds + run.evaluation_seconds);
    let results = Results {
        sample: sample::generate(&fox.folder, prompt, &devices[0])?,
        figures: Figures::new(&models, &evaluation, &attainable[0]),
        chance: evaluation.cases.chance(),
        machine_seconds: times.sum(),
        seconds: start.elapsed().as_secs_f64(),
        device: match devices.len() {
            1 => devices[0].to_string(),
            n => format!("{} ({n} models at a time)", devices[0]),
        },
        evaluation,
        models,
        attainable,
        head,
    };
    let report = page::report(&results, options);
    let json = report.json();
    write_whole(&options.out.join("report.html"), report.html().as_bytes())?;
    write_whole(&options.out.join("demo.json"), json.as_bytes())?;
    Ok(Some((summary::terminal(&results, options), json)))
}
