//! Accuracy of models on the small tasks of [`fox_data::task`], by length and difficulty.
//!
//! Two shares are counted. *Answers right*: every answer by itself, given the right ones before it; the most likely token
//! must be the answer. *Cases right*: a case counts when all of its answers are right. A model that finds the first of
//! several values only has a part of the first share and none of the second.

mod report;
mod score;

pub use report::{AccuracyReport, CellAccuracy, ModelAccuracy, RunAccuracy};
pub use score::{CellScore, Reading, answers_right, score_task};
