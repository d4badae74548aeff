//! `fox eval loss`: loss at every position.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use fox_data::Tokenizer;
use fox_eval::Subject;
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
    #[command(flatten)]
    documents: DocumentArgs,
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

/// The documents whose losses are measured.
#[derive(clap::Args)]
pub struct DocumentArgs {
    /// Data for the losses: prepared data, a Zarr array, or text; held-out documents of the embedded corpus
    /// without it
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Tokens of every document, from its start
    #[arg(long, value_name = "N", default_value_t = 2048,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub length: u32,
    /// Documents, at most
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub documents: u64,
}

impl DocumentArgs {
    /// The losses of one model, and what they were measured on. What is measured is kept in `out`, and not
    /// measured again.
    pub fn measure(
        &self,
        subject: &Subject<'_>,
        tokenizer: Result<Tokenizer>,
        out: &Path,
    ) -> Result<(String, LossCurve)> {
        let length = self.length as usize;
        let options = LossOptions { length, documents: self.documents, pruning: Pruning::Config };
        let data = documents(self.data.as_deref(), tokenizer, length, self.documents)?;
        let state = out.join(format!("{}.state.json", file_stem(subject.name)));
        let progress = bar(&format!("{} loss", subject.name), self.documents);
        let sums = evaluate_loss(subject, &*data, &options, Some(&state), |done| {
            progress.set_position(done);
        })?;
        progress.finish_and_clear();
        Ok((data.identity(), LossCurve::new(subject.name, &sums, subject.training_length)))
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let mut report = LossReport { data: String::new(), curves: Vec::new() };
    for argument in &args.models {
        let opened = Opened::new(argument, &device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref());
        let subject = opened.subject(args.training_length);
        let (data, curve) = args.documents.measure(&subject, tokenizer, &args.out)?;
        report.data = data;
        report.curves.push(curve);
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
