//! Which task, how large, and how difficult.

use serde::{Deserialize, Serialize};

use super::{Case, Task, find};
use crate::random::stream;
use fox_base::random::mix;

/// Length and difficulty of cases; in recipes `[length, difficulty]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "(usize, f64)", into = "(usize, f64)")]
pub struct Setting {
    /// Tokens of a case.
    pub length: usize,
    /// What it means is the task's affair: a number of pairs, a fraction of noise.
    pub difficulty: f64,
}

impl From<(usize, f64)> for Setting {
    fn from((length, difficulty): (usize, f64)) -> Self {
        Setting { length, difficulty }
    }
}

impl From<Setting> for (usize, f64) {
    fn from(setting: Setting) -> Self {
        (setting.length, setting.difficulty)
    }
}

impl Setting {
    /// The difficulty as a number of things.
    pub(super) fn count(&self) -> usize {
        self.difficulty as usize
    }

    /// An error unless the difficulty is a whole number above 0.
    pub(super) fn check_count(&self, things: &str) -> Result<(), String> {
        let whole = self.difficulty >= 1.0 && self.difficulty.fract() == 0.0;
        match whole && self.difficulty <= 1e6 {
            true => Ok(()),
            false => Err(format!("has {} {things}; give a whole number above 0", self.difficulty)),
        }
    }

    /// An error unless the case has at least `needed` tokens.
    pub(super) fn check_length(&self, needed: usize) -> Result<(), String> {
        match self.length >= needed {
            true => Ok(()),
            false => Err(format!(
                "has cases of {} tokens, but difficulty {} needs {needed}",
                self.length, self.difficulty
            )),
        }
    }
}

/// A task with its sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskConfig {
    /// Which task.
    pub name: String,
    /// Every case is a function of this seed, its setting and its number.
    #[serde(default)]
    pub seed: u64,
    /// Number of token ids, the start marker among them.
    pub vocabulary: u32,
    /// Settings of the training cases, in equal shares.
    pub train: Vec<Setting>,
    /// Settings of the test sets, one each.
    pub test: Vec<Setting>,
    /// Cases in each test set.
    #[serde(default = "test_cases")]
    pub test_cases: u64,
}

fn test_cases() -> u64 {
    1000
}

/// What is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskConfigError {
    /// The key.
    pub key: &'static str,
    /// What is wrong and what would be right, in words that go behind the key.
    pub detail: String,
}

/// Streams of cases that share no seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Train,
    /// Evaluations during training.
    HeldOut,
    Test,
}

impl TaskConfig {
    /// The task; `None` when there is none of this name.
    pub fn task(&self) -> Option<&'static dyn Task> {
        find(&self.name)
    }

    /// The first value that cannot be right. Whether the name is known is not asked here.
    ///
    /// # Errors
    /// No settings, no test cases, or sizes that no case can be written in.
    pub fn check(&self) -> Result<(), TaskConfigError> {
        let problem = |key, detail: String| Err(TaskConfigError { key, detail });
        if self.test_cases == 0 {
            return problem("test_cases", "must be at least 1".into());
        }
        let Some(task) = self.task() else { return Ok(()) };
        for (key, settings) in [("train", &self.train), ("test", &self.test)] {
            if settings.is_empty() {
                return problem(key, "is empty; give a list of [length, difficulty]".into());
            }
            for setting in settings {
                if let Err(detail) = task.check(self.vocabulary, setting) {
                    return problem(key, detail);
                }
            }
        }
        Ok(())
    }

    /// Tokens of the longest training case.
    pub fn training_length(&self) -> usize {
        self.train.iter().map(|setting| setting.length).max().unwrap_or(0)
    }

    /// The case number `index` of the test set of a setting; `None` for a task that does not exist.
    pub fn test_case(&self, setting: &Setting, index: u64) -> Option<Case> {
        self.case(Stream::Test, setting, index)
    }

    pub(super) fn case(&self, of: Stream, setting: &Setting, index: u64) -> Option<Case> {
        let salt = match of {
            Stream::Train => 0x7472_6169_6e21,
            Stream::HeldOut => 0x6865_6c64_6f75,
            Stream::Test => 0x7465_7374_2121,
        };
        let setting_bits = mix(setting.length as u64) ^ setting.difficulty.to_bits();
        let mut random = stream(mix(self.seed ^ salt) ^ mix(setting_bits), index);
        Some(self.task()?.case(self.vocabulary, setting, &mut random))
    }
}
