//! The embedded synthetic corpus: endless documents with local structure and facts to be remembered.
//!
//! # What a document is
//! Sentences of 4 to 6 words from a small grammar. Some of them mention a title with a name ("captain Abel"). Which
//! name goes with a title is the *fact*: it is drawn anew for every document, stated once ("meet the new captain
//! Abel.") and asked for again and again ("recall captain Abel?"), until a new statement replaces it. At a
//! question the name is certain for a reader who remembers, and costs `ln(names_per_title)` nats for one
//! who does not.
//!
//! # Distances
//! Most gaps between two mentions of the same title are drawn from `[min_gap, min_gap * 2^octaves)`: an octave
//! evenly, then a number inside it evenly, so that each doubling of the distance is equally likely (log-uniform by steps).
//! A part (`nearby_percent`) are at most `nearby_gap` instead. A sentence waits until the one before it ends,
//! which adds a few words.
//!
//! A document does not begin at the beginning of its world: the clock of every title starts in its stationary
//! state, as if the reader had opened a book in the middle. So at position `i` exactly the questions whose gap
//! is longer than `i` cannot be answered yet, and the attainable loss falls by about the same amount with every
//! doubling of `i`, up to the longest gap. That makes `L(i)` fall beyond the training length, for a
//! model that can still look back that far.
//!
//! [`SyntheticConfig::attainable_loss`] gives that loss; the example `synthetic_statistics` prints it with the other
//! figures of the corpus: distances, open facts, and how many nats belong to what.
//!
//! # Why it is like this
//! It must be learned from one to three million tokens by a model of half a million parameters. First tried was a free
//! pairing of 128 names with 48 surnames: models of that size learned the grammar in 100 steps and
//! nothing about the facts in 800 to 2,000, because looking up a word among interchangeable ones gives no gradient
//! until it almost works. Here every title has names of its own, so that "which of my names is in sight" is already a useful
//! question; the answer gets better with every step towards attending to the right word. The number of
//! titles and names decides how soon it is learned, because each pair has to be met often enough.

mod config;
mod dataset;
mod document;
mod grammar;
mod needle;
mod statistics;
mod tokenizer;
mod words;

pub use config::SyntheticConfig;
pub use dataset::SyntheticDataset;
pub use document::{SyntheticDocument, SyntheticToken, TokenKind};
pub use needle::NeedleCase;
pub use statistics::{DistanceHistogram, SyntheticStatistics};
pub use tokenizer::SyntheticTokenizer;
pub use words::{NAMES, NAMES_PER_TITLE, START_WORD, TITLES, UNKNOWN_WORD};
