//! The embedded synthetic corpus: endless documents with local structure and facts to be remembered.
//!
//! # What a document is
//! Sentences of 5 to 9 words from a small grammar. Two thirds of them mention one of 128 people by name
//! and surname. The surname is the *fact*: it is drawn anew for every document, stated once
//! ("we met a baker named Marlow Amber.") and asked for again and again
//! ("do you recall Marlow Amber?"), on average seven times, until a new statement replaces it.
//! At a question the surname is certain for a reader who remembers, and costs ln 48 = 3.87 nats
//! for one who does not.
//!
//! # Distances
//! The gap between two mentions of the same name is drawn from
//! `[min_gap, min_gap * 2^octaves)`: an octave evenly, then a number inside it evenly. By default that is
//! 8 to 8191 words with each doubling equally likely (log-uniform by steps), mean 1228. A sentence waits
//! until the one before it ends, which adds a few words.
//!
//! A document does not begin at the beginning of its world: the clock of every name starts in its stationary
//! state, as if the reader had opened a book in the middle. So at position `i` exactly the questions whose gap
//! is longer than `i` cannot be answered yet, and the attainable loss falls by the same amount with every
//! doubling of `i`, up to the longest gap. That makes `L(i)` fall far beyond any training length, for
//! a model that can still look back that far.
//!
//! # Figures of the default configuration
//! (Printed by `cargo run -p fox-data --release --example synthetic_statistics`.)
//!
//! The example prints the share of words that are names and surnames, how many facts are open
//! within a window, the attainable loss by reach, and the distribution of distances.
//!
//! # Why it can be learned quickly
//! One word is one token, and 256 words make the whole vocabulary; name and surname stand side by side, so one
//! attention head with a view of the previous token suffices; a window of 512 tokens holds some 50
//! mentions, of which about 20 can be answered inside it, half of them within a hundred tokens.

mod dataset;
mod document;
mod grammar;
mod needle;
mod statistics;
mod tokenizer;
mod words;

pub use dataset::SyntheticDataset;
pub use document::{SyntheticConfig, SyntheticDocument, SyntheticToken, TokenKind};
pub use needle::NeedleCase;
pub use statistics::{DistanceHistogram, SyntheticStatistics};
pub use tokenizer::SyntheticTokenizer;
pub use words::{NAMES, START_WORD, SURNAMES, UNKNOWN_WORD};
