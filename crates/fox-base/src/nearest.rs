//! The closest known name to a misspelled one.

/// The candidate with the smallest edit distance, if that is small enough.
pub fn nearest<'a>(wrong: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let best = candidates.into_iter().map(|name| (distance(wrong, name), name)).min()?;
    let limit = (wrong.chars().count() / 2).max(2);
    (best.0 <= limit).then(|| best.1.to_string())
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_edits() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("same", "same"), 0);
    }

    #[test]
    fn only_similar_names_are_suggested() {
        let keys = ["tokens", "batch", "seed"];
        assert_eq!(nearest("tokenz", keys).as_deref(), Some("tokens"));
        assert_eq!(nearest("bacth", keys).as_deref(), Some("batch"));
        assert_eq!(nearest("wavelength", keys), None);
    }
}
