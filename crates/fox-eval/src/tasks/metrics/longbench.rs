//! LongBench's metrics (`metrics.py` and `eval.py` of THUDM/LongBench) for English and code.

use std::collections::HashMap;

use super::similarity;

const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

/// The words of an answer: small letters, no punctuation, no articles.
fn words(text: &str) -> Vec<String> {
    let kept =
        text.to_lowercase().chars().filter(|c| !PUNCTUATION.contains(*c)).collect::<String>();
    without_articles(&kept).split_whitespace().map(String::from).collect()
}

/// Articles go wherever they stand between characters that no word is made of, so `the` goes from `x—the—y`.
fn without_articles(text: &str) -> String {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut kept = String::with_capacity(text.len());
    let mut word = String::new();
    let close = |word: &mut String, kept: &mut String| {
        kept.push_str(if ["a", "an", "the"].contains(&word.as_str()) { " " } else { word });
        word.clear();
    };
    for c in text.chars() {
        if in_word(c) {
            word.push(c);
        } else {
            close(&mut word, &mut kept);
            kept.push(c);
        }
    }
    close(&mut word, &mut kept);
    kept
}

/// Harmonic mean of precision and recall over the words of the answer, counted with repetition; 0 without a common word.
pub fn f1(answer: &str, truth: &str) -> f64 {
    let (answer, truth) = (words(answer), words(truth));
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for word in &truth {
        *counts.entry(word).or_default() += 1;
    }
    let mut same = 0.0;
    for word in &answer {
        if let Some(count) = counts.get_mut(word.as_str()).filter(|count| **count > 0) {
            *count -= 1;
            same += 1.0;
        }
    }
    if same == 0.0 {
        return 0.0;
    }
    let (precision, recall) = (same / answer.len() as f64, same / truth.len() as f64);
    2.0 * precision * recall / (precision + recall)
}

/// 1 over the number of classes that the answer names, when the right one is among them. A class whose name
/// is part of the right one's does not count.
///
/// The original removes such classes from a list while it walks along it, which passes over the class behind
/// each removed one; scores are to be comparable, so this does too.
pub fn classification(answer: &str, truth: &str, classes: &[String]) -> f64 {
    let mut named: Vec<&str> =
        classes.iter().map(String::as_str).filter(|class| answer.contains(class)).collect();
    let mut at = 0;
    while at < named.len() {
        let term = named[at];
        if truth.contains(term)
            && term != truth
            && let Some(first) = named.iter().position(|class| *class == term)
        {
            named.remove(first);
        }
        at += 1;
    }
    if named.contains(&truth) { 1.0 / named.len() as f64 } else { 0.0 }
}

/// Similarity of the right line and the first line of the answer that is neither a comment nor a fence, in
/// whole percent.
pub(crate) fn code_similarity(answer: &str, truth: &str) -> f64 {
    let is_code = |line: &&str| !["`", "#", "//"].iter().any(|mark| line.contains(mark));
    let line = answer.trim_start_matches('\n').split('\n').find(is_code).unwrap_or("");
    // Two equal texts are alike, also when both are empty; one empty text is like no other.
    match (line == truth, line.is_empty() || truth.is_empty()) {
        (true, _) => 1.0,
        (false, true) => 0.0,
        (false, false) => (100.0 * similarity(line, truth)).round_ties_even() / 100.0,
    }
}

/// The first line that is said, as LongBench cuts the answers of trec, triviaqa, samsum and lsht.
pub(crate) fn first_line(answer: &str) -> &str {
    answer.trim_start_matches('\n').split('\n').next().unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f1_by_hand() {
        // "cat sat on mat" and "cat sat": 2 common of 4 and 2.
        assert!((f1("The cat sat, on a mat!", "cat sat") - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(f1("an Apple", "the apple."), 1.0);
        assert!((f1("red dog", "dog barks loudly") - 0.4).abs() < 1e-12);
        assert_eq!(f1("dog", "cat"), 0.0);
        assert_eq!(f1("", "cat"), 0.0);
        // Repeated words count as often as both have them: 2 of 3 and 2 of 2.
        assert!((f1("ha ha ha", "ha ha") - 0.8).abs() < 1e-12);
        // Punctuation joins words, articles inside other marks go.
        assert_eq!(f1("it's", "its"), 1.0);
        assert_eq!(words("x\u{2014}the\u{2014}y"), ["x\u{2014}", "\u{2014}y"]);
    }

    #[test]
    fn classification_by_hand() {
        let classes: Vec<String> =
            ["city", "other city", "food", "state"].map(String::from).to_vec();
        assert_eq!(classification("it is food", "food", &classes), 1.0);
        assert_eq!(classification("food or state", "food", &classes), 0.5);
        assert_eq!(classification("food", "state", &classes), 0.0);
        // "city" is part of the right name and does not count.
        assert_eq!(classification("other city", "other city", &classes), 1.0);
        assert_eq!(classification("nothing", "food", &classes), 0.0);
        // Behind a removed class one is passed over: "other" stays although it is part of the right name.
        let nested: Vec<String> = ["city", "other", "other city"].map(String::from).to_vec();
        assert_eq!(classification("other city", "other city", &nested), 0.5);
    }

    #[test]
    fn code_similarity_by_hand() {
        assert_eq!(code_similarity("return x", "return x"), 1.0);
        // The comment and the fence are passed over.
        assert_eq!(code_similarity("\n```python\n# a\nx = 1\ny", "x = 1"), 1.0);
        // Common "abd" of "abcd" and "abd": 6 of 7 characters, rounded to percent.
        assert_eq!(code_similarity("abcd", "abd"), 0.86);
        // As fuzzywuzzy with python-Levenshtein prints it.
        assert_eq!(code_similarity("return foo(x, 1)", "return bar(x)"), 0.69);
        assert_eq!((code_similarity("", "x"), code_similarity("# x", "x")), (0.0, 0.0));
    }

    #[test]
    fn first_line_skips_blank_lines() {
        assert_eq!(first_line("\n\nyes\nno"), "yes");
        assert_eq!(first_line(" \nyes"), " ");
        assert_eq!(first_line(""), "");
    }
}
