//! ROUGE-L as LongBench computes it, with the `rouge` package (1.0) for Python.

use std::collections::HashSet;

/// F-measure of ROUGE-L on the level of summaries: how many different words of the reference lie on a longest
/// common subsequence of one of its sentences and one of the answer's, over the different words of each. 0
/// when either has no sentence.
pub(crate) fn rouge_l(answer: &str, truth: &str) -> f64 {
    let (answer, truth) = (sentences(answer), sentences(truth));
    if answer.is_empty() || truth.is_empty() {
        return 0.0;
    }
    let mut covered: HashSet<&str> = HashSet::new();
    for reference in &truth {
        for said in &answer {
            covered.extend(common_words(reference, said));
        }
    }
    let different = |text: &[Vec<String>]| text.iter().flatten().collect::<HashSet<_>>().len();
    let found = covered.len() as f64;
    let (precision, recall) = (found / different(&answer) as f64, found / different(&truth) as f64);
    // The small number is the package's own guard against a division by zero.
    2.0 * precision * recall / (precision + recall + 1e-8)
}

/// Words of the sentences between full stops. A sentence of white space has one word, the empty one.
fn sentences(text: &str) -> Vec<Vec<String>> {
    let words = |sentence: &str| {
        let joined = sentence.split_whitespace().collect::<Vec<_>>().join(" ");
        joined.split(' ').map(String::from).collect()
    };
    text.split('.').filter(|sentence| !sentence.is_empty()).map(words).collect()
}

/// The words of a longest common subsequence; of several, the one that the package finds.
fn common_words<'a>(reference: &'a [String], said: &[String]) -> Vec<&'a str> {
    let columns = said.len() + 1;
    let mut table = vec![0_u32; (reference.len() + 1) * columns];
    for (i, x) in reference.iter().enumerate() {
        for (j, y) in said.iter().enumerate() {
            let (here, above) = ((i + 1) * columns + j + 1, i * columns + j + 1);
            table[here] =
                if x == y { table[above - 1] + 1 } else { table[above].max(table[here - 1]) };
        }
    }
    let (mut i, mut j) = (reference.len(), said.len());
    let mut words = Vec::new();
    while i > 0 && j > 0 {
        if reference[i - 1] == said[j - 1] {
            words.push(reference[i - 1].as_str());
            (i, j) = (i - 1, j - 1);
        } else if table[(i - 1) * columns + j] > table[i * columns + j - 1] {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-7, "{found} {expected}");
    }

    #[test]
    fn rouge_l_by_hand() {
        near(rouge_l("the cat sat", "the cat sat"), 1.0);
        near(rouge_l("dog", "cat"), 0.0);
        // Common "police the gunman" of 4 and of 4 different words.
        near(rouge_l("police kill the gunman", "police the gunman killed"), 0.75);
        // Both sentences of the answer cover words of the reference: w1 w2 w3 w5 of 5 and of 8.
        near(rouge_l("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"), 2.0 * 0.5 * 0.8 / 1.3);
        // Repeated words count once.
        near(rouge_l("a a a", "a"), 1.0);
        // As the package prints it.
        let (said, right) = ("A long day. We went home. ", "We went home early. A day.");
        near(rouge_l(said, right), 0.7692307642603551);
        near(rouge_l("", "cat"), 0.0);
        near(rouge_l("...", "cat"), 0.0);
    }
}
