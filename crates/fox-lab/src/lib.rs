//! Experiments: many training runs, what is measured of them, and the report.
//!
//! - [`sweep`]: several recipes on the same data in one table, with grids, seeds and searches.
//! - [`reproduce`]: the experiments of the Forgetting Transformer paper, as TOML files.
//! - [`demo`]: FoX beside two RoPE Transformers on the embedded corpus.
//! - [`watch`]: the page of a run under way.
//!
//! All three fill a [`RunGraph`](graph::RunGraph) of `fox` commands. A [`Scheduler`] executes it in child processes,
//! which report progress as [`ChildEvent`](events::ChildEvent)s. Finished work is recognized by the files it left, so the
//! same command resumes an interrupted experiment, and a report is written from the files alone. Reports are
//! [`Report`](fox_eval::report::Report)s, statistics are in [`fox_eval::stats`].
//!
//! The commands of the `fox` binary share [`args`], [`output`], [`progress`] and [`signals`] with these. The crate exists
//! for that binary: its interface may change in any release.
//!
//! The learning-rate search of sweeps and experiments, with a formula in the place of training runs:
//!
//! ```
//! use fox_lab::search::{Bracket, learning_rate_grid};
//!
//! let loss = |rate: f64| (rate / 3e-3).ln().powi(2);
//! let mut search = Bracket::around(1e-4);
//! while let Some(index) = search.wanted().first().copied() {
//!     search.record(index, loss(learning_rate_grid(index)));
//! }
//! // The best point of the grid {1, 2, 5} x 10^i, whose neighbours are worse.
//! assert_eq!(search.best().map(learning_rate_grid), Some(2e-3));
//! assert_eq!(search.known().count(), 7);
//! ```

// They panic when the reader is gone; see `output`.
#![warn(clippy::print_stdout, clippy::print_stderr)]
// Comments on arguments are the help of the command line, where brackets and addresses mean themselves.
#![allow(rustdoc::bare_urls, rustdoc::broken_intra_doc_links)]

pub mod args;
pub mod demo;
pub mod events;
pub mod graph;
pub mod output;
pub mod progress;
pub mod provenance;
pub mod reproduce;
mod scheduler;
pub mod search;
pub mod signals;
pub mod sweep;
pub mod watch;

pub use scheduler::Scheduler;
