//! `fox eval loss`: loss at every position.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use fox_eval::files::file_stem;
use fox_eval::loss::{LossCurve, LossOptions, LossReport, evaluate_loss};
use fox_eval::stats::Interval;
use fox_model::Pruning;

use super::subjects::{Opened, bar, documents};
use crate::device::DeviceArgs;
use crate::output;

/// Measure the loss at every position over held-out documents
///
/// Perplexity averages over positions and so hides whether a model uses long context; the slope of the
/// per-token loss shows it. OUT gets loss.json (everything, with 95% bootstrap intervals over documents),
/// loss.csv (L(i) of every position), loss.svg and slope.svg. A stopped evaluation goes on when the same
/// command is run again, and more documents can be asked for later.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folders, each PATH or NAME=PATH
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Prepared data, a Zarr array, or text; held-out documents of the embedded corpus without it
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Tokens of every document, from its start
    #[arg(long, value_name = "N", default_value_t = 2048,
          value_parser = clap::value_parser!(u32).range(1..))]
    length: u32,
    /// Documents, at most
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u64).range(1..))]
    documents: u64,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Training length to mark; what the checkpoint says without it
    #[arg(long, value_name = "N")]
    training_length: Option<usize>,
    /// Folder for the results
    #[arg(long, value_name = "DIR", default_value = "eval-loss")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON, without the per-position losses
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let length = args.length as usize;
    let options = LossOptions { length, documents: args.documents, pruning: Pruning::Config };
    let mut report = LossReport { data: String::new(), curves: Vec::new() };
    for argument in &args.models {
        let opened = Opened::new(argument, &device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref());
        let data = documents(args.data.as_deref(), tokenizer, length, args.documents)?;
        let subject = opened.subject(args.training_length);
        let state = args.out.join(format!("{}.state.json", file_stem(&opened.name)));
        let progress = bar(&opened.name, args.documents);
        let sums = evaluate_loss(&subject, &*data, &options, Some(&state), |done| {
            progress.set_position(done);
        })?;
        progress.finish_and_clear();
        report.data = data.identity();
        report.curves.push(LossCurve::new(&opened.name, &sums, subject.training_length));
    }
    let written = report.write(&args.out)?;
    if args.json {
        let mut curves = report.curves;
        curves.iter_mut().for_each(|curve| curve.per_position.clear());
        output::print(&format!("{:#}\n", serde_json::to_value(curves)?))?;
    } else {
        output::print(&table(&report.curves))?;
        let names: Vec<String> = written.iter().map(|p| p.display().to_string()).collect();
        output::print(&format!("written: {}\n", names.join(", ")))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One row per model: documents, loss, perplexities, and the slope behind the training length.
fn table(curves: &[LossCurve]) -> String {
    let range = |i: &Interval, digits: usize| {
        format!("{:.digits$} ({:.digits$}..{:.digits$})", i.value, i.low, i.high)
    };
    let mut head = vec!["model".to_string(), "documents".into(), "mean loss".into()];
    if let Some(first) = curves.first() {
        head.extend(first.perplexities.iter().map(|p| format!("P({})", p.length)));
    }
    head.push("dL/d ln i behind training length".into());
    let mut rows = vec![head];
    for curve in curves {
        let mut row = vec![curve.model.clone(), curve.documents.to_string(), range(&curve.mean, 4)];
        row.extend(curve.perplexities.iter().map(|p| format!("{:.3}", p.perplexity.value)));
        row.push(curve.slope_beyond_training.as_ref().map_or("-".into(), |s| range(s, 4)));
        rows.push(row);
    }
    output::table(&rows)
}
