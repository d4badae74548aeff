//! Work as one of several processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use fox_dist::{Group, Invariant, Placement, Rendezvous, Secret};

use crate::output;

/// How long a process may take to end by itself when another one is lost.
const GRACE: Duration = Duration::from_millis(1500);
/// Names of the variable that sets the timeout of the rendezvous in seconds: the current one and the former one.
const LIMIT_VARIABLES: [&str; 2] = ["FOX_RENDEZVOUS_SECONDS", "FOX_MEETING_SECONDS"];
/// Timeout of the rendezvous in seconds by default, and the longest that can be set: a week.
const LIMIT: u64 = 120;
const LONGEST_LIMIT: u64 = 7 * 24 * 3600;

/// Whether there are other processes.
static MET: AtomicBool = AtomicBool::new(false);

/// Ends a process of several that has failed and said why. Threads may be ending its exchange with the others, so nothing
/// of the libraries that they use is taken down meanwhile, as a return from `main` would do.
pub fn end_after_failure() {
    if MET.load(Ordering::SeqCst) {
        signal_hook::low_level::exit(1);
    }
}

/// Something that must be the same for all processes.
pub fn invariant(name: &str, value: String) -> Invariant {
    Invariant { name: name.into(), value }
}

/// The processes that the environment names, which must agree on these invariants and on the version; this one alone without
/// any.
pub fn join(placement: Option<&Placement>, mut invariants: Vec<Invariant>) -> Result<Arc<Group>> {
    let Some(placement) = placement else { return Ok(Arc::new(Group::alone())) };
    let limit = rendezvous_limit(&|name| std::env::var(name).ok())?;
    invariants.insert(0, invariant("version", env!("CARGO_PKG_VERSION").to_string()));
    let rendezvous = Rendezvous { invariants, limit, secret: Secret::from_env()? };
    let group = Group::join(placement, &rendezvous)?;
    MET.store(true, Ordering::SeqCst);
    let own = format!("rank {} failed", group.rank());
    group.on_loss(move |words| end_in_time(words, &own));
    Ok(Arc::new(group))
}

/// The timeout of the rendezvous.
fn rendezvous_limit(var: &dyn Fn(&str) -> Option<String>) -> Result<Duration> {
    let set = LIMIT_VARIABLES.iter().find_map(|name| Some((name, var(name)?)));
    let Some((name, text)) = set else { return Ok(Duration::from_secs(LIMIT)) };
    match text.trim().parse() {
        Ok(seconds @ 1..=LONGEST_LIMIT) => Ok(Duration::from_secs(seconds)),
        _ => bail!("{name} is `{text}`; set it to a number of seconds from 1 to {LONGEST_LIMIT}"),
    }
}

/// Ends a process that cannot end by itself after the loss of another one, because it computes or waits for a device.
/// Files are written aside and renamed, so none is half written.
fn end_in_time(words: &str, own: &str) {
    // This rank prints its failure itself.
    if words.starts_with(own) {
        return;
    }
    thread::sleep(GRACE);
    output::fatal(&fox_dist::Error::Lost(words.to_owned()).to_string(), false);
    signal_hook::low_level::exit(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendezvous_limit_accepts_both_names_and_rejects_overflow() {
        let limit = |set: &[(&str, &str)]| {
            let find =
                |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
            rendezvous_limit(&find)
        };
        let seconds = |set: &[(&str, &str)]| limit(set).unwrap().as_secs();
        assert_eq!(seconds(&[]), LIMIT);
        assert_eq!(seconds(&[("FOX_MEETING_SECONDS", "7")]), 7);
        assert_eq!(seconds(&[("FOX_MEETING_SECONDS", "7"), ("FOX_RENDEZVOUS_SECONDS", "9")]), 9);
        for bad in ["18446744073709551615", "0", "-1", "soon", ""] {
            let error = limit(&[("FOX_MEETING_SECONDS", bad)]).unwrap_err().to_string();
            let want = format!(
                "FOX_MEETING_SECONDS is `{bad}`; set it to a number of seconds from 1 to 604800"
            );
            assert_eq!(error, want);
        }
    }
}
