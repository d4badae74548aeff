//! What runs next: searches first, then what was trained is measured, then what is missing is trained.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use fox_base::durable;
use fox_eval::needle::Mode;
use fox_model::{RetrofitOptions, retrofit_checkpoint};
use fox_train::finished_run;
use fox_train::reproduce::{Measure, Plan, PlannedRun};
use fox_train::sweep::{Bracket, Ended, learning_rate_grid};
use serde_json::json;

use super::estimate::Speed;
use super::{found, held_out};
use crate::commands::sweep::training;
use crate::output;
use crate::pool::{Task, Work};

/// One process: a training, or a measurement of what was trained.
#[derive(Clone, Debug)]
struct Job {
    label: String,
    arguments: Vec<String>,
    alone: bool,
    /// What it is.
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// A training; in a search with its number and the point of the grid.
    Training {
        run: Box<PlannedRun>,
        lr: f64,
        search: Option<(usize, i32)>,
    },
    Measurement,
}

/// The search for one model's learning rate.
struct Search {
    run: PlannedRun,
    bracket: Bracket,
    asked: Vec<i32>,
    failed: bool,
}

/// What is to be done, what is under way, what is over.
pub struct Schedule<'a> {
    plan: &'a Plan,
    out: PathBuf,
    device: Vec<String>,
    quiet: bool,
    vocab: usize,
    searches: Vec<Search>,
    /// Labels that were handed out.
    asked: Vec<String>,
    /// Losses of runs that are over, and `None` of those that are not, by label.
    known: BTreeMap<String, Option<f64>>,
    running: Vec<Job>,
    /// What failed in this session, and why.
    pub failed: Vec<(String, String)>,
    training_seconds: f64,
    measuring_seconds: f64,
}

impl<'a> Schedule<'a> {
    /// Everything that is not on the disk yet.
    pub fn new(
        plan: &'a Plan,
        out: &Path,
        device: Vec<String>,
        vocab: usize,
        quiet: bool,
    ) -> Result<Self> {
        durable::create_folder(&out.join("runs"))?;
        let search = |run: &PlannedRun| -> Result<Search> {
            let own = fox_train::recipe::load(&run.spec, &[])?.optimizer.peak_lr;
            let (bracket, asked) = (Bracket::around(own), Vec::new());
            Ok(Search { run: run.clone(), bracket, asked, failed: false })
        };
        Ok(Schedule {
            plan,
            out: out.to_path_buf(),
            device,
            quiet,
            vocab,
            searches: plan.searches.iter().map(search).collect::<Result<_>>()?,
            asked: Vec::new(),
            known: BTreeMap::new(),
            running: Vec::new(),
            failed: Vec::new(),
            training_seconds: 0.0,
            measuring_seconds: 0.0,
        })
    }

    /// Notes how long the command was at work, for the report.
    pub fn note_session(&self, seconds: f64, jobs: usize, speed: &Speed) -> Result<()> {
        let line = json!({
            "seconds": seconds,
            "jobs": jobs,
            "training": self.training_seconds,
            "measuring": self.measuring_seconds,
            "device": speed.device,
            "version": env!("CARGO_PKG_VERSION"),
        });
        let path = self.out.join(found::SESSIONS);
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(file.write_all(format!("{line}\n").as_bytes())?)
    }

    /// The rate of a model, when its search is over.
    fn rate(&self, model: &str) -> Option<f64> {
        let search = self.searches.iter().find(|search| search.run.rate == model)?;
        let over = search.failed || search.bracket.wanted().is_empty();
        let best = search.bracket.best().map(learning_rate_grid);
        // A model that cannot be trained at any rate says so in every run.
        over.then(|| best.unwrap_or(1e-3))
    }

    /// The next run of a search.
    fn next_searched(&mut self) -> Result<Option<Job>> {
        for number in 0..self.searches.len() {
            loop {
                let search = &mut self.searches[number];
                let wanted = search.bracket.wanted();
                let next = wanted.into_iter().find(|index| !search.asked.contains(index));
                let Some(index) = next.filter(|_| !search.failed) else { break };
                search.asked.push(index);
                let (run, lr) = (search.run.clone(), learning_rate_grid(index));
                match self.known(&run, lr)? {
                    Some(loss) => self.searches[number].bracket.record(index, loss),
                    None => return Ok(Some(self.training(&run, lr, Some((number, index))))),
                }
            }
        }
        Ok(None)
    }

    /// The loss of a run that is over; infinite when it diverged.
    fn known(&mut self, run: &PlannedRun, lr: f64) -> Result<Option<f64>> {
        let label = run.folder(lr);
        if let Some(known) = self.known.get(&label) {
            return Ok(*known);
        }
        let folder = self.folder(run, lr);
        let known = if folder.join(found::DIVERGED).exists() {
            Some(f64::INFINITY)
        } else {
            let recipe = run.recipe(lr, self.plan.options.data.as_deref())?;
            let summary = finished_run(&folder, &recipe)?;
            // Without its weights a run cannot be measured any more; it is trained again if it still has to be.
            let weights = folder.join("export").exists();
            let usable = weights || self.next_measurement(run, lr)?.is_none();
            let summary = summary.filter(|_| usable);
            if summary.is_some() {
                self.tidy(run, lr)?;
            }
            summary.map(|summary| found::loss(&summary).unwrap_or(f64::INFINITY))
        };
        self.known.insert(label, known);
        Ok(known)
    }

    fn folder(&self, run: &PlannedRun, lr: f64) -> PathBuf {
        self.out.join("runs").join(run.folder(lr))
    }

    fn training(&self, run: &PlannedRun, lr: f64, search: Option<(usize, i32)>) -> Job {
        let data = self.plan.options.data.as_deref();
        let settings = run.settings(lr);
        let arguments = training(&run.spec, &settings, data, &self.folder(run, lr));
        Job {
            label: run.folder(lr),
            arguments,
            alone: run.alone,
            kind: Kind::Training { run: Box::new(run.clone()), lr, search },
        }
    }

    /// A training that is missing and whose rate is known, or a measurement of one that is there. Those that must be
    /// alone come last.
    fn next_run(&mut self) -> Result<Option<Job>> {
        for alone in [false, true] {
            let plan = self.plan;
            for run in plan.runs.iter().filter(|run| run.alone == alone) {
                let Some(lr) = run.lr.or_else(|| self.rate(&run.rate)) else { continue };
                let label = run.folder(lr);
                match self.known(run, lr)? {
                    None if !self.asked.contains(&label) => {
                        if !self.can_start(run)? {
                            continue;
                        }
                        return Ok(Some(self.training(run, lr, None)));
                    }
                    Some(loss) if loss.is_finite() => {
                        if let Some(job) = self.next_measurement(run, lr)? {
                            return Ok(Some(job));
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(None)
    }

    /// Whether what a run begins with is there; gates are added to it here.
    fn can_start(&mut self, run: &PlannedRun) -> Result<bool> {
        let Some(start) = &run.start else { return Ok(true) };
        let known = self.known(&start.run, start.run.lr.unwrap_or_default())?;
        let export = start.export(&self.out);
        if !known.is_some_and(f64::is_finite) || !export.exists() {
            return Ok(false);
        }
        if let Some(memory) = start.memory.filter(|_| !start.folder.exists()) {
            durable::create_folder(&self.out.join("starts"))?;
            let options = RetrofitOptions { memory: vec![memory], output_gate: false };
            retrofit_checkpoint(&export, &start.folder, &options)?;
        }
        Ok(true)
    }

    fn next_measurement(&self, run: &PlannedRun, lr: f64) -> Result<Option<Job>> {
        let recipe = run.recipe(lr, self.plan.options.data.as_deref())?;
        let has_attention = recipe.model_config(self.vocab)?.has_attention();
        for measure in &run.measures {
            let jobs = match measure {
                Measure::Loss => vec![self.loss(run, lr)],
                Measure::Needle => {
                    // The embedded corpus states facts as it asks for them.
                    let standard = self.plan.options.data.is_some().then_some(Mode::Standard);
                    let modes = [Mode::Easy].into_iter().chain(standard);
                    modes.map(|mode| self.needle(run, lr, mode)).collect()
                }
                Measure::Inspect if has_attention => vec![self.inspect(run, lr)],
                Measure::Inspect => continue,
            };
            for (file, job) in jobs {
                if !self.asked.contains(&job.label) && !file.exists() {
                    return Ok(Some(job));
                }
            }
        }
        Ok(None)
    }

    /// `NAME=FOLDER` for an evaluation.
    fn named(&self, run: &PlannedRun, lr: f64) -> String {
        let row = &self.plan.experiments[run.experiment].rows[run.row];
        format!("{}={}", row.name, self.folder(run, lr).display())
    }

    fn measurement(&self, what: &str, run: &PlannedRun, lr: f64, arguments: Vec<String>) -> Job {
        let label = format!("{what} of {}", run.folder(lr));
        Job { label, arguments, alone: run.alone, kind: Kind::Measurement }
    }

    /// Text for needles and pictures; the embedded corpus needs none.
    fn text(&self, option: &str) -> Vec<String> {
        let given = self.plan.options.data.is_some();
        let path = held_out::text(&self.out).display().to_string();
        if given { vec![option.to_string(), path] } else { Vec::new() }
    }

    fn loss(&self, run: &PlannedRun, lr: f64) -> (PathBuf, Job) {
        let out = found::evaluation(&self.out, &run.folder(lr));
        let scale = &self.plan.scale;
        let mut arguments = strings(&["eval", "loss", &self.named(run, lr)]);
        arguments.extend(strings(&["--length", &scale.length.to_string()]));
        arguments.extend(strings(&["--documents", &scale.documents.to_string()]));
        if self.plan.options.data.is_some() {
            let path = held_out::prepared(&self.out).display().to_string();
            arguments.extend(["--data".to_string(), path]);
        }
        arguments.extend(strings(&["--out", &out.display().to_string()]));
        (out.join("loss.json"), self.measurement("loss", run, lr, arguments))
    }

    fn needle(&self, run: &PlannedRun, lr: f64, mode: Mode) -> (PathBuf, Job) {
        let word = found::word(mode);
        let out = found::evaluation(&self.out, &run.folder(lr)).join(word);
        let needles = &self.plan.scale.needles;
        let lengths: Vec<String> = needles.lengths.iter().map(usize::to_string).collect();
        let mut arguments = strings(&["eval", "needle", &self.named(run, lr), "--mode", word]);
        arguments.extend(strings(&["--lengths", &lengths.join(",")]));
        arguments.extend(strings(&["--depths", &needles.depths.to_string()]));
        arguments.extend(strings(&["--cases", &needles.cases.to_string()]));
        arguments.extend(self.text("--haystack"));
        arguments.extend(strings(&["--out", &out.display().to_string()]));
        (out.join("needle.json"), self.measurement(&format!("{word} needles"), run, lr, arguments))
    }

    fn inspect(&self, run: &PlannedRun, lr: f64) -> (PathBuf, Job) {
        let out = found::evaluation(&self.out, &run.folder(lr)).join("inspect.html");
        let mut arguments = strings(&["inspect", &self.folder(run, lr).display().to_string()]);
        arguments.extend(strings(&["--length", &self.plan.scale.inspect.to_string()]));
        arguments.extend(self.text("--text"));
        arguments.extend(strings(&["--out", &out.display().to_string()]));
        (out.with_extension("json"), self.measurement("heads", run, lr, arguments))
    }

    fn say(&self, line: &str) {
        if !self.quiet {
            output::note(line);
        }
    }

    /// Checkpoints of a finished run are for going on only, and large.
    fn tidy(&self, run: &PlannedRun, lr: f64) -> Result<()> {
        let checkpoints = self.folder(run, lr).join("checkpoints");
        if checkpoints.exists() {
            durable::remove_folder(&checkpoints)?;
        }
        Ok(())
    }
}

impl Work for Schedule<'_> {
    fn next(&mut self) -> Result<Option<Task>> {
        let job = match self.next_searched()? {
            Some(job) => Some(job),
            None => self.next_run()?,
        };
        let Some(mut job) = job else { return Ok(None) };
        job.arguments.extend(self.device.iter().cloned());
        self.asked.push(job.label.clone());
        self.running.push(job.clone());
        Ok(Some(Task { label: job.label, arguments: job.arguments, alone: job.alone }))
    }

    fn ended(&mut self, label: &str, ended: Ended, seconds: f64) -> Result<()> {
        let Some(at) = self.running.iter().position(|job| job.label == label) else {
            return Ok(());
        };
        let job = self.running.remove(at);
        self.known.remove(label);
        let Kind::Training { run, lr, search } = job.kind else {
            self.measuring_seconds += seconds;
            if let Ended::Diverged(why) | Ended::Failed(why) = ended {
                self.failed.push((job.label, why));
            }
            return Ok(());
        };
        match &ended {
            Ended::Well => {
                let summary = fox_train::Summary::read(&self.folder(&run, lr))?;
                self.training_seconds += summary.as_ref().map_or(0.0, |s| s.seconds);
                self.tidy(&run, lr)?;
                let loss = summary.as_ref().and_then(found::loss);
                let loss = loss.map_or(String::new(), |loss| format!(", held-out loss {loss:.4}"));
                self.say(&format!("{label}: {seconds:.0} s{loss}"));
            }
            Ended::Diverged(why) => {
                durable::write(&self.folder(&run, lr).join(found::DIVERGED), why.as_bytes())?;
                self.say(&format!("{label}: diverged"));
            }
            Ended::Failed(why) => self.failed.push((job.label, why.clone())),
        }
        if let Some((number, index)) = search {
            match (ended, self.known(&run, lr)?) {
                (Ended::Failed(_), _) => self.searches[number].failed = true,
                (_, loss) => {
                    self.searches[number].bracket.record(index, loss.unwrap_or(f64::INFINITY));
                }
            }
        }
        Ok(())
    }
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// The rates that were tried for every model, with their losses; for the report.
pub fn rates(plan: &Plan, out: &Path) -> Result<BTreeMap<String, Bracket>> {
    let mut found = BTreeMap::new();
    for run in &plan.searches {
        let own = fox_train::recipe::load(&run.spec, &[])?.optimizer.peak_lr;
        let mut bracket = Bracket::around(own);
        let mut asked = Vec::new();
        while let Some(index) = bracket.wanted().into_iter().find(|i| !asked.contains(i)) {
            asked.push(index);
            let folder = out.join("runs").join(run.folder(learning_rate_grid(index)));
            let diverged = folder.join(found::DIVERGED).exists();
            let summary = fox_train::Summary::read(&folder)?;
            match summary.as_ref().and_then(found::loss) {
                Some(loss) => bracket.record(index, loss),
                None if diverged => bracket.record(index, f64::INFINITY),
                None => {}
            }
        }
        found.insert(run.rate.clone(), bracket);
    }
    Ok(found)
}
