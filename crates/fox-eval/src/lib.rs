//! Evaluation of language models: what they predict at every position, what they find again in a long
//! text, and what they forget.
//!
//! - [`loss`]: loss at every position, its slope, and perplexities, with bootstrap intervals.
//! - [`needle`]: what a model finds again in a long text.
//! - [`tasks`]: questions with right answers, and LongBench.
//! - [`accuracy`]: answers to small tasks with exact answers, by length and difficulty.
//! - [`inspect`]: forget gates, half-lives, attention, pruning.
//! - [`compare`]: all of this side by side.
//! - [`report`]: the page that the pictures ([`fox_plot`]) stand on.

pub mod accuracy;
pub mod compare;
pub mod error;
pub mod files;
pub mod inspect;
pub mod learning;
pub mod loss;
pub mod needle;
pub mod report;
pub mod stats;
mod subject;
pub mod tasks;

pub use error::{Error, Result};
pub use subject::Subject;
