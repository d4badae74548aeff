//! `fox eval ruler`: RULER's task families and PhoneBook.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_eval::files::file_stem;
use fox_eval::needle::ModelReader;
use fox_eval::ruler::{Generator, RulerReport, RulerTask, Samples, read_file, run_ruler};

use super::needle::haystack;
use super::print_report;
use super::subjects::{Named, results_in};
use crate::device::DeviceArgs;
use crate::output;
use crate::progress::Bar;

/// Ask for facts, variables and word counts in long contexts: RULER's tasks and PhoneBook
///
/// Samples of RULER's thirteen task families and of PhoneBook are generated, in other words than RULER's, around the text of
/// --haystack or of the run's held-out split. Greedy answers are scored by RULER's string match; for small models, the right
/// answers are also compared with wrong ones by log-probability. --file scores samples that RULER wrote (JSON lines with
/// index, input, outputs, length). OUT gets ruler.json, ruler.csv, pictures, and a line per sample, from which a stopped
/// evaluation resumes.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folders, each PATH or NAME=PATH
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Lengths of prompt and answer in tokens
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "1024,2048,4096",
        value_parser = length,
        conflicts_with = "file"
    )]
    lengths: Vec<usize>,
    /// Tasks, e.g. niah_single_1,vt,cwe,fwe,qa_1,phonebook; all without it
    #[arg(long, value_name = "TASK,...", value_delimiter = ',', value_parser = task,
          conflicts_with = "file")]
    tasks: Vec<RulerTask>,
    /// Samples per task and length (25 without it), or of each file at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Right and wrong answers that are compared by log-probability; 0: none
    #[arg(long, value_name = "N", default_value_t = 16, conflicts_with = "file",
          value_parser = clap::value_parser!(u8).range(0..=32))]
    candidates: u8,
    /// Seed of the samples
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "file")]
    seed: u64,
    /// Text around the facts: a file or folder; the run's held-out split without it
    #[arg(long, value_name = "PATH", conflicts_with = "file")]
    haystack: Option<PathBuf>,
    /// Samples that RULER wrote, e.g. niah_single_1/validation.jsonl
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Tokens to generate for samples of a file; RULER's number for the task without it
    #[arg(long, value_name = "N", requires = "file")]
    max_tokens: Option<usize>,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Folder for the results; eval-ruler in the run folder of a single run, or else here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Samples per task and length without `--samples`.
const SAMPLES: u64 = 25;

impl Args {
    fn results(&self) -> PathBuf {
        results_in(self.out.as_deref(), &self.models, "eval-ruler")
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let limit = args.samples.map(|samples| samples as usize);
    let files =
        args.file.iter().map(|file| read_file(file, limit)).collect::<Result<Vec<_>, _>>()?;
    let device = args.device.open()?;
    let mut report: Option<RulerReport> = None;
    for model in Named::all(&args.models)? {
        let opened = model.open(&device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
        let subject = opened.subject(None);
        subject.check_vocabulary("tokenizer", tokenizer.vocab_size())?;
        let samples = if files.is_empty() {
            let count = args.samples.unwrap_or(SAMPLES);
            let longest = args.lengths.iter().copied().max().unwrap_or(0);
            let text = haystack(args.haystack.as_deref(), &opened, &tokenizer, longest, count)?;
            let candidates = usize::from(args.candidates);
            Samples::Generated {
                generator: Generator::new(&text, &tokenizer, candidates, args.seed)?,
                tasks: match args.tasks.is_empty() {
                    true => RulerTask::ALL.to_vec(),
                    false => args.tasks.clone(),
                },
                lengths: args.lengths.clone(),
                count,
            }
        } else {
            Samples::Files { files: files.clone(), max_tokens: args.max_tokens }
        };
        let mut reader = ModelReader::new(subject, opened.pruning());
        let path = args.results().join(format!("{}.ruler.jsonl", file_stem(&opened.name)));
        let file = Some((path.as_path(), subject.fingerprint()?));
        let progress = Bar::new(&opened.name, samples.total());
        let cells = run_ruler(&opened.name, &mut reader, &samples, &tokenizer, file, |done| {
            progress.set(done);
        })?;
        progress.finish();
        let asked = samples.identity(&tokenizer);
        let report = report
            .get_or_insert_with(|| RulerReport { samples: asked.clone(), models: Vec::new() });
        if report.samples != asked {
            bail!(
                "{} has other samples than {}, so their scores cannot be compared; evaluate them one by one, or give both \
                 the same text with --haystack",
                cells.model,
                report.models[0].model
            );
        }
        report.models.push(cells);
    }
    let Some(report) = report else { bail!("no model was given") };
    let written = report.write(&args.results())?;
    let chance: Vec<f64> =
        report.models.iter().flat_map(|m| &m.cells).filter_map(|cell| cell.chance).collect();
    let legend = match chance.is_empty() {
        true => "RULER's string match in %".to_string(),
        false => format!(
            "RULER's string match in % / right answers among the most likely candidates in % (by chance {:.1} on \
             average)",
            100.0 * chance.iter().sum::<f64>() / chance.len() as f64
        ),
    };
    let text = format!("{}{legend}\n", output::table(&report.table()));
    print_report(args.json, serde_json::to_value(&report), &text, &written)
}

fn length(text: &str) -> Result<usize, String> {
    fox_lab::args::count::count(text).map(|tokens| tokens as usize)
}

fn task(name: &str) -> Result<RulerTask> {
    match RulerTask::find(name) {
        Some(task) => Ok(task),
        None => {
            let names: Vec<&str> = RulerTask::ALL.iter().map(|task| task.name()).collect();
            bail!("the tasks are {}", names.join(", "))
        }
    }
}
