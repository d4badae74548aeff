//! Executes a [`RunGraph`] in child processes of this program.
//!
//! A child's standard input is a pipe that its parent holds open. When the pipe closes, because the parent asks the child
//! to stop or has died, the child stops as if it had received SIGTERM; see [`signals::child_process`].

use std::io::{BufRead, BufReader, IsTerminal, stderr};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::events::{self, ChildEvent};
use crate::graph::{Experiment, NodeId, RunGraph, RunOutcome};
use crate::progress::LINE_EVERY;
use crate::{output, signals};

/// Interval at which the stop flag is polled.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// How many processes run at a time, and how progress is shown.
pub struct Scheduler {
    /// Processes at a time.
    pub jobs: usize,
    /// Arguments that choose the device, added to every command.
    pub device: Vec<String>,
    /// Show failures only.
    pub quiet: bool,
    /// Set when everything is to stop.
    pub stop: Arc<AtomicBool>,
}

/// What a scheduler reports while it runs, besides its own progress lines.
pub type EventHandler<'a> = &'a mut dyn FnMut(NodeId, &ChildEvent);

/// A child process.
struct Running {
    node: NodeId,
    label: String,
    exclusive: bool,
    child: Child,
    /// Closed to make the child stop.
    input: Option<ChildStdin>,
    start: Instant,
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
    /// The last error event: message, and whether training diverged.
    error: Option<(String, bool)>,
    /// The last line of a note, such as the message of a panic.
    last_note: String,
}

/// A message of the thread that reads a child's standard error.
enum Message {
    Event(NodeId, ChildEvent),
    End(NodeId),
}

impl Scheduler {
    /// Executes the graph of an experiment; false when it was stopped before the end. No child outlives the call.
    pub fn run(&self, graph: &mut RunGraph, experiment: &mut dyn Experiment) -> Result<bool> {
        self.run_with(graph, experiment, None)
    }

    /// The same; `on_event` gets the events of all children, and the scheduler itself shows no progress.
    pub(crate) fn run_with(
        &self,
        graph: &mut RunGraph,
        experiment: &mut dyn Experiment,
        on_event: Option<EventHandler<'_>>,
    ) -> Result<bool> {
        let (sender, messages) = mpsc::channel();
        let shows = !self.quiet && on_event.is_none() && stderr().is_terminal();
        let bars = shows.then(MultiProgress::new);
        let mut execution =
            Execution { scheduler: self, running: Vec::new(), next: None, bars, sender, on_event };
        let result = execution.run_all(graph, experiment, &messages);
        // After an error as after the end: close the pipes, then wait.
        execution.ask_to_stop();
        for running in &mut execution.running {
            let _ = running.child.wait();
        }
        result.map(|()| !self.stopped())
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// One call of [`Scheduler::run_with`].
struct Execution<'a, 'e> {
    scheduler: &'a Scheduler,
    running: Vec<Running>,
    /// An exclusive node that waits until nothing else runs.
    next: Option<NodeId>,
    bars: Option<MultiProgress>,
    sender: Sender<Message>,
    on_event: Option<EventHandler<'e>>,
}

impl Execution<'_, '_> {
    fn run_all(
        &mut self,
        graph: &mut RunGraph,
        experiment: &mut dyn Experiment,
        messages: &Receiver<Message>,
    ) -> Result<()> {
        experiment.update(graph, None)?;
        loop {
            match self.scheduler.stopped() {
                true => self.ask_to_stop(),
                false => self.start_ready(graph)?,
            }
            if self.running.is_empty() {
                return Ok(());
            }
            match messages.recv_timeout(POLL_EVERY) {
                Ok(Message::Event(node, event)) => self.on_child_event(node, event),
                Ok(Message::End(node)) => self.on_end(node, graph, experiment)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Starts as many nodes as there are free jobs.
    fn start_ready(&mut self, graph: &mut RunGraph) -> Result<()> {
        while self.running.len() < self.scheduler.jobs && !self.running.iter().any(|r| r.exclusive)
        {
            let Some(node) = self.next.take().or_else(|| graph.start_next()) else { return Ok(()) };
            if graph.node(node).exclusive && !self.running.is_empty() {
                self.next = Some(node);
                return Ok(());
            }
            self.start(node, graph)?;
        }
        Ok(())
    }

    fn start(&mut self, id: NodeId, graph: &RunGraph) -> Result<()> {
        let node = graph.node(id);
        let device = node.uses_device().then_some(&self.scheduler.device);
        let mut child = signals::child_process()?
            .args(node.arguments())
            .args(device.into_iter().flatten())
            .env(events::ENABLE, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", node.label))?;
        if let Some(errors) = child.stderr.take() {
            let sender = self.sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(errors).split(b'\n').map_while(std::io::Result::ok) {
                    let event = ChildEvent::parse(String::from_utf8_lossy(&line).trim_end());
                    let _ = sender.send(Message::Event(id, event));
                }
                let _ = sender.send(Message::End(id));
            });
        }
        let bar = self.bars.as_ref().map(|bars| {
            let style = ProgressStyle::with_template("{prefix}  {msg}");
            let bar = ProgressBar::new_spinner()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
                .with_prefix(node.label.clone());
            bars.add(bar)
        });
        let input = child.stdin.take();
        self.running.push(Running {
            node: id,
            label: node.label.clone(),
            exclusive: node.exclusive,
            child,
            input,
            start: Instant::now(),
            bar,
            last_line: None,
            error: None,
            last_note: String::new(),
        });
        Ok(())
    }

    fn on_child_event(&mut self, node: NodeId, event: ChildEvent) {
        let Some(running) = self.running.iter_mut().find(|r| r.node == node) else { return };
        if let ChildEvent::Error { message, diverged } = event {
            running.error = Some((message, diverged));
            return;
        }
        if let ChildEvent::Note { line } = &event
            && !line.is_empty()
        {
            running.last_note.clone_from(line);
        }
        if let Some(on_event) = &mut self.on_event {
            on_event(node, &event);
            return;
        }
        match (event, &running.bar) {
            (ChildEvent::Step { line, .. } | ChildEvent::Note { line }, Some(bar)) => {
                bar.set_message(line);
            }
            (ChildEvent::Step { line, .. }, None)
                if !self.scheduler.quiet
                    && running.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY) =>
            {
                running.last_line = Some(Instant::now());
                output::note(&format!("{}  {line}", running.label));
            }
            _ => {}
        }
    }

    fn on_end(
        &mut self,
        node: NodeId,
        graph: &mut RunGraph,
        experiment: &mut dyn Experiment,
    ) -> Result<()> {
        let Some(at) = self.running.iter().position(|r| r.node == node) else { return Ok(()) };
        let mut running = self.running.remove(at);
        let status = running.child.wait().context("cannot wait for a process")?;
        if let Some(bar) = &running.bar {
            bar.finish_and_clear();
        }
        let seconds = running.start.elapsed().as_secs_f64();
        let outcome = if status.success() {
            RunOutcome::Finished
        } else {
            // A signal may reach the child before this process: a failure together with a stop is an interruption.
            thread::sleep(POLL_EVERY);
            if self.scheduler.stopped() {
                graph.interrupt(node);
                return Ok(());
            }
            match running.error.take() {
                Some((message, true)) => RunOutcome::Diverged(message),
                Some((message, false)) => RunOutcome::Failed(message),
                None => RunOutcome::Failed(format!(
                    "its process ended with {status}; its last line: {}",
                    running.last_note
                )),
            }
        };
        if let RunOutcome::Failed(why) = &outcome {
            self.print(&format!("{} failed: {why}", running.label));
        }
        graph.end(node, outcome)?;
        experiment.update(graph, Some((node, seconds)))
    }

    fn print(&self, line: &str) {
        match &self.bars {
            Some(bars) => _ = bars.println(line),
            None => output::note(line),
        }
    }

    fn ask_to_stop(&mut self) {
        self.running.iter_mut().for_each(|running| drop(running.input.take()));
    }
}
