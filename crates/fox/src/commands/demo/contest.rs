//! Every model with every seed, trained and measured, as many side by side as there are devices.

use std::collections::VecDeque;
use std::io::{IsTerminal, stderr};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Result, bail};
use fox_data::SyntheticTokenizer;
use fox_eval::Subject;
use fox_eval::learning::Learning;
use fox_eval::loss::{LossSums, evaluate_loss};
use fox_eval::needle::{ModelReader, NeedleMap, run_needle};
use fox_model::Model;
use fox_tensor::Device;
use fox_train::metrics::{MetricsLog, Record};
use fox_train::{Event, RunSpec, train};
use indicatif::{ProgressBar, ProgressStyle};

use super::models::Contestant;
use super::{Args, Questions};
use crate::bar::LINE_EVERY;
use crate::output;

/// One model with one seed, trained and measured.
pub struct Run {
    /// Its seed.
    pub seed: u64,
    /// Its run folder.
    pub folder: PathBuf,
    /// The model.
    pub model: Model,
    /// Training loss: tokens seen and loss.
    pub learning: Learning,
    /// Losses of the documents.
    pub losses: LossSums,
    /// Needles found.
    pub needles: NeedleMap,
    /// Training time.
    pub seconds: f64,
    /// Training speed.
    pub tokens_per_second: f64,
    /// Evaluation time.
    pub evaluation_seconds: f64,
}

impl Run {
    /// For evaluations.
    pub fn subject<'a>(&'a self, name: &'a str, questions: &Questions) -> Subject<'a> {
        Subject { name, model: &self.model, training_length: Some(questions.trained_on) }
    }
}

/// Trains and measures all, in order of the seeds; results do not depend on how many run side by side.
///
/// # Errors
/// A run that cannot be trained or measured, and a stop, after which the same command goes on.
pub fn hold(
    args: &Args,
    contestants: Vec<Contestant>,
    seeds: &[u64],
    questions: &Questions,
    devices: &[Device],
    stop: &AtomicBool,
) -> Result<Vec<(Contestant, Vec<Run>)>> {
    let jobs: VecDeque<(usize, u64)> =
        seeds.iter().flat_map(|seed| (0..contestants.len()).map(|c| (c, *seed))).collect();
    let progress = Progress::new(jobs.len(), args.tokens);
    let queue = Mutex::new(jobs);
    let failed = AtomicBool::new(false);
    let work = |device: &Device| -> Result<Vec<(usize, Run)>> {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some((c, seed)) = next.filter(|_| !failed.load(Ordering::Relaxed)) else {
                return Ok(done);
            };
            let stopped = || stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
            let run = one(args, &contestants[c], seed, questions, device, &progress, &stopped);
            if run.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            done.extend(run?.map(|run| (c, run)));
        }
    };
    let results: Vec<Result<Vec<(usize, Run)>>> = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = devices.iter().map(|d| scope.spawn(move || work(d))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    progress.finish();
    let mut models: Vec<(Contestant, Vec<Run>)> =
        contestants.iter().map(|c| (*c, Vec::new())).collect();
    for result in results {
        for (c, run) in result? {
            models[c].1.push(run);
        }
    }
    if models.iter().any(|(_, runs)| runs.len() < seeds.len()) {
        bail!("stopped; the same command goes on from here");
    }
    for (_, runs) in &mut models {
        runs.sort_by_key(|run| run.seed);
    }
    Ok(models)
}

/// Trains a model, or goes on with a run that was stopped, and measures it; nothing when it was stopped again.
fn one(
    args: &Args,
    contestant: &Contestant,
    seed: u64,
    questions: &Questions,
    device: &Device,
    progress: &Progress,
    stopped: &dyn Fn() -> bool,
) -> Result<Option<Run>> {
    let folder = contestant.folder(&args.out, seed);
    let spec = RunSpec {
        recipe: contestant.recipe(args, seed)?,
        out: folder.clone(),
        device: device.clone(),
        command: std::env::args().collect(),
    };
    let mut seen = 0;
    let outcome = train(&spec, &mut |event: &Event<'_>| {
        match event {
            Event::Started(start) => {
                let before = start.from_step * start.tokens_per_step;
                progress.resumed(before);
                seen = before;
            }
            Event::Step(step) => {
                progress.trained(step.tokens - seen);
                seen = step.tokens;
            }
            Event::Notice(text) => progress.line(text),
            _ => {}
        }
        if stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if !outcome.summary.finished {
        return Ok(None);
    }
    let begin = Instant::now();
    let name = format!("{} seed {seed}", contestant.name);
    let subject =
        Subject { name: &name, model: &outcome.model, training_length: Some(questions.trained_on) };
    let losses = evaluate_loss(&subject, &questions.data, &questions.loss, None, |_| ())?;
    let mut reader = ModelReader::new(subject, questions.loss.pruning);
    let decode = |ids: &[u32]| Ok(SyntheticTokenizer.decode(ids)?);
    let (cases, grid) = (&questions.cases, &questions.grid);
    let needles = run_needle(contestant.name, &mut reader, cases, grid, &decode, None, |_| ())?;
    let evaluation_seconds = begin.elapsed().as_secs_f64();
    progress.line(&format!(
        "{name}: trained in {:.0} s, measured in {evaluation_seconds:.0} s, {:.0}% of the needles found at {} tokens",
        outcome.summary.seconds,
        100.0 * needles.accuracy_at(questions.length()),
        questions.length(),
    ));
    let records = MetricsLog::read(&folder)?.records.into_iter();
    let losses_of_steps = records.filter_map(|record| match record {
        Record::Train(step) => step.loss.map(|loss| (step.tokens as f64, loss)),
        Record::Eval(_) => None,
    });
    Ok(Some(Run {
        seed,
        learning: Learning { model: name, losses: losses_of_steps.collect() },
        folder,
        model: outcome.model,
        losses,
        needles,
        seconds: outcome.summary.seconds,
        tokens_per_second: outcome.summary.tokens_per_second,
        evaluation_seconds,
    }))
}

/// The progress of all runs together, on the standard error.
struct Progress {
    bar: ProgressBar,
    /// When the last line was written, where there is no terminal.
    last_line: Option<Mutex<Instant>>,
}

impl Progress {
    fn new(runs: usize, tokens: u64) -> Self {
        let bar = ProgressBar::new(runs as u64 * tokens);
        let terminal = stderr().is_terminal();
        if terminal {
            let template = "{bar:24} {percent}%  {msg}  ETA {eta}";
            let style = ProgressStyle::with_template(template);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(format!("training {runs} models"));
        } else {
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
            output::note(&format!(
                "training {runs} models on {} tokens each",
                output::grouped(tokens)
            ));
        }
        Progress { bar, last_line: (!terminal).then(|| Mutex::new(Instant::now())) }
    }

    /// Tokens that an earlier run of the command has seen: no work of this one.
    fn resumed(&self, tokens: u64) {
        self.bar.inc(tokens);
        self.bar.reset_eta();
    }

    fn trained(&self, tokens: u64) {
        self.bar.inc(tokens);
        let Some(last) = &self.last_line else { return };
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= LINE_EVERY {
            *last = Instant::now();
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
            output::note(&format!(
                "{:.0}% of {} training tokens",
                100.0 * done.min(all) as f64 / all.max(1) as f64,
                output::grouped(all)
            ));
        }
    }

    fn line(&self, text: &str) {
        match self.last_line {
            None => self.bar.println(text),
            Some(_) => output::note(text),
        }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
