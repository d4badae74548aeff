//! The closed vocabulary of the synthetic corpus: 90 words, one token each.
//!
//! The last word of a sentence carries its full stop, so a fact is two tokens and still reads as a sentence. The order
//! of the lists fixes the token ids, so entries are never reordered: a checkpoint trained on this corpus would
//! otherwise read a different language.

/// Marks the start of every model input; never occurs inside a document.
pub const START_WORD: &str = "<doc>";
/// Stands for any word outside the vocabulary.
pub(crate) const UNKNOWN_WORD: &str = "<unk>";

const SPECIALS: [&str; 2] = [START_WORD, UNKNOWN_WORD];

/// The sentence that opens a chapter.
pub(super) const CHAPTER: [&str; 4] = ["A", "new", "chapter", "begins."];

/// The first word of every filler sentence.
pub(super) const FILLER: &str = "The";

/// What fills the text: each thing does only one thing.
pub(super) const THINGS: [&str; 10] =
    ["rain", "wind", "clock", "river", "fire", "moon", "bell", "snow", "tide", "dust"];

/// What the thing at the same index does.
pub(super) const DOES: [&str; 10] = [
    "falls.", "turns.", "ticks.", "bends.", "burns.", "shines.", "rings.", "melts.", "rises.",
    "settles.",
];

/// The people: the keys of the facts.
pub const PEOPLE: [&str; 31] = [
    "Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai", "Lea", "Max",
    "Nina", "Otto", "Pia", "Quin", "Rosa", "Sam", "Tess", "Uma", "Vera", "Will", "Xena", "Yuri",
    "Zoe", "Abe", "Bea", "Carl", "Dora", "Emil",
];

/// What people do: the values of the facts, shared by all people.
pub(crate) const ACTIONS: [&str; 32] = [
    "sings.", "cooks.", "reads.", "paints.", "runs.", "swims.", "writes.", "sleeps.", "dances.",
    "digs.", "knits.", "rides.", "sails.", "fishes.", "hunts.", "waits.", "bakes.", "climbs.",
    "draws.", "farms.", "hikes.", "jokes.", "juggles.", "mends.", "mows.", "plays.", "rows.",
    "sews.", "skates.", "teaches.", "travels.", "weaves.",
];

/// All words in the order of their ids.
pub(super) fn vocabulary() -> impl Iterator<Item = &'static str> {
    let lists: [&'static [&'static str]; 7] =
        [&SPECIALS, &CHAPTER, &[FILLER], &THINGS, &DOES, &PEOPLE, &ACTIONS];
    lists.into_iter().flatten().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn vocabulary_has_90_words() {
        let words: Vec<_> = vocabulary().collect();
        assert_eq!(words.len(), 90);
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), 90);
    }

    #[test]
    fn full_stops_end_sentences() {
        let last = CHAPTER[3..].iter().chain(&DOES).chain(&ACTIONS);
        assert!(last.clone().all(|word| word.ends_with('.')));
        let ends = vocabulary().filter(|word| word.contains('.')).count();
        assert_eq!(ends, last.count());
    }
}
