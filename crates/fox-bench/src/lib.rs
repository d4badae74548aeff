//! Benchmarks and self-tests: how fast and how accurate the devices of this machine are.
//!
//! [`bench`] checks results against the oracle before it times them, and reports fractions of the roofline. [`selftest`]
//! compares every op with the oracle. Both are commands of `fox` (`fox bench`, `fox selftest`) that another command line
//! can adopt; the interface follows that of `fox` and may change in any release.
//!
//! ```
//! use std::process::ExitCode;
//!
//! use clap::Parser;
//!
//! #[derive(Parser)]
//! struct Cli {
//!     #[command(flatten)]
//!     selftest: fox_bench::selftest::Args,
//! }
//!
//! let cli = Cli::parse_from(["check", "--device", "cpu", "--only", "glu"]);
//! assert_eq!(fox_bench::selftest::run(&cli.selftest)?, ExitCode::SUCCESS);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// They panic when the reader is gone; see `fox_lab::output`.
#![warn(clippy::print_stdout, clippy::print_stderr)]
// Comments on arguments are the help of the command line, where brackets and addresses mean themselves.
#![allow(rustdoc::bare_urls, rustdoc::broken_intra_doc_links)]

pub mod bench;
pub mod selftest;

use fox_lab::args::{device, engine, tolerance};
use fox_lab::output;
