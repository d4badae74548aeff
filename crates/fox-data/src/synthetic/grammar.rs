//! The sentences of the synthetic corpus, as data.
//!
//! Every template starts with a word of its own, so the first word of a sentence tells which one it is.
//! A fact is always written `TITLE NAME`, the two words side by side.

use super::words::{ADJECTIVES, THINGS, VERBS, WEATHER};

/// One place in a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// This very word.
    Word(&'static str),
    /// A word drawn evenly from a list.
    Any(&'static [&'static str]),
    /// A verb that fits the thing before it: one of two.
    VerbOfThing,
    /// The title the sentence is about.
    Title,
    /// The name that belongs to the title in this document.
    Name,
}

use Part::{Any, Name, Title, VerbOfThing, Word};

pub(super) type Template = &'static [Part];

/// Sentences that state a fact: which name follows the title cannot be known.
pub(super) const STATEMENTS: [Template; 1] =
    [&[Word("meet"), Word("the"), Word("new"), Title, Name, Word(".")]];

/// Sentences that ask for a fact: the name that follows the title was said before.
pub(super) const QUESTIONS: [Template; 3] = [
    &[Word("recall"), Title, Name, Word("?")],
    &[Word("ask"), Word("for"), Title, Name, Word(".")],
    &[Word("then"), Title, Name, Word("spoke"), Word(".")],
];

/// Sentences without a fact.
pub(super) const FILLERS: [Template; 2] = [
    &[Word("the"), Any(&ADJECTIVES), Any(&THINGS), VerbOfThing, Word(".")],
    &[Word("it"), Word("was"), Any(&WEATHER), Word(".")],
];

/// The two verbs that go with the thing at this index of [`THINGS`].
pub(super) fn verbs_of(thing: usize) -> [&'static str; 2] {
    let n = VERBS.len();
    [VERBS[thing % n], VERBS[(thing + 3) % n]]
}

/// Mean number of words of these templates.
pub(super) fn mean_len(templates: &[Template]) -> f64 {
    templates.iter().map(|t| t.len() as f64).sum::<f64>() / templates.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_first_word_tells_the_template() {
        let first: HashSet<_> = STATEMENTS
            .iter()
            .chain(&QUESTIONS)
            .chain(&FILLERS)
            .map(|t| match t[0] {
                Word(w) => w,
                _ => panic!("a template starts with a fixed word"),
            })
            .collect();
        assert_eq!(first.len(), 6);
    }

    #[test]
    fn a_thing_has_two_different_verbs() {
        for thing in 0..THINGS.len() {
            let [a, b] = verbs_of(thing);
            assert_ne!(a, b);
        }
    }
}
