//! Progress on the standard error: a bar on a terminal, a line every few seconds elsewhere.

use std::cell::Cell;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Time between lines when the standard error is not a terminal.
pub const LINE_EVERY: Duration = Duration::from_secs(10);

/// A progress bar. Work that ends before the first line is due prints nothing.
pub struct Bar {
    bar: ProgressBar,
    /// Title of the work.
    name: String,
    /// When the last line was printed; `None` on a terminal.
    last_line: Option<Cell<Instant>>,
}

impl Bar {
    /// Counts up to `total`.
    pub fn new(name: &str, total: u64) -> Bar {
        Bar::with_template(name, total, "{bar:24} {pos}/{len}  {msg}  ETA {eta}")
    }

    /// Counts bytes; the total is set later.
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

    /// Sets the position.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
        let Some(last) = &self.last_line else { return };
        if last.get().elapsed() >= LINE_EVERY {
            last.set(Instant::now());
            output::note(&self.line());
        }
    }

    /// Sets the position in bytes, the total, and a message.
    pub fn set_bytes(&self, done: u64, total: u64, message: impl FnOnce() -> String) {
        self.bar.set_length(total);
        self.bar.set_message(message());
        self.set(done);
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn line(&self) -> String {
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let percent = 100.0 * done as f64 / all.max(1) as f64;
        let message = self.bar.message();
        let message = if message == self.name { String::new() } else { format!("  {message}") };
        let eta = output::duration(self.bar.eta().as_secs_f64());
        format!("{}: {percent:.0}%{message}  ETA {eta}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_title_percentage_and_eta() {
        let bar = Bar::new("tiny loss", 8);
        bar.set(2);
        assert!(bar.line().starts_with("tiny loss: 25%  ETA "), "{}", bar.line());
        let bar = Bar::of_bytes("preparing");
        bar.set_bytes(30, 40, || "7 documents".into());
        assert!(bar.line().starts_with("preparing: 75%  7 documents  ETA "), "{}", bar.line());
        assert!(Bar::new("nothing", 0).line().starts_with("nothing: 0%  ETA "));
    }
}
