//! `fox eval tasks`: questions with right answers.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::ValueEnum;
use fox_data::Record;
use fox_eval::tasks::{
    LONGBENCH, LongBench, TaskOptions, TaskReport, TaskResult, TaskSpec, Truncation, data_in, find,
    names, result_on_file, with_shots,
};
use fox_model::Pruning;

use super::print_report;
use super::subjects::{Named, Opened, results_in};
use crate::device::DeviceArgs;
use crate::output;
use crate::progress::Bar;

/// Ask questions that have right answers: short tasks and LongBench
///
/// Contexts, continuations and metrics are those of lm-evaluation-harness and of LongBench. Data are local:
/// DATA/piqa.jsonl (also .zst, .gz) or DATA/piqa.parquet with the data set's usual columns. --shots puts answered
/// questions in front, as the harness does with its sampler `first_n`. A task of your own is a TOML file (see the
/// built-in ones in crates/fox-eval/tasks). OUT gets tasks.json, tasks.csv and, for every model and task, the result and
/// a line per item; finished items are not repeated.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folders, each PATH or NAME=PATH
    #[arg(value_name = "MODEL", required_unless_present = "list")]
    models: Vec<String>,
    #[command(flatten)]
    tasks: TaskArgs,
    /// List the tasks that are known
    #[arg(long)]
    list: bool,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Folder for the results; eval-tasks in the run folder of a single run, or else here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Which tasks, and how they are asked.
#[derive(clap::Args)]
pub struct TaskArgs {
    /// Tasks: names, or files ending in .toml; every task whose data are in DATA without it
    #[arg(long = "tasks", value_name = "TASK,...", value_delimiter = ',')]
    tasks: Vec<String>,
    /// Folder of the tasks' data
    #[arg(long, value_name = "DATA")]
    task_data: Option<PathBuf>,
    /// LongBench's configuration: the folder of dataset2prompt.json and dataset2maxlen.json
    #[arg(long, value_name = "DIR")]
    longbench: Option<PathBuf>,
    /// Answered questions in front of every question: the first N rows of DATA/TASK.train.jsonl, or else the first N
    /// of the task's own rows, which are then not asked
    #[arg(long, value_name = "N", default_value_t = 0)]
    shots: usize,
    /// Items per task, at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Tokens a model is given at most; its training length without it
    #[arg(long, value_name = "N")]
    max_length: Option<usize>,
    /// Put the start marker in front of every context (LongBench always does)
    #[arg(long)]
    bos: bool,
    /// What prompts lose that are too long to be answered
    #[arg(long, value_enum, default_value_t = Cut::Middle)]
    truncate: Cut,
}

#[derive(Clone, Copy, ValueEnum)]
enum Cut {
    /// The middle, as LongBench does
    Middle,
    /// The start
    Left,
}

/// A task with its rows.
pub struct Loaded {
    spec: TaskSpec,
    rows: Vec<Record>,
}

impl TaskArgs {
    /// Whether any task is asked for.
    pub fn any(&self) -> bool {
        !self.tasks.is_empty() || self.task_data.is_some()
    }

    /// Reads the tasks and their rows.
    pub fn load(&self) -> Result<Vec<Loaded>> {
        let configuration = self.longbench.as_deref().map(LongBench::open).transpose()?;
        let long = LONGBENCH.into_iter().filter(|_| configuration.is_some());
        let asked: Vec<&str> = match &self.task_data {
            Some(folder) if self.tasks.is_empty() => {
                names().chain(long).filter(|name| data_in(folder, name).is_some()).collect()
            }
            _ => self.tasks.iter().map(String::as_str).collect(),
        };
        let limit = self.limit.map(|items| items as usize);
        let mut loaded = Vec::new();
        for name in asked {
            let spec = find(name, configuration.as_ref())?;
            let (spec, rows) = with_shots(spec, self.shots, self.task_data.as_deref(), limit)?;
            loaded.push(Loaded { spec, rows });
        }
        if loaded.is_empty() {
            bail!(
                "no task was found; name tasks with --tasks, or a folder of their data with --task-data"
            );
        }
        Ok(loaded)
    }

    fn options(&self) -> TaskOptions {
        TaskOptions {
            max_length: self.max_length,
            bos: self.bos,
            truncation: match self.truncate {
                Cut::Middle => Truncation::Middle,
                Cut::Left => Truncation::Left,
            },
            pruning: Pruning::Config,
        }
    }

    /// Asks one model all tasks; results in `folder` are used.
    pub fn ask(
        &self,
        tasks: &[Loaded],
        opened: &Opened,
        tokenizer: Option<&str>,
        folder: &std::path::Path,
    ) -> Result<Vec<TaskResult>> {
        const STEPS: f64 = 1000.0;
        let tokenizer = opened.tokenizer(tokenizer)?;
        let subject = opened.subject(None);
        let mut results = Vec::new();
        for Loaded { spec, rows } in tasks {
            let progress = Bar::new(&format!("{} {}", opened.name, spec.name), STEPS as u64);
            let done = |share: f64| progress.set((share * STEPS) as u64);
            let options = self.options();
            results.push(result_on_file(folder, &subject, &tokenizer, spec, rows, &options, done)?);
            progress.finish();
        }
        Ok(results)
    }
}

impl Args {
    fn results(&self) -> PathBuf {
        results_in(self.out.as_deref(), &self.models, "eval-tasks")
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.list {
        output::print(&list()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let device = args.device.open()?;
    let tasks = args.tasks.load()?;
    let mut report = TaskReport::default();
    for model in Named::all(&args.models)? {
        let opened = model.open(&device)?;
        report.results.extend(args.tasks.ask(
            &tasks,
            &opened,
            args.tokenizer.as_deref(),
            &args.results(),
        )?);
    }
    let written = report.write(&args.results())?;
    let table = output::table(&by_task(&report));
    print_report(args.json, serde_json::to_value(&report), &table, &written)
}

/// The table with a row per task and metric: a terminal is higher than it is wide.
fn by_task(report: &TaskReport) -> Vec<Vec<String>> {
    let table = report.table();
    let columns = table.first().map_or(0, Vec::len);
    (0..columns).map(|c| table.iter().map(|row| row[c].clone()).collect()).collect()
}

fn list() -> Result<String> {
    let mut text = String::new();
    for name in names() {
        let spec = find(name, None)?;
        let metrics: Vec<&str> = spec.metrics.iter().map(|m| m.name()).collect();
        text += &format!("{name:<16}{} ({})\n", spec.about, metrics.join(", "));
    }
    let long = LONGBENCH.join(", ");
    Ok(format!("{text}with --longbench: {long}\n"))
}
