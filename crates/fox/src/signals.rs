//! Interrupt, termination and hang-up: the first asks to stop in good order, the second ends the program at once.
//!
//! What was ignored when the program started stays ignored, as is the custom: `nohup fox train ... &` goes on when its
//! terminal has gone, and what a script runs in the background does not end with an interrupt that is not for it.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::output;

/// The environment variable of a process that ends with its standard input; see [`follow_input`].
const FOLLOW_INPUT: &str = "FOX_FOLLOW_INPUT";
/// The exit code of a program that was interrupted.
pub const INTERRUPTED: i32 = 130;
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[cfg(unix)]
const SIGNALS: &[i32] = &[SIGINT, SIGTERM, signal_hook::consts::SIGHUP];
#[cfg(not(unix))]
const SIGNALS: &[i32] = &[SIGINT, SIGTERM];

/// A flag that the first signal sets. `act` is called soon after, in a thread of its own.
pub fn on_stop(act: impl FnOnce() + Send + 'static) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let ignored = ignored_signals();
    for &signal in SIGNALS.iter().filter(|&signal| !has(ignored, *signal)) {
        // In this order: the first signal finds the flag unset.
        flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .context("cannot listen for signals")?;
    }
    let asked = Arc::clone(&stop);
    thread::spawn(move || {
        while !asked.load(Ordering::Relaxed) {
            thread::sleep(LOOK_EVERY);
        }
        act();
    });
    Ok(stop)
}

/// This program once more, as a process that stops when its standard input is closed. Signals of the terminal do not
/// reach it: one that came with the end of the input would count as the second.
pub fn follower() -> Result<Command> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.env(FOLLOW_INPUT, "1").stdin(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Ok(command)
}

/// Ends the program with `words` at the first signal: for work that keeps what is finished as it goes.
pub fn end_with(words: &'static str) -> Result<()> {
    on_stop(move || {
        output::note(&format!("\n{words}"));
        signal_hook::low_level::exit(INTERRUPTED);
    })?;
    Ok(())
}

/// Where [`FOLLOW_INPUT`] is set, the end of the standard input counts as a signal to terminate: the process that
/// holds the other end is gone, or wants this one to stop.
pub fn follow_input() {
    if std::env::var_os(FOLLOW_INPUT).is_none() {
        return;
    }
    thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = signal_hook::low_level::raise(SIGTERM);
    });
}

/// The signals that are ignored, as a set of bits; none where the system does not say.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status)
}

fn ignored_in(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

fn has(set: u64, signal: i32) -> bool {
    (1..=64).contains(&signal) && set >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_of_ignored_signals_is_read() {
        let set = ignored_in("Name:\tfox\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n");
        let ignored: Vec<i32> = (0..70).filter(|&signal| has(set, signal)).collect();
        assert_eq!(ignored, [1, 13]);
        assert_eq!(ignored_in(""), 0);
        assert_eq!(ignored_in("SigIgn:\tnonsense"), 0);
    }
}
