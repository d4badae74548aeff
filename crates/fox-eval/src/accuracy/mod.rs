//! Accuracy of models on the small tasks of [`fox_data::task`], by length and difficulty.
//!
//! Two fractions are counted. *Answers right*: every answer by itself, given the right ones before it; the most likely token
//! must be the answer. *Cases right*: a case counts when all of its answers are right. A model that finds only the first of
//! several values scores on answers, not on cases.

mod report;
mod score;

pub use report::{AccuracyReport, CellAccuracy, ModelAccuracy, RunAccuracy};
pub use score::{CellScore, Reading, answers_right, score_task};
