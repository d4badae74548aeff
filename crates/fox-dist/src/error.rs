//! The crate's error: every message is one sentence that names the rank, the address or the variable.

use std::io::ErrorKind;

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A variable of the launcher that makes no sense.
    #[error("the environment variable {variable} {detail}")]
    Environment {
        /// Its name.
        variable: String,
        /// What is wrong with it, and what would be right.
        detail: String,
    },
    /// The address of rank 0 cannot be listened at.
    #[error(
        "rank 0 cannot listen at {address} ({cause}); {}, the same for all ranks",
        elsewhere(cause)
    )]
    Listen {
        /// Host and port.
        address: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// Rank 0 was not there in time.
    #[error(
        "rank {rank} found no rank 0 at {address} within {seconds} s ({cause}); check MASTER_ADDR and the port, and that rank 0 runs"
    )]
    NoRankZero {
        /// This rank.
        rank: usize,
        /// Host and port.
        address: String,
        /// The time limit.
        seconds: u64,
        /// The last failure.
        cause: String,
    },
    /// Some ranks were not there in time.
    #[error(
        "rank 0 waited {seconds} s at {address}, and {missing} of {size} did not come{reason}; see what they print, and whether they have this address"
    )]
    Missing {
        /// Host and port.
        address: String,
        /// The time limit.
        seconds: u64,
        /// Which, in words.
        missing: String,
        /// Ranks in all.
        size: usize,
        /// Why the last one was refused, in brackets; empty where none was.
        reason: String,
    },
    /// A rank that cannot connect to another one, although both have met rank 0.
    #[error(
        "rank {rank} cannot reach rank {other} at {address} ({cause}); let all ranks connect to each other at any port"
    )]
    Unreachable {
        /// This rank.
        rank: usize,
        /// The other one.
        other: usize,
        /// Host and port.
        address: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// A rank that does not fit the others.
    #[error("{0}")]
    Refused(String),
    /// A rank is gone or has failed.
    #[error("{0}; run the same command again to resume from the last checkpoint")]
    Lost(String),
    /// Ranks that are not at the same place of the program.
    #[error(
        "rank {rank} is not in step with rank {other}: message {found} came where {expected} was expected"
    )]
    OutOfStep {
        /// This rank.
        rank: usize,
        /// The other one.
        other: usize,
        /// The number that came.
        found: u32,
        /// The number that was expected.
        expected: u32,
    },
    /// A tensor of another size than its counterpart.
    #[error("rank {rank} received {found} bytes for a tensor of {expected} from rank {other}")]
    Size {
        /// This rank.
        rank: usize,
        /// The other one.
        other: usize,
        /// Bytes that came.
        found: usize,
        /// Bytes that were expected.
        expected: usize,
    },
    /// A connection that could not be made or used.
    #[error("{action} failed: {cause}")]
    Connection {
        /// What was tried.
        action: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// The device refused.
    #[error(transparent)]
    Tensor(#[from] fox_tensor::Error),
}

impl Error {
    /// For `map_err`: says what was tried.
    pub(crate) fn connection(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let action = action.into();
        move |cause| Error::Connection { action, cause }
    }
}

/// Where rank 0 could listen instead.
fn elsewhere(cause: &std::io::Error) -> &'static str {
    match cause.kind() {
        ErrorKind::AddrInUse | ErrorKind::PermissionDenied => "give another port with FOX_PORT",
        _ => "set MASTER_ADDR to an address of its machine",
    }
}
