//! SIGINT, SIGTERM and SIGHUP: the first signal requests a graceful stop, the second exits immediately.
//!
//! Signals that were ignored when the program started stay ignored: `nohup fox train ... &` survives its terminal, and
//! a background process of a script is not interrupted by Ctrl-C.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::output;

/// The environment variable of a process that stops when its standard input closes; see [`stop_with_stdin`].
const FOLLOW_INPUT: &str = "FOX_FOLLOW_INPUT";
/// The exit code of an interrupted program.
pub const INTERRUPTED: i32 = 130;
const POLL_EVERY: Duration = Duration::from_millis(20);

#[cfg(unix)]
const SIGNALS: &[i32] = &[SIGINT, SIGTERM, signal_hook::consts::SIGHUP];
#[cfg(not(unix))]
const SIGNALS: &[i32] = &[SIGINT, SIGTERM];

/// Returns a flag that the first signal sets; `act` is then called in another thread.
pub fn on_stop(act: impl FnOnce() + Send + 'static) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let ignored = ignored_signals();
    for &signal in SIGNALS.iter().filter(|&signal| !has(ignored, *signal)) {
        // The exit handler comes first, so that the first signal finds the flag unset.
        flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .context("cannot listen for signals")?;
    }
    let asked = Arc::clone(&stop);
    thread::spawn(move || {
        while !asked.load(Ordering::Relaxed) {
            thread::sleep(POLL_EVERY);
        }
        act();
    });
    Ok(stop)
}

/// Calls `act` in another thread for every SIGINT (Ctrl-C), which then does not end the program.
pub fn on_interrupt(act: impl Fn() + Send + 'static) -> Result<()> {
    if has(ignored_signals(), SIGINT) {
        return Ok(());
    }
    let asked = Arc::new(AtomicBool::new(false));
    flag::register(SIGINT, Arc::clone(&asked)).context("cannot listen for signals")?;
    thread::spawn(move || {
        loop {
            thread::sleep(POLL_EVERY);
            if asked.swap(false, Ordering::Relaxed) {
                act();
            }
        }
    });
    Ok(())
}

/// Ends the program as an interrupt does, without running destructors.
pub fn exit_interrupted() -> ! {
    signal_hook::low_level::exit(INTERRUPTED)
}

/// A command that starts this program as a child which stops when its standard input closes. The child is in its own
/// process group: a signal of the terminal that arrives together with the closed input would count as the second.
pub fn child_process() -> Result<Command> {
    let program = std::env::current_exe().context("cannot find the executable of this program")?;
    let mut command = Command::new(program);
    command.env(FOLLOW_INPUT, "1").stdin(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Ok(command)
}

/// Prints `message` and exits at the first signal: for commands that save their results as they are computed.
pub fn exit_on_signal(message: &'static str) -> Result<()> {
    on_stop(move || {
        output::note(&format!("\n{message}"));
        exit_interrupted();
    })?;
    Ok(())
}

/// In a process started by [`child_process`], treats the end of the standard input as SIGTERM: the parent has died, or
/// asks this process to stop.
pub fn stop_with_stdin() {
    if std::env::var_os(FOLLOW_INPUT).is_none() {
        return;
    }
    thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = signal_hook::low_level::raise(SIGTERM);
    });
}

/// Ignored signals as a bit set; empty on systems without `/proc`.
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
    fn parses_the_set_of_ignored_signals() {
        let set = ignored_in("Name:\tfox\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n");
        let ignored: Vec<i32> = (0..70).filter(|&signal| has(set, signal)).collect();
        assert_eq!(ignored, [1, 13]);
        assert_eq!(ignored_in(""), 0);
        assert_eq!(ignored_in("SigIgn:\tnonsense"), 0);
    }
}
