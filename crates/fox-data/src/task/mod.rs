//! Small tasks with exact answers, which show what a mixer can hold on to.
//!
//! A task writes sequences in which some tokens, the answers, follow from those before them. Only answers have a loss, and
//! only they are scored. Every answer is a token of its sequence, so a sequence is read like text: the model sees earlier
//! answers when it is asked for the next one.
//!
//! | name | what is asked for | difficulty |
//! |---|---|---|
//! | `mqar` | the value that was paired with a key (multi-query associative recall) | pairs |
//! | `mqar-rebound` | the value that a key was paired with last | bindings |
//! | `n-back` | the symbol N steps ago | N |
//! | `flip-flop` | the bit that was written last | share of ignored instructions |
//! | `selective-copy` | the symbols among the noise, in order | symbols |
//! | `parity` | whether the number of ones is odd | none |
//!
//! Each has a file that defines it and says where the definition is from. A [`TaskConfig`] names a task, its sizes, and
//! the [`Setting`]s (length and difficulty) of training and of the tests. Training reads an endless seeded stream
//! ([`TaskDataset`]); a test set is the first cases of a random stream that belongs to the setting.

mod case;
mod config;
mod dataset;
mod draw;
mod flip_flop;
mod mqar;
mod n_back;
mod parity;
mod selective_copy;

pub use case::Case;
pub use config::{Setting, TaskConfig, TaskConfigError};
pub use dataset::TaskDataset;

use fox_base::random::SplitMix64;

use flip_flop::FlipFlop;
use mqar::Mqar;
use n_back::NBack;
use parity::Parity;
use selective_copy::SelectiveCopy;

/// The start marker of every task, which is also the padding.
pub const START: u32 = 0;

/// A kind of task.
pub trait Task: Send + Sync {
    /// Its name in recipes.
    fn name(&self) -> &'static str;

    /// What the difficulty of a setting counts; empty for a task that has only lengths.
    fn difficulty(&self) -> &'static str;

    /// What is wrong with a vocabulary or a setting, in words that go behind its name.
    ///
    /// # Errors
    /// Sizes that no case can be written in.
    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String>;

    /// A case of a setting that [`Self::check`] has passed.
    fn case(&self, vocabulary: u32, setting: &Setting, random: &mut SplitMix64) -> Case;

    /// Chance level: the fraction of right answers when guessing among the tokens that can be answers.
    fn chance(&self, vocabulary: u32) -> f64;
}

/// All tasks.
static TASKS: [&dyn Task; 6] =
    [&Mqar { rebound: false }, &Mqar { rebound: true }, &NBack, &FlipFlop, &SelectiveCopy, &Parity];

/// The task of a name.
pub fn find(name: &str) -> Option<&'static dyn Task> {
    TASKS.iter().copied().find(|task| task.name() == name)
}

/// The names of all tasks.
pub fn names() -> impl Iterator<Item = &'static str> {
    TASKS.iter().map(|task| task.name())
}
