//! One sequence of a task.

use super::START;

/// A sequence, and which of its tokens are answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Token ids `[length]`.
    pub tokens: Vec<u32>,
    /// Which of them are answers `[length]`.
    pub answers: Vec<bool>,
}

impl Case {
    /// Padding without an answer.
    pub(super) fn blank(length: usize) -> Self {
        Case { tokens: vec![START; length], answers: vec![false; length] }
    }

    /// Puts an answer at a position.
    pub(super) fn answer(&mut self, at: usize, token: u32) {
        self.tokens[at] = token;
        self.answers[at] = true;
    }
}
