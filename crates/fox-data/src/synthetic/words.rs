//! The closed vocabulary of the synthetic corpus: 256 words, one token each.
//!
//! The order of the lists fixes the token ids, so entries are never reordered: a checkpoint trained on
//! this corpus would otherwise read a different language.

/// Marks the start of every model input; never occurs inside a document.
pub const START_WORD: &str = "<doc>";
/// Stands for any word outside the vocabulary.
pub const UNKNOWN_WORD: &str = "<unk>";

pub(super) const SPECIALS: [&str; 4] = [START_WORD, UNKNOWN_WORD, ".", "?"];

pub(super) const FUNCTION_WORDS: [&str; 10] =
    ["the", "new", "meet", "recall", "ask", "for", "then", "spoke", "it", "was"];

pub(super) const ADJECTIVES: [&str; 8] =
    ["old", "young", "tall", "quiet", "small", "grey", "proud", "tired"];

pub(super) const THINGS: [&str; 8] =
    ["dog", "cart", "bell", "horse", "boat", "lamp", "crow", "clock"];

pub(super) const VERBS: [&str; 6] = ["waited", "turned", "moved", "slept", "stopped", "fell"];

pub(super) const WEATHER: [&str; 4] = ["cold", "warm", "dark", "bright"];

/// Titles of people and places: the keys of the facts.
pub const TITLES: [&str; 24] = [
    "captain", "doctor", "judge", "baker", "sailor", "teacher", "miller", "painter", "uncle",
    "aunt", "sister", "brother", "river", "lake", "mount", "port", "fort", "castle", "colonel",
    "lady", "lord", "pastor", "clerk", "widow",
];

/// How many names each title can go with.
pub const NAMES_PER_TITLE: usize = 8;

/// Names, the values of the facts: the first [`NAMES_PER_TITLE`] belong to the first title, and so on.
pub const NAMES: [&str; 192] = [
    "Abel", "Clara", "Erik", "Hugo", "Klaus", "Mira", "Ralph", "Xenia", "Ada", "Cleo", "Esme",
    "Ida", "Lara", "Moses", "Rhoda", "Zora", "Agnes", "Cora", "Ethel", "Igor", "Laszlo", "Nadia",
    "Robin", "Amber", "Alma", "Cyrus", "Ezra", "Ines", "Leah", "Nell", "Rosa", "Arrow", "Amos",
    "Dalia", "Fanny", "Ingrid", "Lena", "Nico", "Rufus", "Ash", "Anna", "Dana", "Felix", "Ira",
    "Leon", "Nina", "Ruth", "Barley", "Arlo", "Daria", "Fiona", "Iris", "Lewis", "Nora", "Selma",
    "Birch", "Asa", "Denis", "Flora", "Isaac", "Linus", "Odette", "Silas", "Bishop", "Basil",
    "Dora", "Frida", "Ivan", "Lotta", "Olaf", "Simon", "Bloom", "Bela", "Drew", "Gale", "Jasper",
    "Lucy", "Olga", "Sonia", "Brook", "Bess", "Edda", "Gideon", "Jenny", "Luka", "Orson", "Sven",
    "Candle", "Blake", "Edgar", "Gilda", "Jonas", "Mabel", "Oscar", "Tessa", "Cedar", "Alder",
    "Calder", "Elgin", "Harlow", "Leeds", "Newry", "Ripon", "Tring", "Ashford", "Carlow", "Ely",
    "Hexham", "Lincoln", "Norwich", "Rugby", "Wells", "Barrow", "Crewe", "Exeter", "Ilford",
    "Ludlow", "Oban", "Selby", "Whitby", "Bexley", "Dover", "Fenwick", "Kells", "Malton", "Oxford",
    "Sligo", "Wick", "Bolton", "Dunmore", "Galway", "Kendal", "Matlock", "Penrith", "Stroud",
    "Yarm", "Bray", "Durham", "Hale", "Lanark", "Navan", "Perth", "Tralee", "York", "Boris",
    "Edith", "Greta", "Judith", "Magda", "Otto", "Theo", "Clay", "Bram", "Elias", "Gus", "Jules",
    "Marlow", "Pablo", "Tilda", "Copper", "Calla", "Ella", "Hanna", "Karin", "Martha", "Paula",
    "Ursula", "Cotton", "Carl", "Elmer", "Hazel", "Kaspar", "Matilda", "Perry", "Vera", "Crane",
    "Cato", "Emil", "Hector", "Kate", "Max", "Petra", "Victor", "Dale", "Celia", "Enid", "Helga",
    "Kira", "Mina", "Quinn", "Wanda", "Dove",
];

/// The names that can go with a title, by its index in [`TITLES`].
pub(super) fn names_of(title: usize) -> &'static [&'static str] {
    &NAMES[title * NAMES_PER_TITLE..][..NAMES_PER_TITLE]
}

/// All words in the order of their ids.
pub(super) fn vocabulary() -> impl Iterator<Item = &'static str> {
    let lists: [&'static [&'static str]; 8] =
        [&SPECIALS, &FUNCTION_WORDS, &ADJECTIVES, &THINGS, &VERBS, &WEATHER, &TITLES, &NAMES];
    lists.into_iter().flatten().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_title_has_its_own_names() {
        assert_eq!(NAMES.len(), TITLES.len() * NAMES_PER_TITLE);
        assert_eq!(names_of(0)[0], NAMES[0]);
        assert_eq!(names_of(23)[7], NAMES[191]);
    }

    #[test]
    fn the_vocabulary_has_256_different_words() {
        let words: Vec<_> = vocabulary().collect();
        assert_eq!(words.len(), 256);
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), 256);
    }
}
