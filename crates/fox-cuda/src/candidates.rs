//! Kernels whose advantage has not been measured on a GPU, or not everywhere: compiled and emulated, but selected on
//! request only.
//!
//! The environment variable `FOX_CANDIDATES=name,name` selects them for a process; benchmarks and self-tests switch with
//! [`select`]. A candidate that wins replaces the kernel beside it, one that loses goes to `NOTES.md`; either way it
//! leaves this list.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::{Error, Result};

/// A kernel on trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// Decode steps: attention from raw projections to the output norm in one launch. Same bits.
    DecodeAttend,
}

impl Candidate {
    /// All candidates, in declaration order.
    pub const ALL: [Candidate; 1] = [Candidate::DecodeAttend];

    /// The name in `FOX_CANDIDATES`.
    pub fn name(self) -> &'static str {
        match self {
            Candidate::DecodeAttend => "decode-attend",
        }
    }

    /// Parses a list of names separated by commas; an empty list is valid.
    pub fn list(names: &str) -> Result<Vec<Candidate>> {
        let one = |name: &str| {
            Candidate::ALL.into_iter().find(|c| c.name() == name).ok_or_else(|| {
                let known = Candidate::ALL.map(Candidate::name).join(", ");
                Error::argument("candidates", format!("`{name}` is none of the candidates {known}"))
            })
        };
        names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(one).collect()
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// Whether decode engines opened from now on run every other step without the selected candidates.
static ALTERNATING: AtomicBool = AtomicBool::new(false);

fn selected() -> &'static AtomicU32 {
    static SELECTED: OnceLock<AtomicU32> = OnceLock::new();
    SELECTED.get_or_init(|| AtomicU32::new(bits(&from_environment().unwrap_or_default())))
}

fn bits(candidates: &[Candidate]) -> u32 {
    candidates.iter().fold(0, |bits, c| bits | c.bit())
}

/// The candidates that `FOX_CANDIDATES` names; opening a GPU reports names that do not exist.
pub(crate) fn from_environment() -> Result<Vec<Candidate>> {
    Candidate::list(&std::env::var("FOX_CANDIDATES").unwrap_or_default())
}

/// Whether the candidate replaces the default kernel.
pub(crate) fn enabled(candidate: Candidate) -> bool {
    selected().load(Ordering::Relaxed) & candidate.bit() != 0
}

/// Selects these candidates and no others for launches from now on; returns those selected before.
pub fn select(candidates: &[Candidate]) -> Vec<Candidate> {
    let before = selected().swap(bits(candidates), Ordering::Relaxed);
    Candidate::ALL.into_iter().filter(|c| before & c.bit() != 0).collect()
}

/// Lets decode engines that are opened from now on run every other step without the selected candidates, so that one
/// process measures both; [`select`] chooses the candidates.
pub fn alternate_steps(alternate: bool) {
    ALTERNATING.store(alternate, Ordering::Relaxed);
}

/// See [`alternate_steps`].
pub(crate) fn steps_alternate() -> bool {
    ALTERNATING.load(Ordering::Relaxed)
}
