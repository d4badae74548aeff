//! `fox eval loss`: loss at every position.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_data::{Split, Tokenizer};
use fox_dist::{Group, Placement};
use fox_eval::files::file_stem;
use fox_eval::loss::{LossCurve, LossOptions, LossReport, MASK_EVERY, evaluate_loss_in};
use fox_eval::stats::Interval;
use fox_tensor::Device;

use super::corpus::documents_of;
use super::print_report;
use super::subjects::{Named, Opened, results_in};
use crate::device::DeviceArgs;
use crate::progress::Bar;
use crate::{output, ranks};

/// Measure the loss at every position over held-out documents
///
/// Perplexity averages over positions and so hides whether a model uses long context; the slope of the
/// per-token loss shows it. Of an encoder it is the pseudo-likelihood: every token is predicted while it is masked. A run folder is evaluated on the held-out split of its training data, with the same weights and
/// in the same chunks as in training; an unfinished run, at its newest checkpoint. OUT gets loss.json
/// (everything, with 95% bootstrap intervals over documents), loss.csv (L(i) of every position), loss.svg and slope.svg.
/// A stopped evaluation resumes when the same command is run again; more documents can be added later. Under
/// `fox launch`, torchrun, mpirun or srun the processes share the documents; the figures are those of one process.
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
    /// Folder for the results; eval-loss in the run folder of a single run, or else here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON, without the per-position losses
    #[arg(long)]
    json: bool,
}

/// The documents whose losses are measured.
#[derive(clap::Args)]
pub struct DocumentArgs {
    /// Data for the losses: prepared data, a Zarr array, text, or a run folder whose data are to be used; without it
    /// the held-out part of the run's own data, or documents of the embedded corpus
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Which part of the data the losses are measured on
    #[arg(long, value_enum, default_value_t = SplitName::Heldout)]
    pub split: SplitName,
    /// Tokens of a chunk of a document
    #[arg(long, value_name = "N", default_value_t = 2048,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub length: u32,
    /// Chunks, at most: the first one of every document, then the second ones where there are fewer documents
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub documents: u64,
    /// Encoders: mask one token of N at a time, in N passes
    #[arg(long, value_name = "N", default_value_t = MASK_EVERY as u32,
          value_parser = clap::value_parser!(u32).range(2..))]
    pub mask_every: u32,
}

/// A part of the data of a run, or of prepared data.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum SplitName {
    /// What was kept for evaluation
    Heldout,
    /// What was trained on: far below the held-out loss, the model remembers it
    Train,
}

impl From<SplitName> for Split {
    fn from(name: SplitName) -> Self {
        match name {
            SplitName::Heldout => Split::HeldOut,
            SplitName::Train => Split::Train,
        }
    }
}

impl DocumentArgs {
    /// Adds the losses of a model to those of others on the same data; the processes of a group share the work. What is
    /// measured is kept in `out`, and not measured again.
    pub fn measure(
        &self,
        group: &Group,
        opened: &Opened,
        tokenizer: Result<Tokenizer>,
        training_length: Option<usize>,
        out: &Path,
        report: &mut LossReport,
    ) -> Result<()> {
        let length = self.length as usize;
        let mask_every = self.mask_every as usize;
        let (documents, pruning) = (self.documents, opened.pruning());
        let options = LossOptions { length, documents, pruning, mask_every };
        let (split, path) = (Split::from(self.split), self.data.as_deref());
        let data = documents_of(split, path, opened, tokenizer, length, self.documents)?;
        report.trained_on = split == Split::Train;
        let masked_every = opened.model.config().is_encoder().then_some(mask_every);
        let (name, subject) = (&opened.name, opened.subject(training_length));
        match report.curves.first() {
            Some(first) if report.masked_every.is_some() != masked_every.is_some() => bail!(
                "{name} and {} are an encoder and a causal model, whose losses cannot be compared; evaluate them apart",
                first.model
            ),
            Some(first) if report.data != data.identity() => bail!(
                "{name} has other held-out data than {}, so their losses cannot be compared; name data for both with \
                 --data, e.g. one of the run folders",
                first.model
            ),
            _ => report.data = data.identity(),
        }
        report.masked_every = masked_every;
        let part = if report.trained_on { ".train" } else { "" };
        let state = out.join(format!("{}{part}.state.json", file_stem(name)));
        let progress = group.is_first().then(|| Bar::new(&format!("{name} loss"), self.documents));
        let sums = evaluate_loss_in(group, &subject, &*data, &options, Some(&state), |done| {
            if let Some(progress) = &progress {
                progress.set(done);
            }
        })?;
        if let Some(progress) = progress {
            progress.finish();
        }
        if sums.documents == 1 && group.is_first() {
            output::note(&format!(
                "only one document has {length} tokens, so the intervals are over its {} chunks, which are not \
                 independent",
                sums.chunks
            ));
        }
        report.curves.push(LossCurve::new(name, &sums, subject.training_length));
        Ok(())
    }
}

impl Args {
    fn results(&self) -> PathBuf {
        results_in(self.out.as_deref(), &self.models, "eval-loss")
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let placement = Placement::from_env()?;
    let DocumentArgs { length, documents, .. } = args.documents;
    let about = format!("{} at {documents} x {length} tokens", args.models.join(" "));
    let group = ranks::join(placement.as_ref(), vec![ranks::invariant("evaluation", about)])?;
    // After the rendezvous: a GPU takes a while to open, and one that is lost meanwhile is noticed.
    let measured = || measure_all(args, &group, &args.device.open_at(placement.as_ref())?);
    let report = group.ending_all(measured())?;
    if !group.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    let written = report.write(&args.results())?;
    let table = table(&report);
    let mut curves = report.curves;
    curves.iter_mut().for_each(|curve| curve.per_position.clear());
    print_report(args.json, serde_json::to_value(curves), &table, &written)
}

fn measure_all(args: &Args, group: &Group, device: &Device) -> Result<LossReport> {
    let mut report = LossReport::default();
    for model in Named::all(&args.models)? {
        let opened = model.open(device)?;
        let mut tokenizer = opened.tokenizer(args.tokenizer.as_deref());
        // The data of a run need no tokenizer; one that was named must exist.
        if args.tokenizer.is_some() {
            tokenizer = Ok(tokenizer?);
        }
        let trained = args.training_length;
        args.documents.measure(group, &opened, tokenizer, trained, &args.results(), &mut report)?;
    }
    Ok(report)
}

/// One row per model: documents, loss, perplexities, and the slope behind the training length.
fn table(report: &LossReport) -> String {
    let curves = &report.curves;
    let range = |i: &Interval, digits: usize| {
        format!("{:.digits$} ({:.digits$}..{:.digits$})", i.value, i.low, i.high)
    };
    let mut head = vec!["model".to_string(), "documents".into(), report.mean_name()];
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
