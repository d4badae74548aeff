//! What every crate of fox shares, without dependencies of its own.
//!
//! - [`durable`]: files and folders that are whole or absent, also after a crash.
//! - [`FolderLock`]: one writer per folder.
//! - [`random`]: SplitMix64, whose streams are part of file formats and of recorded results.
//! - [`difference`]: how far one list of numbers is from another.
//! - [`nearest`]: the known name that was probably meant.

pub mod difference;
pub mod durable;
mod error;
mod lock;
pub mod nearest;
pub mod random;

pub use error::FileError;
pub use lock::{FolderLock, LockHolder};
