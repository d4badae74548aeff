//! Printing: aligned tables, numbers for people, and outputs that may close early.
//!
//! `println!` and `eprintln!` panic when the reader has closed the pipe. A training run of days must not end because a
//! pager did, so everything is printed through this module (lints forbid the macros).

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

pub use fox_eval::report::text_table as table;

use crate::events::ChildEvent;

/// Prints text, control characters as escapes. A closed pipe (`fox info ... | head`) counts as success.
pub fn print(text: &str) -> io::Result<()> {
    print_while_read(&visible(text)).map(|_| ())
}

/// Shows control characters as escapes: names and contents of files must not move the cursor or change the terminal.
pub fn visible(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(hidden) {
        return Cow::Borrowed(text);
    }
    let show = |c: char| if hidden(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(show).collect())
}

/// Prints text and flushes; false when the pipe is closed, so that the caller can stop. A terminal gets control
/// characters as escapes: generated text must not change it. A pipe or file gets every byte.
pub fn print_while_read(text: &str) -> io::Result<bool> {
    let mut stdout = io::stdout().lock();
    let text = for_output(text, stdout.is_terminal());
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => {
            Err(io::Error::new(e.kind(), format!("cannot write to the standard output: {e}")))
        }
        Ok(()) => Ok(true),
    }
}

fn for_output(text: &str, is_terminal: bool) -> Cow<'_, str> {
    if is_terminal { visible(text) } else { Cow::Borrowed(text) }
}

/// Calls `act` in a new thread once the reader of the standard output has closed it, so that work whose result could not
/// be printed is not finished.
pub fn on_closed(act: impl FnOnce() + Send + 'static) {
    #[cfg(unix)]
    std::thread::spawn(move || {
        use rustix::event::{PollFd, PollFlags, poll};
        let stdout = io::stdout();
        // ERR and HUP are reported without being requested.
        let mut watched = [PollFd::new(&stdout, PollFlags::empty())];
        while poll(&mut watched, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
        if watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
            act();
        }
    });
    #[cfg(not(unix))]
    drop(act);
}

/// Prints a line to the standard error, or reports it to the parent process. Write errors are ignored.
pub fn note(line: &str) {
    if (ChildEvent::Note { line: line.to_string() }).emit() {
        return;
    }
    // One call, so that lines of several processes do not mix.
    let _ = io::stderr().lock().write_all(format!("{}\n", visible(line)).as_bytes());
}

/// Prints why the program ends, or reports it to the parent process; `diverged` says that training did. Only the first
/// call has an effect.
pub fn fatal(message: &str, diverged: bool) {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    if PRINTED.swap(true, Ordering::SeqCst) {
        return;
    }
    if !(ChildEvent::Error { message: message.to_string(), diverged }).emit() {
        note(&format!("error: {message}"));
    }
}

/// An error with its causes in one sentence. A cause that the message already contains is not repeated.
pub fn error_message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&cause);
        }
    }
    text
}

/// Bytes in binary units with three significant digits, e.g. `1.21 GiB`.
pub fn bytes(count: f64) -> String {
    let (mut value, mut unit) = (count, "B");
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    match value {
        v if unit == "B" => format!("{v:.0} B"),
        v if v < 10.0 => format!("{v:.2} {unit}"),
        v if v < 100.0 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    }
}

/// A duration: `45s`, `12m 05s`, `3h 20m`, `2d 4h`.
pub fn duration(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        3600..86400 => format!("{}h {:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {}h", s / 86400, s / 3600 % 24),
    }
}

/// A count with thousands separators, e.g. `162,508,176`.
pub fn grouped(count: impl Display) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_printed_as_escapes() {
        let hostile = "\u{1b}[31mred\u{7}\n\tü\u{9b}";
        assert_eq!(visible(hostile), "\\u{1b}[31mred\\u{7}\n\tü\\u{9b}");
        assert!(matches!(visible("plain text"), Cow::Borrowed(_)));
        assert_eq!(for_output(hostile, true), visible(hostile));
        assert_eq!(for_output(hostile, false), hostile);
    }

    #[test]
    fn formats_counts_and_bytes() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(162_508_176), "162,508,176");
        assert_eq!(bytes(17.0), "17 B");
        assert_eq!(bytes(1536.0), "1.50 KiB");
        assert_eq!(bytes(650_032_704.0), "620 MiB");
        assert_eq!(bytes(1e18), "888 PiB");
    }

    #[test]
    fn formats_durations() {
        assert_eq!(duration(45.4), "45s");
        assert_eq!(duration(725.0), "12m 05s");
        assert_eq!(duration(12_000.0), "3h 20m");
        assert_eq!(duration(187_200.0), "2d 4h");
    }

    #[test]
    fn error_messages_name_each_cause_once() {
        #[derive(Debug)]
        struct Cannot(io::Error);
        impl Display for Cannot {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "cannot read x: {}", self.0)
            }
        }
        impl std::error::Error for Cannot {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&self.0)
            }
        }
        let cannot = || anyhow::Error::new(Cannot(io::Error::other("gone")));
        assert_eq!(error_message(&cannot()), "cannot read x: gone");
        let middle = cannot().context("cannot read x: gone; name another");
        assert_eq!(error_message(&middle), "cannot read x: gone; name another");
        assert_eq!(
            error_message(&cannot().context("start over")),
            "start over: cannot read x: gone"
        );
    }
}
