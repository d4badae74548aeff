//! What every crate of fox shares, without dependencies of its own.
//!
//! - [`durable`]: files and folders that are whole or absent, also after a crash.
//! - [`FolderLock`]: one writer per folder.
//! - [`random`]: SplitMix64, whose streams are part of file formats and of recorded results.
//! - [`difference`]: how far one list of numbers is from another.
//! - [`nearest`]: the known name that was probably meant.
//!
//! ```
//! use fox_base::random::SplitMix64;
//! use fox_base::{durable, nearest::nearest};
//!
//! let folder = tempfile::tempdir()?;
//! let file = folder.path().join("notes.txt");
//! // Whole or absent, also after a crash: written aside, synced, renamed.
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

pub use error::FileError;
pub use lock::{FolderLock, LockHolder};
