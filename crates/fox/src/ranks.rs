//! Work as one of several processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use fox_dist::{Fact, Group, Meeting, Placement};

use crate::output;

/// How long a process may take to end by itself when another one is lost.
const GRACE: Duration = Duration::from_millis(1500);
/// How long the processes wait for each other, unless FOX_MEETING_SECONDS says otherwise.
const LIMIT: u64 = 120;

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
pub fn fact(name: &str, value: String) -> Fact {
    Fact { name: name.into(), value }
}

/// The processes that the environment names, which must agree on these facts and on the version; this one alone without
/// any.
pub fn meet(placement: Option<&Placement>, mut facts: Vec<Fact>) -> Result<Arc<Group>> {
    let Some(placement) = placement else { return Ok(Arc::new(Group::alone())) };
    let seconds = match std::env::var("FOX_MEETING_SECONDS") {
        Err(_) => LIMIT,
        Ok(text) => text
            .parse()
            .with_context(|| format!("FOX_MEETING_SECONDS is `{text}`, not a number of seconds"))?,
    };
    facts.insert(0, fact("version", env!("CARGO_PKG_VERSION").to_string()));
    let meeting = Meeting { facts, limit: Duration::from_secs(seconds) };
    let group = Group::meet(placement, &meeting)?;
    MET.store(true, Ordering::SeqCst);
    let own = format!("rank {} failed", group.rank());
    group.on_loss(move |words| end_in_time(words, &own));
    Ok(Arc::new(group))
}

/// Ends a process that cannot end by itself after the loss of another one, because it computes or waits for a device.
/// Files are written aside and renamed, so none is half written.
fn end_in_time(words: &str, own: &str) {
    // A failure of its own is on its way to the user.
    if words.starts_with(own) {
        return;
    }
    thread::sleep(GRACE);
    output::fatal(&fox_dist::Error::Lost(words.to_owned()).to_string(), false);
    signal_hook::low_level::exit(1);
}
