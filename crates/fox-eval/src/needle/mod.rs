//! Needle in a haystack: can a model find again what a long text said once?
//!
//! A sentence is hidden in a long text at a given depth, and asked for at the end. Every cell of a grid
//! of lengths and depths is scored by the greedy answer and by the probability of the right one; no
//! outside judge is needed.

mod case;
mod grid;
mod reader;
mod score;
mod text;

pub use case::{Case, Cases, Mode, SyntheticCases};
pub use grid::{Cell, Grid, NeedleMap, NeedleReport, run_needle};
pub use reader::{ModelReader, Reader, Reading};
pub use score::{Score, score};
pub use text::{Needle, TextCases};
pub(crate) use text::{break_before, sentence_ends};
