//! Commands of this program that run side by side, each as a process of its own.
//!
//! A child is told by its standard input that its parent is there: when the pipe closes, because the parent asks the
//! child to stop or is gone, however it went, the child stops as if it had been sent a signal.

use std::io::{BufRead, BufReader, IsTerminal, stderr};
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fox_train::sweep::Ended;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::{output, signals};

/// The exit code of a training whose gradients stayed non-finite.
pub const DIVERGED: u8 = 3;
/// How often the wish to stop is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A command of this program.
pub struct Task {
    /// What progress and messages call it.
    pub label: String,
    /// Its arguments, the command's name first.
    pub arguments: Vec<String>,
    /// Whether nothing else may run meanwhile, because its speed is measured.
    pub alone: bool,
}

/// What decides which task comes next.
pub trait Work {
    /// The next task; `None` while there is none, until one of the running ones has ended.
    fn next(&mut self) -> Result<Option<Task>>;

    /// A task has ended, after so many seconds. Not called for tasks that were stopped.
    fn ended(&mut self, label: &str, ended: Ended, seconds: f64) -> Result<()>;
}

/// How many run at once, and how it is shown.
pub struct Pool {
    /// Tasks at once.
    pub jobs: usize,
    /// Show nothing but failures.
    pub quiet: bool,
    /// Set when everything is to stop.
    pub stop: Arc<AtomicBool>,
}

/// A child that is running.
struct Running {
    number: u64,
    label: String,
    alone: bool,
    child: Child,
    /// Closed to make it stop.
    input: Option<ChildStdin>,
    begin: Instant,
    bar: Option<ProgressBar>,
    /// Its last words that began with `error:`.
    error: Option<String>,
}

/// What a child says.
enum Word {
    Line(u64, String),
    End(u64),
}

impl Pool {
    /// Runs everything; false when it was stopped before the end. Children are never left behind.
    pub fn run(&self, work: &mut dyn Work) -> Result<bool> {
        let (sender, words) = mpsc::channel();
        let mut round = Round {
            pool: self,
            running: Vec::new(),
            held: None,
            waiting: false,
            started: 0,
            bars: (!self.quiet && stderr().is_terminal()).then(MultiProgress::new),
            sender,
        };
        let result = round.all(work, &words);
        // After an error as after the end: close the pipes, then wait.
        round.ask_to_stop();
        for running in &mut round.running {
            let _ = running.child.wait();
        }
        result.map(|()| !self.stop.load(Ordering::Relaxed))
    }
}

/// One call of [`Pool::run`].
struct Round<'a> {
    pool: &'a Pool,
    running: Vec<Running>,
    /// A task that waits to be alone.
    held: Option<Task>,
    /// Whether there is no next task until one has ended.
    waiting: bool,
    started: u64,
    bars: Option<MultiProgress>,
    sender: Sender<Word>,
}

impl Round<'_> {
    fn all(&mut self, work: &mut dyn Work, words: &Receiver<Word>) -> Result<()> {
        loop {
            let stopping = self.pool.stop.load(Ordering::Relaxed);
            if stopping {
                self.ask_to_stop();
            } else {
                self.fill(work)?;
            }
            if self.running.is_empty() {
                return Ok(());
            }
            match words.recv_timeout(LOOK_EVERY) {
                Ok(Word::Line(number, line)) => self.hear(number, line),
                Ok(Word::End(number)) => self.end(number, work)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Starts as many tasks as there is room for.
    fn fill(&mut self, work: &mut dyn Work) -> Result<()> {
        while self.running.len() < self.pool.jobs && !self.running.iter().any(|r| r.alone) {
            let task = match self.held.take() {
                Some(task) => Some(task),
                None if self.waiting => None,
                None => work.next()?,
            };
            let Some(task) = task else {
                self.waiting = true;
                return Ok(());
            };
            if task.alone && !self.running.is_empty() {
                self.held = Some(task);
                return Ok(());
            }
            self.start(task)?;
        }
        Ok(())
    }

    fn start(&mut self, task: Task) -> Result<()> {
        let mut child = signals::follower()?
            .args(&task.arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", task.label))?;
        let number = self.started;
        self.started += 1;
        if let Some(errors) = child.stderr.take() {
            let sender = self.sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(errors).split(b'\n').map_while(std::io::Result::ok) {
                    let line = String::from_utf8_lossy(&line).trim_end().to_string();
                    let _ = sender.send(Word::Line(number, line));
                }
                let _ = sender.send(Word::End(number));
            });
        }
        let bar = self.bars.as_ref().map(|bars| {
            let style = ProgressStyle::with_template("{prefix}  {msg}");
            let bar = ProgressBar::new_spinner()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
                .with_prefix(task.label.clone());
            bars.add(bar)
        });
        let input = child.stdin.take();
        let (label, alone, begin) = (task.label, task.alone, Instant::now());
        self.running.push(Running { number, label, alone, child, input, begin, bar, error: None });
        Ok(())
    }

    fn hear(&mut self, number: u64, line: String) {
        let Some(running) = self.running.iter_mut().find(|r| r.number == number) else { return };
        if let Some(error) = line.strip_prefix("error: ") {
            running.error = Some(error.to_string());
        } else if let Some(bar) = &running.bar {
            bar.set_message(line);
        } else if !self.pool.quiet && line.starts_with("step") {
            output::note(&format!("{}  {line}", running.label));
        }
    }

    fn end(&mut self, number: u64, work: &mut dyn Work) -> Result<()> {
        let Some(at) = self.running.iter().position(|r| r.number == number) else { return Ok(()) };
        let mut running = self.running.remove(at);
        self.waiting = false;
        let status = running.child.wait().context("cannot wait for a process")?;
        if let Some(bar) = &running.bar {
            bar.finish_and_clear();
        }
        let seconds = running.begin.elapsed().as_secs_f64();
        if status.success() {
            return work.ended(&running.label, Ended::Well, seconds);
        }
        // Whatever ends badly with the wish to stop was stopped. A signal may reach the child before this process.
        thread::sleep(LOOK_EVERY);
        if self.pool.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        let why = running.error.take().unwrap_or_else(|| how(status));
        let ended = match status.code() {
            Some(code) if code == i32::from(DIVERGED) => Ended::Diverged(why),
            _ => {
                self.say(&format!("{} failed: {why}", running.label));
                Ended::Failed(why)
            }
        };
        work.ended(&running.label, ended, seconds)
    }

    fn say(&self, line: &str) {
        match &self.bars {
            Some(bars) => _ = bars.println(line),
            None => output::note(line),
        }
    }

    fn ask_to_stop(&mut self) {
        self.running.iter_mut().for_each(|running| drop(running.input.take()));
    }
}

fn how(status: ExitStatus) -> String {
    format!("its process ended without a word ({status})")
}
