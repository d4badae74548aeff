//! Trains every model with every seed in child processes, then evaluates all of them.

use std::cell::Cell;
use std::io::{IsTerminal, stderr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use fox_data::SyntheticTokenizer;
use fox_eval::Subject;
use fox_eval::learning::Learning;
use fox_eval::loss::{LossSums, evaluate_loss};
use fox_eval::needle::{ModelReader, NeedleMap, run_needle};
use fox_model::Model;
use fox_tensor::Device;
use fox_train::Summary;
use fox_train::metrics::{MetricsLog, Record};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::models::DemoModel;
use super::{Evaluation, Options};
use crate::events::ChildEvent;
use crate::graph::{Node, NodeId, RunGraph};
use crate::progress::LINE_EVERY;
use crate::{Scheduler, output};

/// One model with one seed, trained and evaluated.
pub struct DemoRun {
    /// Its seed.
    pub seed: u64,
    /// Its run folder.
    pub folder: PathBuf,
    /// The model.
    pub model: Model,
    /// Training loss over tokens.
    pub learning: Learning,
    /// Losses of the held-out documents.
    pub losses: LossSums,
    /// Needle accuracies.
    pub needles: NeedleMap,
    /// Training time.
    pub seconds: f64,
    /// Training throughput.
    pub tokens_per_second: f64,
    /// Evaluation time.
    pub evaluation_seconds: f64,
}

/// A model with its runs, one per seed.
pub type ModelRuns = (DemoModel, Vec<DemoRun>);

impl DemoRun {
    /// The model as the subject of evaluations.
    pub fn subject<'a>(&'a self, name: &'a str, evaluation: &Evaluation) -> Subject<'a> {
        Subject { name, model: &self.model, training_length: Some(evaluation.trained_on) }
    }
}

/// Trains and evaluates all models with all seeds; `None` when it was stopped. Results do not depend on how many run
/// at a time.
///
/// # Errors
/// A run that cannot be trained or evaluated.
pub fn run_all(
    options: &Options,
    evaluation: &Evaluation,
    devices: &[Device],
    scheduler: &Scheduler,
) -> Result<Option<Vec<ModelRuns>>> {
    let models = DemoModel::all();
    let seeds = options.seed..options.seed + options.seeds;
    let order: Vec<(usize, u64)> =
        seeds.flat_map(|seed| (0..models.len()).map(move |m| (m, seed))).collect();
    if !train_all(options, &models, &order, scheduler)? {
        return Ok(None);
    }
    let next = AtomicUsize::new(0);
    let work = |device: &Device| -> Result<Vec<(usize, DemoRun)>> {
        let mut runs = Vec::new();
        while let Some(&(m, seed)) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            if scheduler.stop.load(Ordering::Relaxed) {
                break;
            }
            runs.push((m, evaluate(options, &models[m], seed, evaluation, device)?));
        }
        Ok(runs)
    };
    let results: Vec<Result<Vec<(usize, DemoRun)>>> = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = devices.iter().map(|d| scope.spawn(move || work(d))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut all: Vec<ModelRuns> = models.into_iter().map(|m| (m, Vec::new())).collect();
    for result in results {
        for (m, run) in result? {
            all[m].1.push(run);
        }
    }
    all.iter_mut().for_each(|(_, runs)| runs.sort_by_key(|run| run.seed));
    let complete = all.iter().all(|(_, runs)| runs.len() as u64 == options.seeds);
    Ok(complete.then_some(all))
}

/// Trains all runs; false when it was stopped.
fn train_all(
    options: &Options,
    models: &[DemoModel],
    order: &[(usize, u64)],
    scheduler: &Scheduler,
) -> Result<bool> {
    let mut graph = RunGraph::default();
    for &(m, seed) in order {
        graph.add(Node::train(models[m].train_run(options, seed)))?;
    }
    let missing = graph.nodes().iter().filter(|node| node.outcome.is_none()).count();
    let progress = Progress::new(missing, options.tokens);
    let mut tokens = vec![0; order.len()];
    let mut on_event = |node: NodeId, event: &ChildEvent| match event {
        ChildEvent::Started { tokens: before } => {
            progress.resumed(*before);
            tokens[node] = *before;
        }
        ChildEvent::Step { tokens: now, .. } => {
            progress.trained(now.saturating_sub(tokens[node]));
            tokens[node] = *now;
        }
        _ => {}
    };
    let complete = scheduler.run_with(&mut graph, &mut (), Some(&mut on_event))?;
    progress.bar.finish_and_clear();
    for node in graph.nodes() {
        use crate::graph::RunOutcome::{Diverged, Failed};
        if let Some(Failed(why) | Diverged(why)) = &node.outcome {
            bail!("{}: {why}", node.label);
        }
    }
    Ok(complete)
}

/// Evaluates a trained run.
fn evaluate(
    options: &Options,
    model: &DemoModel,
    seed: u64,
    evaluation: &Evaluation,
    device: &Device,
) -> Result<DemoRun> {
    let run = model.train_run(options, seed);
    let folder = run.folder;
    let summary = Summary::read(&folder)?
        .with_context(|| format!("{} has no summary.json", folder.display()))?;
    let trained = Model::from_checkpoint(&folder.join("export"), device)?;
    let start = Instant::now();
    let subject =
        Subject { name: &run.label, model: &trained, training_length: Some(evaluation.trained_on) };
    let losses = evaluate_loss(&subject, &evaluation.data, &evaluation.loss, None, |_| ())?;
    let mut reader = ModelReader::new(subject, evaluation.loss.pruning);
    let decode = |ids: &[u32]| Ok(SyntheticTokenizer.decode(ids)?);
    let (cases, grid) = (&evaluation.cases, &evaluation.grid);
    let needles = run_needle(model.name, &mut reader, cases, grid, &decode, None, |_| ())?;
    let evaluation_seconds = start.elapsed().as_secs_f64();
    output::note(&format!(
        "{}: trained in {:.0} s, evaluated in {evaluation_seconds:.0} s, {:.0}% of the needles found at {} tokens",
        run.label,
        summary.seconds,
        100.0 * needles.accuracy_at(evaluation.length()),
        evaluation.length(),
    ));
    let records = MetricsLog::read(&folder)?.records.into_iter();
    let step_losses = records.filter_map(|record| match record {
        Record::Train(step) => step.loss.map(|loss| (step.tokens as f64, loss)),
        Record::Eval(_) => None,
    });
    Ok(DemoRun {
        seed,
        learning: Learning { model: run.label, losses: step_losses.collect() },
        folder,
        model: trained,
        losses,
        needles,
        seconds: summary.seconds,
        tokens_per_second: summary.tokens_per_second,
        evaluation_seconds,
    })
}

/// The training progress of all runs together.
struct Progress {
    bar: ProgressBar,
    /// When the last line was printed; `None` on a terminal.
    last_line: Option<Cell<Instant>>,
}

impl Progress {
    fn new(runs: usize, tokens: u64) -> Self {
        let bar = ProgressBar::new(runs as u64 * tokens);
        let terminal = stderr().is_terminal();
        if terminal && runs > 0 {
            let template = "{bar:24} {percent}%  {msg}  ETA {eta}";
            let style = ProgressStyle::with_template(template);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(format!("training {runs} models"));
        } else {
            bar.set_draw_target(ProgressDrawTarget::hidden());
            let tokens = output::grouped(tokens);
            output::note(&format!("training {runs} models on {tokens} tokens each"));
        }
        Progress { bar, last_line: (!terminal).then(|| Cell::new(Instant::now())) }
    }

    /// Counts tokens from before an interruption, without counting their time.
    fn resumed(&self, tokens: u64) {
        self.bar.inc(tokens);
        self.bar.reset_eta();
    }

    fn trained(&self, tokens: u64) {
        self.bar.inc(tokens);
        let Some(last) = &self.last_line else { return };
        if last.get().elapsed() >= LINE_EVERY {
            last.set(Instant::now());
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
            let percent = 100.0 * done.min(all) as f64 / all.max(1) as f64;
            let eta = output::duration(self.bar.eta().as_secs_f64());
            let all = output::grouped(all);
            output::note(&format!("{percent:.0}% of {all} training tokens  ETA {eta}"));
        }
    }
}
