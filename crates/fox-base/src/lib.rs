//! Utilities shared by every crate of fox, without dependencies.
//!
//! - [`durable`]: files and folders that are complete or absent, also after a crash.
//! - [`FolderLock`]: one writer per folder.
//! - [`random`]: SplitMix64, whose numbers are part of file formats and of recorded results.
//! - [`difference`]: error measures of lists of numbers.
//! - [`nearest`]: the closest known name to a misspelled one.
//! - [`Setting`]: what an error is about, for callers that have their own name for it.
//! - [`utc`]: times for people and logs.
//!
//! ```
//! use fox_base::random::SplitMix64;
//! use fox_base::{durable, nearest::nearest};
//!
//! let folder = tempfile::tempdir()?;
//! let file = folder.path().join("notes.txt");
//! // Complete or absent, also after a crash: written to a temporary file, synced, renamed.
//! durable::write(&file, b"all of it")?;
//! assert_eq!(std::fs::read(&file)?, b"all of it");
//!
//! let mut random = SplitMix64::new(7);
//! let skipped = random.after(1);
//! random.bits();
//! assert_eq!(random.bits(), skipped.clone().bits());
//!
//! assert_eq!(nearest("bacth", ["batch", "seed"]).as_deref(), Some("batch"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod difference;
pub mod durable;
mod error;
mod lock;
pub mod nearest;
pub mod random;
mod setting;
pub mod utc;

pub use error::FileError;
pub use lock::{FolderLock, LockHolder};
pub use setting::Setting;
