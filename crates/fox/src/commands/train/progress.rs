//! What a run shows while it trains: a bar on a terminal, now and then a line elsewhere.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use fox_lab::events::{self, ChildEvent};
use fox_train::Event;
use fox_train::metrics::StepRecord;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output;
use crate::progress::LINE_EVERY;

/// Steps before the time of a run is estimated; the first one also fills memory pools and compiles kernels.
const TIMED_STEPS: u64 = 3;
/// Time between the events of a child process.
const EVENT_EVERY: Duration = Duration::from_secs(1);

/// The progress of one run, on the standard error.
pub struct Progress {
    quiet: bool,
    bar: Option<ProgressBar>,
    steps: u64,
    tokens_per_step: u64,
    /// The step after which the time of the run is estimated.
    timed_step: u64,
    last_line: Option<Instant>,
}

impl Progress {
    /// Shows nothing but notices when `quiet`.
    pub fn new(quiet: bool) -> Progress {
        let bar = (!quiet && stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}");
            ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Progress { quiet, bar, steps: 0, tokens_per_step: 0, timed_step: 0, last_line: None }
    }

    /// Takes note of an event.
    pub fn show(&mut self, event: &Event<'_>) {
        match event {
            Event::Started(start) => {
                (self.steps, self.tokens_per_step) = (start.steps, start.tokens_per_step);
                if let Some(bar) = &self.bar {
                    bar.set_length(start.steps);
                    bar.set_position(start.from_step);
                }
                ChildEvent::Started { tokens: start.from_step * start.tokens_per_step }.emit();
                let resumed = match start.from_step {
                    0 => String::new(),
                    step => format!(", resumed from step {step}"),
                };
                let others = start.link.map_or_else(String::new, |link| {
                    format!(", {} processes that send {:.2} GB/s each", start.processes, link / 1e9)
                });
                self.line(&format!(
                    "{}: {:.2}M parameters, {} steps of {} tokens on {} ({:.0} GFLOP/s in a matrix product){others}{resumed}",
                    start.recipe,
                    start.parameters as f64 / 1e6,
                    start.steps,
                    start.tokens_per_step,
                    start.device,
                    start.gemm_rate / 1e9,
                ));
                if let Some(epoch) = start.epoch_tokens {
                    self.budget(start.steps * start.tokens_per_step, epoch);
                }
                self.timed_step = start.from_step + TIMED_STEPS;
            }
            Event::Notice(text) => self.always(text),
            Event::Step(step) => self.step(step),
            Event::Evaluated(eval) => self.line(&format!(
                "step {:>6}  held-out loss {:.4}  ({:.1} s)",
                eval.step, eval.evaluation.loss, eval.eval_seconds
            )),
            Event::Exported(path) => self.line(&format!("exported to {}", path.display())),
            _ => {}
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// The tokens of the run and how often they are read.
    fn budget(&self, tokens: u64, epoch: u64) {
        let epochs = tokens as f64 / epoch.max(1) as f64;
        let (all, once) = (output::grouped(tokens), output::grouped(epoch));
        self.line(&format!("tokens: {all} (the data have {once})"));
        self.line(&match epochs < 0.95 {
            true => format!(
                "epochs: {epochs:.2}, so {:.0}% of the data is read; --epochs 1 reads all of it",
                100.0 * epochs
            ),
            false => format!("epochs: {epochs:.1}, all of the data is read"),
        });
    }

    fn step(&mut self, step: &StepRecord) {
        if step.step == self.timed_step && !events::enabled() {
            let left = self.steps.saturating_sub(step.step) * self.tokens_per_step;
            let seconds = left as f64 / step.tokens_per_second.max(1e-9);
            let speed = output::grouped(step.tokens_per_second.round() as u64);
            self.line(&format!("time: about {} at {speed} tokens/s", output::duration(seconds)));
        }
        let every = if events::enabled() { EVENT_EVERY } else { LINE_EVERY };
        let last_event = events::enabled() && step.step == self.steps;
        let due = last_event || self.last_line.is_none_or(|at| at.elapsed() >= every);
        if self.bar.is_none() && (self.quiet || !due) {
            return;
        }
        let text = self.step_text(step);
        match &self.bar {
            Some(bar) => {
                bar.set_position(step.step);
                bar.set_message(text);
            }
            None => {
                self.last_line = Some(Instant::now());
                let line = format!("step {:>6}/{}  {text}", step.step, self.steps);
                if !(ChildEvent::Step { tokens: step.tokens, line: line.clone() }).emit() {
                    output::note(&line);
                }
            }
        }
    }

    fn step_text(&self, step: &StepRecord) -> String {
        let left = (self.steps - step.step.min(self.steps)) * self.tokens_per_step;
        let eta = left as f64 / step.tokens_per_second.max(1e-9);
        let loss = step.loss.map_or("not finite".into(), |x| format!("{x:.4}"));
        format!(
            "loss {loss}  lr {:.2e}  {:.0} tokens/s  {:.0}% of peak  ETA {}",
            step.lr,
            step.tokens_per_second,
            100.0 * step.floor_fraction,
            output::duration(eta),
        )
    }

    fn line(&self, text: &str) {
        if !self.quiet {
            self.always(text);
        }
    }

    fn always(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => output::note(text),
        }
    }
}
