//! Events that a child process reports to its parent: one JSON object per line on the standard error.
//!
//! A process that was started with `ENABLE` set writes [`ChildEvent`]s wherever it would write lines for people.

use std::io::Write;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// The environment variable that turns events on.
pub(crate) const ENABLE: &str = "FOX_CHILD_EVENTS";

/// One event of a child process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ChildEvent {
    /// A training run starts or resumes.
    Started {
        /// Tokens seen before an interruption; 0 for a new run.
        tokens: u64,
    },
    /// A training step is done.
    Step {
        /// Tokens seen so far.
        tokens: u64,
        /// Step, loss, learning rate and throughput, for a progress line.
        line: String,
    },
    /// A line for people.
    Note {
        /// The line.
        line: String,
    },
    /// The command fails.
    Error {
        /// One sentence.
        message: String,
        /// Whether it is a training run whose weights or gradients stayed non-finite.
        diverged: bool,
    },
}

impl ChildEvent {
    /// Parses a line of a child's standard error. Anything else, such as a panic message, becomes a note.
    pub fn parse(line: &str) -> ChildEvent {
        serde_json::from_str(line).unwrap_or_else(|_| ChildEvent::Note { line: line.to_string() })
    }

    /// Writes the event if the parent asked for events; returns whether it did.
    pub fn emit(&self) -> bool {
        if enabled()
            && let Ok(json) = serde_json::to_string(self)
        {
            // One write, so that lines of several threads do not mix. A parent that is gone is noticed elsewhere.
            let _ = std::io::stderr().lock().write_all(format!("{json}\n").as_bytes());
        }
        enabled()
    }
}

/// Whether the parent process asked for events.
pub fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| std::env::var_os(ENABLE).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_round_trip_through_json() {
        for event in [
            ChildEvent::Started { tokens: 7 },
            ChildEvent::Step { tokens: 4096, line: "step 2/4  loss 1.5".into() },
            ChildEvent::Error { message: "a \"quoted\"\nline".into(), diverged: true },
        ] {
            let line = serde_json::to_string(&event).unwrap();
            assert_eq!(line.lines().count(), 1);
            assert_eq!(ChildEvent::parse(&line), event);
        }
        for line in ["thread 'main' panicked", "{\"event\":\"unknown\"}", "3", ""] {
            assert_eq!(ChildEvent::parse(line), ChildEvent::Note { line: line.into() });
        }
    }
}
