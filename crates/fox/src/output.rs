//! Printing: aligned tables, sizes for people, and outputs that may close early.
//!
//! `println!` and `eprintln!` panic when nobody reads any more. A run of days must not end because the program that showed
//! its progress did, so nothing is printed but through this file (a lint in `main.rs` forbids the macros).

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Prints text. A reader that has seen enough (`fox info ... | head`) is no error.
pub fn print(text: &str) -> io::Result<()> {
    print_while_read(text).map(|_| ())
}

/// Prints text at once; false when nobody reads any more, so that there is no use in going on.
pub fn print_while_read(text: &str) -> io::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => {
            Err(io::Error::new(e.kind(), format!("cannot write to the standard output: {e}")))
        }
        Ok(()) => Ok(true),
    }
}

/// Calls `act` once nobody reads the standard output any more, in a thread of its own; so that work whose result is
/// printed at its end need not be finished.
pub fn on_closed(act: impl FnOnce() + Send + 'static) {
    #[cfg(unix)]
    std::thread::spawn(move || {
        use rustix::event::{PollFd, PollFlags, poll};
        let stdout = io::stdout();
        // Nothing is asked for but what is always told: that the other side is gone.
        let mut watched = [PollFd::new(&stdout, PollFlags::empty())];
        while poll(&mut watched, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
        if watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
            act();
        }
    });
    #[cfg(not(unix))]
    drop(act);
}

/// Prints a line for people to the standard error. Whether it can be written does not matter to what is being done.
pub fn note(line: &str) {
    let line = visible(line);
    // One call, so that lines of several processes do not mix.
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
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

/// Prints why the program ends. Of several threads that say so, only the first one is heard.
pub fn last_words(line: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::SeqCst) {
        note(line);
    }
}

/// An error with its causes in one sentence. Messages that already say their cause do not repeat it.
pub fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&cause);
        }
    }
    text
}

/// Rows of cells under each other; the first column to the left, the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |c: usize| rows.iter().filter_map(|row| row.get(c)).map(|s| s.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().map(|cell| visible(cell)).enumerate().map(|(c, cell)| match c {
            0 => format!("{cell:<width$}", width = widths[c]),
            _ => format!("{cell:>width$}", width = widths[c]),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Bytes in binary units with three digits, e.g. `1.21 GiB`.
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

/// A time for people: `45s`, `12m 05s`, `3h 20m`, `2d 4h`.
pub fn duration(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        3600..86400 => format!("{}h {:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {}h", s / 86400, s / 3600 % 24),
    }
}

/// A whole number with commas, e.g. `162,508,176`.
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
    fn numbers_are_readable() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(162_508_176), "162,508,176");
        assert_eq!(bytes(17.0), "17 B");
        assert_eq!(bytes(1536.0), "1.50 KiB");
        assert_eq!(bytes(650_032_704.0), "620 MiB");
        assert_eq!(bytes(1e18), "888 PiB");
    }

    #[test]
    fn control_characters_are_shown_as_escapes() {
        assert_eq!(visible("\u{1b}[31mred\u{7}\n\tü\u{9b}"), "\\u{1b}[31mred\\u{7}\n\tü\\u{9b}");
        let rows = [vec!["\u{1b}]0;x".to_string(), "1".to_string()]];
        assert_eq!(table(&rows), "\\u{1b}]0;x  1\n");
        assert!(matches!(visible("plain text"), Cow::Borrowed(_)));
    }

    #[test]
    fn durations_are_short() {
        assert_eq!(duration(45.4), "45s");
        assert_eq!(duration(725.0), "12m 05s");
        assert_eq!(duration(12_000.0), "3h 20m");
        assert_eq!(duration(187_200.0), "2d 4h");
    }

    #[test]
    fn a_cause_is_said_once() {
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
        assert_eq!(sentence(&cannot()), "cannot read x: gone");
        let middle = cannot().context("cannot read x: gone; name another");
        assert_eq!(sentence(&middle), "cannot read x: gone; name another");
        assert_eq!(sentence(&cannot().context("start over")), "start over: cannot read x: gone");
    }

    #[test]
    fn tables_are_aligned() {
        let row = |cells: [&str; 2]| cells.map(String::from).to_vec();
        assert_eq!(table(&[row(["a", "1"]), row(["bcd", "22"])]), "a     1\nbcd  22\n");
    }
}
