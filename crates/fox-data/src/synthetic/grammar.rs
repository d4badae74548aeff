//! The sentences of the synthetic corpus, as data.
//!
//! Every template starts with a word of its own, so the first word of a sentence tells which one it is.
//! A fact is always written `NAME SURNAME`, the two words side by side: what has to be looked up is "the word
//! that followed this name last time", the simplest thing attention can learn to look up.

use super::words::{ADJECTIVES, PLACES, ROLES, THINGS, VERBS, WEATHER};

/// One place in a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// This very word.
    Word(&'static str),
    /// A word drawn evenly from a list.
    Any(&'static [&'static str]),
    /// A verb that fits the thing before it: one of two.
    VerbOfThing,
    /// The place of the current scene.
    Place,
    /// A place drawn evenly from the others; it starts a new scene.
    NewPlace,
    /// The name the sentence is about.
    Name,
    /// The surname that belongs to the name.
    Surname,
}

use Part::{Any, Name, NewPlace, Place, Surname, VerbOfThing, Word};

pub(super) type Template = &'static [Part];

/// Sentences that state a fact: what follows the name cannot be known.
pub(super) const STATEMENTS: [Template; 2] = [
    &[
        Word("a"),
        Any(&ADJECTIVES),
        Any(&ROLES),
        Word("named"),
        Name,
        Surname,
        Word("came"),
        Word("in"),
        Word("."),
    ],
    &[Word("we"), Word("met"), Word("a"), Any(&ROLES), Word("named"), Name, Surname, Word(".")],
];

/// Sentences that ask for a fact: what follows the name was said before.
pub(super) const QUESTIONS: [Template; 3] = [
    &[Word("do"), Word("you"), Word("recall"), Name, Surname, Word("?")],
    &[Word("ask"), Word("for"), Name, Surname, Word(".")],
    &[Word("folk"), Word("spoke"), Word("of"), Name, Surname, Word(".")],
];

/// Sentences without a fact.
pub(super) const FILLERS: [Template; 3] = [
    &[
        Word("the"),
        Any(&ADJECTIVES),
        Any(&THINGS),
        VerbOfThing,
        Word("near"),
        Word("the"),
        Place,
        Word("."),
    ],
    &[Word("it"), Word("was"), Any(&WEATHER), Word("at"), Word("the"), Place, Word(".")],
    &[Word("then"), Word("we"), Word("went"), Word("to"), Word("the"), NewPlace, Word(".")],
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

/// How many other places a new scene can have.
pub(super) const OTHER_PLACES: usize = PLACES.len() - 1;

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
        assert_eq!(first.len(), 8);
    }

    #[test]
    fn a_thing_has_two_different_verbs() {
        for thing in 0..THINGS.len() {
            let [a, b] = verbs_of(thing);
            assert_ne!(a, b);
        }
    }
}
