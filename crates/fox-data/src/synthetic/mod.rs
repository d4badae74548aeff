//! The embedded synthetic corpus: endless documents of short sentences, in chapters that void what was said.
//!
//! # What a document is
//! Sentences of two kinds. A *fact* says what a person does: "Ann sings." In a chapter a person does one thing only,
//! so "Ann sings." determines the word after the next "Ann". *Filler* has no facts: "The rain falls." Now
//! and then comes "A new chapter begins.", and from there on every person does something else, drawn anew: what was
//! said before is void. A word is a token, and the last word of a sentence includes its full stop, so a fact is two
//! tokens.
//!
//! The people of a document form circles of 1, 2, 4 and 8; all circles have as many facts, so the one person of the first
//! is mentioned eight times as often as one of the last. Who is who, each document decides anew.
//!
//! # Lengths
//! The length of a chapter is drawn from `[shortest_chapter, shortest_chapter * 2^octaves)`, each doubling equally
//! likely; a document begins with a new chapter. So the longer a document is read, the longer are the chapters one is in
//! the middle of, and facts about people of the last circle may have been said hundreds of tokens ago. The
//! attainable loss falls with the position, far beyond the sequences that a small model is trained on, for a model that
//! remembers a fact for as long as the chapter lasts and drops it when the chapter ends.
//!
//! # What is attainable
//! The probability of every token given all before it is known exactly ([`OptimalPredictor`]); its mean is the lowest loss
//! there is ([`SyntheticConfig::attainable_loss`]). The example `synthetic_corpus` prints it.
//!
//! # Why it is like this
//! It must be learned from one to two million tokens by a model of 0.4 million parameters. What was tried before: a free
//! pairing of 128 names with 48 surnames, of which models of that size learned nothing in 2,000 steps; and titles
//! with separate names ("captain Abel"), restated from time to time, which forgetting does not help with.

mod attainable;
mod config;
mod dataset;
mod document;
mod needle;
mod tokenizer;
mod words;

pub use attainable::OptimalPredictor;
pub use config::SyntheticConfig;
pub use dataset::SyntheticDataset;
pub use document::{SyntheticDocument, SyntheticToken, TokenKind};
pub use needle::NeedleCase;
pub use tokenizer::SyntheticTokenizer;
pub(crate) use words::UNKNOWN_WORD;
pub use words::{PEOPLE, START_WORD};
