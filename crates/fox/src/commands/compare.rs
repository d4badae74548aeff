//! `fox compare`: several models in one report.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_data::Tokenizer;
use fox_dist::Group;
use fox_eval::compare::{Comparison, ModelFacts, ModelHeads};
use fox_eval::files::{file_stem, kept, write_whole};
use fox_eval::inspect::{InspectOptions, inspect};
use fox_eval::learning::Learning;
use fox_eval::needle::{Grid, ModelReader, run_needle};
use fox_lab::provenance;
use fox_train::metrics::{MetricsLog, Record};

use super::eval::STOPPED;
use super::eval::corpus::{documents, first_tokens, has_own, text};
use super::eval::loss::DocumentArgs;
use super::eval::needle::{Hay, add};
use super::eval::subjects::{Named, Opened};
use super::eval::tasks::TaskArgs;
use crate::device::DeviceArgs;
use crate::progress::Bar;
use crate::{output, signals};

/// Maximum number of tokens for the inspection of heads.
const INSPECTED: usize = 2048;

/// Compare checkpoints or run folders in one report
///
/// Loss by position and its slope, perplexities, needles, tasks, learning curves of run folders, and half-lives of the
/// heads. Runs are evaluated on the held-out documents of their data, which must be the same, or on --data and
/// --haystack; an unfinished run at its newest checkpoint. OUT gets report.html (self-contained), compare.json and
/// partial results: run the command again, also with more models, to compute only what is missing.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folders, each PATH or NAME=PATH
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    #[command(flatten)]
    documents: DocumentArgs,
    /// Lengths of the prompts with needles
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "256,512,1024,2048")]
    lengths: Vec<usize>,
    /// Needles per length and depth
    #[arg(long, value_name = "N", default_value_t = 8)]
    cases: u64,
    #[command(flatten)]
    hay: Hay,
    #[command(flatten)]
    tasks: TaskArgs,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Folder for the report and the results
    #[arg(long, value_name = "DIR", default_value = "compare")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    signals::exit_on_signal(STOPPED)?;
    let device = args.device.open()?;
    let tasks = if args.tasks.any() { args.tasks.load()? } else { Vec::new() };
    let mut found = Comparison::default();
    let mut first: Option<String> = None;
    for model in Named::all(&args.models)? {
        // Only one model is in memory at a time.
        let opened = model.open(&device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
        let identity = tokenizer.identity().to_string();
        if *first.get_or_insert(identity.clone()) != identity {
            bail!(
                "{} has another tokenizer than {}, so their losses cannot be compared; compare models of one \
                 tokenizer",
                opened.name,
                found.models[0].name
            );
        }
        found.models.push(facts(&opened));
        found.learning.extend(learning(&opened));
        add_loss(args, &opened, &tokenizer, &mut found)?;
        add_needles(args, &opened, &tokenizer, &mut found)?;
        add_heads(args, &opened, &tokenizer, &mut found)?;
        let asked = args.tasks.ask(&tasks, &opened, args.tokenizer.as_deref(), &args.out)?;
        found.tasks.results.extend(asked);
    }
    if tasks.is_empty() {
        let reason = "Tasks need --task-data and --tasks.";
        found.left_out.push(reason.into());
    }
    let mut page = found.report();
    let numbers = "the numbers are in compare.json beside this page.";
    page.footer(&provenance::footer(&device.to_string(), &provenance::command(), numbers));
    let (html, json) = (args.out.join("report.html"), args.out.join("compare.json"));
    write_whole(&html, page.html().as_bytes())?;
    write_whole(&json, serde_json::to_string(&found.json())?.as_bytes())?;
    if args.json {
        output::print(&format!("{:#}\n", found.json()))?;
    } else {
        output::print(&output::table(&found.overview()))?;
        output::print(&format!("written: {}, {}\n", html.display(), json.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn facts(opened: &Opened) -> ModelFacts {
    ModelFacts {
        name: opened.name.clone(),
        folder: opened.folder.display().to_string(),
        architecture: opened.model.config().mixer.name().into(),
        parameters: opened.model.params().count(),
        training_length: opened.subject(None).training_length,
    }
}

/// The learning curve, if the model belongs to a run.
fn learning(opened: &Opened) -> Option<Learning> {
    let logged = MetricsLog::read(&opened.run.as_ref()?.folder).ok()?;
    logged.notice.iter().for_each(|notice| output::note(notice));
    let losses: Vec<(f64, f64)> = logged
        .records
        .iter()
        .filter_map(|record| match record {
            Record::Train(step) => step.loss.map(|loss| (step.tokens as f64, loss)),
            Record::Eval(_) => None,
        })
        .collect();
    (!losses.is_empty()).then(|| Learning { model: opened.name.clone(), losses })
}

/// Whether a measurement has a text: a run has its data, and the embedded corpus serves models with its tokenizer.
fn has_text(
    given: &Option<PathBuf>,
    opened: &Opened,
    tokenizer: &Tokenizer,
    reason: &str,
    found: &mut Comparison,
) -> bool {
    let has = given.is_some() || has_own(opened, tokenizer);
    if !has && !found.left_out.iter().any(|r| r == reason) {
        found.left_out.push(reason.into());
    }
    has
}

fn add_loss(
    args: &Args,
    opened: &Opened,
    tokenizer: &Tokenizer,
    found: &mut Comparison,
) -> Result<()> {
    let reason = "The loss by position needs text or prepared data: --data.";
    if !has_text(&args.documents.data, opened, tokenizer, reason, found) {
        return Ok(());
    }
    let report = found.loss.get_or_insert_default();
    args.documents.measure(&Group::alone(), opened, Ok(tokenizer.clone()), None, &args.out, report)
}

fn add_needles(
    args: &Args,
    opened: &Opened,
    tokenizer: &Tokenizer,
    found: &mut Comparison,
) -> Result<()> {
    if opened.model.config().is_encoder() {
        found
            .left_out
            .push(format!("{} is an encoder, which cannot look for needles.", opened.name));
        return Ok(());
    }
    let reason = "Needles are hidden in a text that --haystack names.";
    if !has_text(&args.hay.haystack, opened, tokenizer, reason, found) {
        return Ok(());
    }
    let grid = Grid {
        lengths: args.lengths.clone(),
        depths: Grid::even_depths(args.hay.depths),
        cases: args.cases,
    };
    let cases = args.hay.cases(opened, tokenizer, &grid)?;
    let subject = opened.subject(None);
    subject.check_vocabulary("tokenizer", cases.vocab_size())?;
    let mut reader = ModelReader::new(subject, opened.pruning());
    let decode = |ids: &[u32]| Ok(tokenizer.decode(ids)?);
    let path = args.out.join(format!("{}.scores.jsonl", file_stem(&opened.name)));
    let file = Some((path.as_path(), subject.fingerprint()?));
    let progress = Bar::new(&format!("{} needles", opened.name), grid.total());
    let map = run_needle(&opened.name, &mut reader, &*cases, &grid, &decode, file, |done| {
        progress.set(done);
    })?;
    progress.finish();
    add(&mut found.needle, &*cases, &grid, map)
}

fn add_heads(
    args: &Args,
    opened: &Opened,
    tokenizer: &Tokenizer,
    found: &mut Comparison,
) -> Result<()> {
    let reason = "The heads are inspected on a text that --haystack names.";
    if !has_text(&args.hay.haystack, opened, tokenizer, reason, found)
        || !opened.model.config().has_attention()
    {
        return Ok(());
    }
    let length = INSPECTED.min(args.documents.length as usize);
    // Encoders have no start marker.
    let mut ids = match opened.model.config().is_encoder() {
        true => Vec::new(),
        false => vec![tokenizer.bos()],
    };
    match &args.hay.haystack {
        Some(path) => ids.extend(tokenizer.encode(&text(path)?)?),
        None => {
            let data = args.documents.data.as_deref();
            let data = documents(data, opened, Ok(tokenizer.clone()), length, 1)?;
            ids.extend(first_tokens(&*data, length)?);
        }
    }
    ids.truncate(length);
    let subject = opened.subject(None);
    let evaluation = format!("heads of model {:016x} on {ids:?}", subject.fingerprint()?);
    let path = args.out.join(format!("{}.heads.json", file_stem(&opened.name)));
    let heads =
        kept(
            &path,
            &evaluation,
            || Ok(inspect(&subject, &ids, &InspectOptions::default())?.heads),
        )?;
    found.heads.push(ModelHeads { model: opened.name.clone(), tokens: ids.len(), heads });
    Ok(())
}
