//! How far a command is: a bar on a terminal, now and then a line elsewhere.

use std::cell::Cell;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Time between lines where there is no terminal.
pub const LINE_EVERY: Duration = Duration::from_secs(10);

/// The progress of one piece of work, on the standard error. Short work shows no line.
pub struct Bar {
    bar: ProgressBar,
    /// What is being done.
    name: String,
    /// When the last line was written, where there is no terminal.
    last_line: Option<Cell<Instant>>,
}

impl Bar {
    /// For `total` things of one kind.
    pub fn new(name: &str, total: u64) -> Bar {
        Bar::with_template(name, total, "{bar:24} {pos}/{len}  {msg}  ETA {eta}")
    }

    /// For bytes whose number is told later.
    pub fn of_bytes(name: &str) -> Bar {
        Bar::with_template(name, 0, "{bar:24} {bytes}/{total_bytes}  {msg}  ETA {eta}")
    }

    fn with_template(name: &str, total: u64, template: &str) -> Bar {
        let bar = ProgressBar::new(total);
        let terminal = stderr().is_terminal();
        if terminal {
            let style = ProgressStyle::with_template(template);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        } else {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        bar.set_message(name.to_string());
        let last_line = (!terminal).then(|| Cell::new(Instant::now()));
        Bar { bar, name: name.to_string(), last_line }
    }

    /// So much is done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
        let Some(last) = &self.last_line else { return };
        if last.get().elapsed() >= LINE_EVERY {
            last.set(Instant::now());
            output::note(&self.line());
        }
    }

    /// So many of `total` bytes are done; `found` says what they came to.
    pub fn set_bytes(&self, done: u64, total: u64, found: impl FnOnce() -> String) {
        self.bar.set_length(total);
        self.bar.set_message(found());
        self.set(done);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn line(&self) -> String {
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let share = 100.0 * done as f64 / all.max(1) as f64;
        let message = self.bar.message();
        let found = if message == self.name { String::new() } else { format!("  {message}") };
        let left = output::duration(self.bar.eta().as_secs_f64());
        format!("{}: {share:.0}%{found}  ETA {left}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_and_how_far() {
        let bar = Bar::new("tiny loss", 8);
        bar.set(2);
        assert!(bar.line().starts_with("tiny loss: 25%  ETA "), "{}", bar.line());
        let bar = Bar::of_bytes("preparing");
        bar.set_bytes(30, 40, || "7 documents".into());
        assert!(bar.line().starts_with("preparing: 75%  7 documents  ETA "), "{}", bar.line());
        // Work that has not begun.
        assert!(Bar::new("nothing", 0).line().starts_with("nothing: 0%  ETA "));
    }
}
