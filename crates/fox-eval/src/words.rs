//! Words of the generated tests: needles, RULER's task families and phone books.

/// Nouns of six letters: none contains another, and as bytes all have the same length.
pub(crate) const WORDS: [&str; 64] = [
    "anchor", "basket", "bottle", "bridge", "butter", "button", "candle", "castle", "cheese",
    "circle", "coffee", "copper", "corner", "cotton", "desert", "doctor", "dragon", "engine",
    "farmer", "finger", "flower", "forest", "garden", "hammer", "island", "jacket", "jungle",
    "kettle", "ladder", "lawyer", "letter", "marble", "market", "meadow", "mirror", "monkey",
    "needle", "orange", "palace", "pencil", "pepper", "pigeon", "pillow", "pocket", "powder",
    "prison", "rabbit", "ribbon", "saddle", "sailor", "school", "shadow", "silver", "spider",
    "stable", "street", "temple", "ticket", "timber", "tunnel", "valley", "velvet", "window",
    "winter",
];

/// Places that have a password.
#[rustfmt::skip]
pub(crate) const PLACES: [&str; 16] = [
    "north gate", "south gate", "old mill", "new mill", "upper house", "lower house", "red tower",
    "white tower", "first cellar", "second cellar", "ferry", "library", "chapel", "barracks",
    "lighthouse", "vault",
];

/// Adjectives, which make keys together with [`WORDS`].
pub(crate) const ADJECTIVES: [&str; 32] = [
    "blue", "bold", "brave", "bright", "calm", "clean", "clever", "cold", "dark", "deep", "dusty",
    "early", "empty", "gentle", "golden", "green", "happy", "heavy", "hidden", "hollow", "honest",
    "late", "little", "lonely", "proud", "quiet", "rusty", "silent", "simple", "small", "sudden",
    "warm",
];

/// First names.
pub(crate) const FIRST_NAMES: [&str; 32] = [
    "Adam", "Alice", "Anna", "Arthur", "Clara", "Daniel", "David", "Edith", "Edward", "Ellen",
    "Emma", "Frank", "George", "Grace", "Hannah", "Harold", "Henry", "Jane", "John", "Julia",
    "Laura", "Lucy", "Martha", "Mary", "Oliver", "Peter", "Philip", "Robert", "Ruth", "Simon",
    "Thomas", "Walter",
];

/// Last names.
pub(crate) const LAST_NAMES: [&str; 32] = [
    "Abbott", "Archer", "Baker", "Barnes", "Bishop", "Carter", "Cooper", "Dixon", "Fisher",
    "Foster", "Gibson", "Grant", "Harper", "Hudson", "Hunter", "Jordan", "Lambert", "Marsh",
    "Mason", "Miller", "Morris", "Palmer", "Parker", "Porter", "Reed", "Sawyer", "Shaw", "Taylor",
    "Turner", "Walker", "Webster", "Wright",
];

/// Towns of six letters.
pub(crate) const TOWNS: [&str; 32] = [
    "Aachen", "Ankara", "Athens", "Bergen", "Berlin", "Boston", "Dallas", "Denver", "Dublin",
    "Durham", "Exeter", "Geneva", "Havana", "Krakow", "Lisbon", "London", "Madrid", "Malaga",
    "Moscow", "Munich", "Naples", "Odessa", "Ottawa", "Oxford", "Prague", "Sydney", "Toledo",
    "Venice", "Verona", "Vienna", "Warsaw", "Zurich",
];
