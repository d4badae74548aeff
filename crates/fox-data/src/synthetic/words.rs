//! The closed vocabulary of the synthetic corpus: 256 words, one token each.
//!
//! The order of the lists fixes the token ids, so entries are never reordered: a checkpoint trained on
//! this corpus would otherwise read a different language.

/// Marks the start of every model input; never occurs inside a document.
pub const START_WORD: &str = "<doc>";
/// Stands for any word outside the vocabulary.
pub const UNKNOWN_WORD: &str = "<unk>";

pub(super) const SPECIALS: [&str; 4] = [START_WORD, UNKNOWN_WORD, ".", "?"];

pub(super) const FUNCTION_WORDS: [&str; 22] = [
    "a", "the", "named", "came", "in", "we", "met", "do", "you", "recall", "ask", "for", "folk",
    "spoke", "of", "near", "it", "was", "at", "then", "went", "to",
];

pub(super) const ROLES: [&str; 8] =
    ["baker", "sailor", "doctor", "farmer", "painter", "miller", "teacher", "judge"];

pub(super) const PLACES: [&str; 12] = [
    "river", "market", "tower", "bridge", "harbour", "chapel", "forest", "mill", "inn", "garden",
    "quarry", "station",
];

pub(super) const ADJECTIVES: [&str; 8] =
    ["old", "young", "tall", "quiet", "small", "grey", "proud", "tired"];

pub(super) const THINGS: [&str; 10] =
    ["dog", "cart", "bell", "horse", "boat", "lamp", "crow", "clock", "wheel", "fire"];

pub(super) const VERBS: [&str; 10] =
    ["waited", "turned", "rang", "moved", "slept", "burned", "stopped", "shook", "fell", "rested"];

pub(super) const WEATHER: [&str; 6] = ["cold", "warm", "dark", "bright", "windy", "still"];

/// Names of people: the keys of the facts.
pub const NAMES: [&str; 128] = [
    "Abel", "Ada", "Agnes", "Alma", "Amos", "Anna", "Arlo", "Asa", "Basil", "Bela", "Bess",
    "Blake", "Boris", "Bram", "Calla", "Carl", "Cato", "Celia", "Clara", "Cleo", "Cora", "Cyrus",
    "Dalia", "Dana", "Daria", "Denis", "Dora", "Drew", "Edda", "Edgar", "Edith", "Elias", "Ella",
    "Elmer", "Emil", "Enid", "Erik", "Esme", "Ethel", "Ezra", "Fanny", "Felix", "Fiona", "Flora",
    "Frida", "Gale", "Gideon", "Gilda", "Greta", "Gus", "Hanna", "Hazel", "Hector", "Helga",
    "Hugo", "Ida", "Igor", "Ines", "Ingrid", "Ira", "Iris", "Isaac", "Ivan", "Jasper", "Jenny",
    "Jonas", "Judith", "Jules", "Karin", "Kaspar", "Kate", "Kira", "Klaus", "Lara", "Laszlo",
    "Leah", "Lena", "Leon", "Lewis", "Linus", "Lotta", "Lucy", "Luka", "Mabel", "Magda", "Marlow",
    "Martha", "Matilda", "Max", "Mina", "Mira", "Moses", "Nadia", "Nell", "Nico", "Nina", "Nora",
    "Odette", "Olaf", "Olga", "Orson", "Oscar", "Otto", "Pablo", "Paula", "Perry", "Petra",
    "Quinn", "Ralph", "Rhoda", "Robin", "Rosa", "Rufus", "Ruth", "Selma", "Silas", "Simon",
    "Sonia", "Sven", "Tessa", "Theo", "Tilda", "Ursula", "Vera", "Victor", "Wanda", "Xenia",
    "Zora",
];

/// Surnames: the values of the facts.
pub const SURNAMES: [&str; 48] = [
    "Amber", "Arrow", "Ash", "Barley", "Birch", "Bishop", "Bloom", "Brook", "Candle", "Cedar",
    "Clay", "Copper", "Cotton", "Crane", "Dale", "Dove", "Ember", "Falcon", "Fern", "Flint",
    "Forge", "Frost", "Glass", "Grove", "Hawk", "Heron", "Holly", "Iron", "Ivory", "Juniper",
    "Lark", "Linden", "Maple", "Marsh", "Moss", "North", "Oak", "Pepper", "Pike", "Reed", "Salt",
    "Slate", "Stone", "Swan", "Thorn", "Vale", "Willow", "Wren",
];

/// All words in the order of their ids.
pub(super) fn vocabulary() -> impl Iterator<Item = &'static str> {
    let lists: [&'static [&'static str]; 10] = [
        &SPECIALS,
        &FUNCTION_WORDS,
        &ROLES,
        &PLACES,
        &ADJECTIVES,
        &THINGS,
        &VERBS,
        &WEATHER,
        &NAMES,
        &SURNAMES,
    ];
    lists.into_iter().flatten().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_vocabulary_has_256_different_words() {
        let words: Vec<_> = vocabulary().collect();
        assert_eq!(words.len(), 256);
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), 256);
    }
}
