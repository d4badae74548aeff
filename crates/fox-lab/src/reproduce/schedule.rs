//! The run graph of a reproduction: learning-rate searches, then every run followed by its measurements.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use fox_base::durable;
use fox_train::Summary;
use serde_json::json;

use super::estimate::Speed;
use super::plan::ALONE_RATE;
use super::{Measurement, PlannedRun, Reproduction, held_out, results};
use crate::graph::{Experiment, Node, NodeId, RunGraph, RunOutcome, Work, comparable_loss};
use crate::output;
use crate::search::{Bracket, RateSearch};

/// Builds the graph as learning rates become known.
pub struct Schedule<'a> {
    plan: &'a Reproduction,
    quiet: bool,
    vocab: usize,
    searches: Vec<RateSearch>,
    /// Whether the nodes of a run are in the graph, for each run of the plan.
    added: Vec<bool>,
    training_seconds: f64,
    measuring_seconds: f64,
}

impl<'a> Schedule<'a> {
    /// The schedule of a plan for data with this vocabulary size.
    pub fn new(plan: &'a Reproduction, vocab: usize, quiet: bool) -> Result<Self> {
        durable::create_folder(&plan.options.out.join("runs"))?;
        Ok(Schedule {
            plan,
            quiet,
            vocab,
            searches: plan.searches.iter().map(search_of).collect::<Result<_>>()?,
            added: vec![false; plan.runs.len()],
            training_seconds: 0.0,
            measuring_seconds: 0.0,
        })
    }

    /// Appends the duration of this session to the log that the report reads.
    pub fn log_session(&self, seconds: f64, jobs: usize, speed: &Speed) -> Result<()> {
        let line = json!({
            "seconds": seconds,
            "jobs": jobs,
            "training": self.training_seconds,
            "measuring": self.measuring_seconds,
            "device": speed.device,
            "version": env!("CARGO_PKG_VERSION"),
        });
        let path = self.plan.options.out.join(results::SESSIONS);
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(file.write_all(format!("{line}\n").as_bytes())?)
    }

    /// The learning rate of a run, once its search is over.
    fn rate(&self, run: &PlannedRun) -> Option<f64> {
        let searched = || {
            let number = self.plan.searches.iter().position(|search| search.rate == run.rate)?;
            let search = &self.searches[number];
            // If no rate works, the runs themselves report it.
            search.is_over().then(|| search.best().unwrap_or(1e-3))
        };
        run.lr.or_else(searched)
    }

    /// Adds a run, what it starts from, and its measurements.
    fn add_run(&self, graph: &mut RunGraph, number: usize, lr: f64) -> Result<()> {
        let (run, options) = (&self.plan.runs[number], &self.plan.options);
        // Runs whose speed is measured come last, because nothing runs beside them.
        let exclusive = run.exclusive;
        let last = if exclusive { self.plan.runs.len() } else { 0 };
        let rank = self.searches.len() + number + last;
        let mut after = Vec::new();
        if let Some(start) = &run.start {
            let first = start.run.train_run(start.run.lr.unwrap_or_default(), options);
            let mut id = graph.add(Node { rank, ..Node::train(first) })?;
            if let Some(memory) = start.memory {
                let export = start.export(&options.out).display().to_string();
                let folder = start.folder.display().to_string();
                let memory = memory.to_string();
                let work = Work::Command {
                    arguments: strings(&["retrofit", &export, &folder, "--memory", &memory]),
                    output: start.folder.clone(),
                    uses_device: false,
                };
                let node = Node::new(format!("gates for {folder}"), work);
                id = graph.add(Node { rank, after: vec![id], ..node })?;
            }
            after.push(id);
        }
        let train = Node { rank, after, exclusive, ..Node::train(run.train_run(lr, options)) };
        let train = graph.add(train)?;
        for node in self.measurements(run, lr)? {
            graph.add(Node { rank, after: vec![train], exclusive, ..node })?;
        }
        Ok(())
    }

    fn measurements(&self, run: &PlannedRun, lr: f64) -> Result<Vec<Node>> {
        let has_attention = || -> Result<bool> {
            let recipe = run.train_run(lr, &self.plan.options).recipe()?;
            Ok(recipe.model_config(self.vocab)?.has_attention())
        };
        let mut nodes = Vec::new();
        for measurement in &run.measurements {
            match measurement {
                Measurement::Loss => nodes.push(self.loss(run, lr)),
                Measurement::Needle => {
                    nodes.push(self.needle(run, lr, "easy"));
                    // Questions about the embedded corpus repeat its facts literally: there is only the easy mode.
                    if self.plan.options.data.is_some() {
                        nodes.push(self.needle(run, lr, "standard"));
                    }
                }
                Measurement::Candidates => nodes.push(self.needle(run, lr, results::CANDIDATES)),
                Measurement::Inspect if has_attention()? => nodes.push(self.inspect(run, lr)),
                // Speeds are measured before all runs.
                Measurement::Inspect | Measurement::Speed => {}
            }
        }
        Ok(nodes)
    }

    fn folder(&self, run: &PlannedRun, lr: f64) -> String {
        run.train_run(lr, &self.plan.options).folder.display().to_string()
    }

    /// `NAME=FOLDER`, the model argument of an evaluation.
    fn named(&self, run: &PlannedRun, lr: f64) -> String {
        let row = &self.plan.experiments[run.experiment].rows[run.row];
        format!("{}={}", row.name, self.folder(run, lr))
    }

    /// The option and path of the held-out text; the embedded corpus needs none.
    fn text(&self, option: &str) -> Vec<String> {
        match self.plan.options.data {
            Some(_) => {
                let path = held_out::text(&self.plan.options.out);
                vec![option.to_string(), path.display().to_string()]
            }
            None => Vec::new(),
        }
    }

    fn loss(&self, run: &PlannedRun, lr: f64) -> Node {
        let out = results::evaluation(&self.plan.options.out, &run.folder(lr));
        let scale = &self.plan.scale;
        let mut arguments = strings(&["eval", "loss", &self.named(run, lr)]);
        arguments.extend(strings(&["--length", &scale.length.to_string()]));
        arguments.extend(strings(&["--documents", &scale.documents.to_string()]));
        if self.plan.options.data.is_some() {
            let path = held_out::prepared(&self.plan.options.out).display().to_string();
            arguments.extend(["--data".to_string(), path]);
        }
        arguments.extend(strings(&["--out", &out.display().to_string()]));
        measurement("loss", run, lr, arguments, out.join("loss.json"))
    }

    /// A needle test of one of [`results::NEEDLES`].
    fn needle(&self, run: &PlannedRun, lr: f64, kind: &str) -> Node {
        let out = results::evaluation(&self.plan.options.out, &run.folder(lr)).join(kind);
        let needles = &self.plan.scale.needles;
        let lengths: Vec<String> = needles.lengths.iter().map(usize::to_string).collect();
        let mut arguments = strings(&["eval", "needle", &self.named(run, lr)]);
        arguments.extend(match kind {
            // The facts of the embedded corpus come with wrong answers.
            results::CANDIDATES if self.plan.options.data.is_none() => Vec::new(),
            results::CANDIDATES => strings(&["--candidates", &needles.candidates.to_string()]),
            mode => strings(&["--mode", mode]),
        });
        arguments.extend(strings(&["--lengths", &lengths.join(",")]));
        arguments.extend(strings(&["--depths", &needles.depths.to_string()]));
        arguments.extend(strings(&["--cases", &needles.cases.to_string()]));
        arguments.extend(self.text("--haystack"));
        arguments.extend(strings(&["--out", &out.display().to_string()]));
        measurement(&format!("{kind} needles"), run, lr, arguments, out.join("needle.json"))
    }

    fn inspect(&self, run: &PlannedRun, lr: f64) -> Node {
        let out = results::evaluation(&self.plan.options.out, &run.folder(lr)).join("inspect.html");
        let mut arguments = strings(&["inspect", &self.folder(run, lr)]);
        arguments.extend(strings(&["--length", &self.plan.scale.inspect.to_string()]));
        arguments.extend(self.text("--text"));
        arguments.extend(strings(&["--out", &out.display().to_string()]));
        measurement("heads", run, lr, arguments, out.with_extension("json"))
    }

    /// Accounts for the time of a node that ended, and prints the result of a training run.
    fn log_end(&mut self, node: &Node, seconds: f64) -> Result<()> {
        let Some(run) = node.run() else {
            self.measuring_seconds += seconds;
            return Ok(());
        };
        let line = match &node.outcome {
            Some(RunOutcome::Finished) => {
                let summary = Summary::read(&run.folder)?;
                self.training_seconds += summary.as_ref().map_or(0.0, |s| s.seconds);
                let loss = summary.as_ref().and_then(comparable_loss);
                let loss = loss.map_or(String::new(), |loss| format!(", held-out loss {loss:.4}"));
                format!("{}: {seconds:.0} s{loss}", node.label)
            }
            Some(RunOutcome::Diverged(_)) => format!("{}: diverged", node.label),
            _ => return Ok(()),
        };
        if !self.quiet {
            output::note(&line);
        }
        Ok(())
    }
}

impl Experiment for Schedule<'_> {
    fn update(&mut self, graph: &mut RunGraph, ended: Option<(NodeId, f64)>) -> Result<()> {
        if let Some((id, seconds)) = ended {
            self.log_end(graph.node(id), seconds)?;
        }
        let options = &self.plan.options;
        let first = graph.nodes().is_empty();
        let timed = |run: &&PlannedRun| first && run.measurements.contains(&Measurement::Speed);
        for run in self.plan.runs.iter().filter(timed) {
            let run = run.alone()?.train_run(ALONE_RATE, options);
            graph.add(Node { exclusive: true, ..Node::train(run) })?;
        }
        for (number, run) in self.plan.searches.iter().enumerate() {
            self.searches[number].update(graph, number, |lr| Ok(run.train_run(lr, options)))?;
        }
        for number in 0..self.plan.runs.len() {
            if !self.added[number]
                && let Some(lr) = self.rate(&self.plan.runs[number])
            {
                self.add_run(graph, number, lr)?;
                self.added[number] = true;
            }
        }
        // Checkpoints of a finished run serve only to resume it, and are large.
        for node in graph.nodes().iter().filter(|n| n.outcome == Some(RunOutcome::Finished)) {
            let checkpoints = node.run().map(|run| run.folder.join("checkpoints"));
            if let Some(folder) = checkpoints.filter(|folder| folder.exists()) {
                durable::remove_folder(&folder)?;
            }
        }
        Ok(())
    }
}

fn measurement(
    name: &str,
    run: &PlannedRun,
    lr: f64,
    arguments: Vec<String>,
    output: PathBuf,
) -> Node {
    let label = format!("{name} of {}", run.folder(lr));
    Node::new(label, Work::Command { arguments, output, uses_device: true })
}

fn search_of(run: &PlannedRun) -> Result<RateSearch> {
    Ok(RateSearch::around(fox_train::recipe::load(&run.spec, &[])?.optimizer.peak_lr))
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// The learning rates that were tried for every model, with their losses, from the run folders.
pub fn rates(plan: &Reproduction) -> Result<BTreeMap<String, Bracket>> {
    let mut rates = BTreeMap::new();
    for run in &plan.searches {
        let mut search = search_of(run)?;
        let mut graph = RunGraph::default();
        search.update(&mut graph, 0, |lr| Ok(run.train_run(lr, &plan.options)))?;
        rates.insert(run.rate.clone(), search.bracket);
    }
    Ok(rates)
}
