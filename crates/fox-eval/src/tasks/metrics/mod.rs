//! Metrics of answers, and the figures they add up to.
//!
//! Choices and likelihoods follow lm-evaluation-harness 0.4 (`lm_eval/api/task.py`, `process_results`, and
//! `lm_eval/api/metrics.py`); generated answers follow LongBench (`metrics.py`).

mod figure;
mod longbench;
mod rouge;

pub use figure::{Figure, Values};
pub use longbench::{classification, f1};
pub(crate) use longbench::{code_similarity, first_line};
pub(crate) use rouge::rouge_l;

use serde::{Deserialize, Serialize};

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Fraction of items whose right choice is the most likely; of a single continuation, the fraction that greedy
    /// decoding would generate.
    Acc,
    /// The same with log-likelihoods divided by the choices' characters.
    AccNorm,
    /// The same with log-likelihoods divided by the choices' bytes.
    AccBytes,
    /// Fraction of right answers that greedy decoding says word for word.
    ExactMatch,
    /// `exp` of the mean negative log-likelihood of the continuation.
    Perplexity,
    /// `exp` of the negative log-likelihood per word.
    WordPerplexity,
    /// `exp` of the negative log-likelihood per byte.
    BytePerplexity,
    /// Negative log-likelihood per byte, base 2.
    BitsPerByte,
    /// LongBench's F1 over the words of an answer.
    F1,
    /// LongBench's ROUGE-L.
    RougeL,
    /// LongBench's classification score.
    Classification,
    /// LongBench's edit similarity of a line of code.
    EditSimilarity,
}

impl Metric {
    /// As it is written in task files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Acc => "acc",
            Metric::AccNorm => "acc_norm",
            Metric::AccBytes => "acc_bytes",
            Metric::ExactMatch => "exact_match",
            Metric::Perplexity => "perplexity",
            Metric::WordPerplexity => "word_perplexity",
            Metric::BytePerplexity => "byte_perplexity",
            Metric::BitsPerByte => "bits_per_byte",
            Metric::F1 => "f1",
            Metric::RougeL => "rouge_l",
            Metric::Classification => "classification",
            Metric::EditSimilarity => "edit_similarity",
        }
    }

    /// Whether it is a fraction, which tables show in percent; the others are better when small.
    pub(crate) fn is_share(self) -> bool {
        !matches!(
            self,
            Metric::Perplexity
                | Metric::WordPerplexity
                | Metric::BytePerplexity
                | Metric::BitsPerByte
        )
    }
}

/// Length of the longest common subsequence.
pub(super) fn common<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for x in a {
        let mut diagonal = 0;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if x == y { diagonal + 1 } else { above.max(row[j]) };
            diagonal = above;
        }
    }
    row[b.len()]
}

/// How alike two texts are, 0 to 1: twice their common characters over all of them. This is the ratio of
/// python-Levenshtein, in which a substitution counts as two edits.
pub(crate) fn similarity(a: &str, b: &str) -> f64 {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    match a.len() + b.len() {
        0 => 1.0,
        total => 2.0 * common(&a, &b) as f64 / total as f64,
    }
}

/// The first of the largest values: the choice that is taken.
pub fn best(values: &[f64]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similarity_by_hand() {
        assert_eq!(common(b"abcd", b"bxd"), 2);
        assert_eq!(similarity("abcd", "bxd"), 4.0 / 7.0);
        assert_eq!((similarity("", ""), similarity("a", "")), (1.0, 0.0));
    }

    #[test]
    fn names_are_those_of_task_files() {
        for metric in [Metric::AccNorm, Metric::RougeL, Metric::F1, Metric::BitsPerByte] {
            let written = serde_json::to_value(metric).unwrap();
            assert_eq!(written, metric.name());
        }
    }

    #[test]
    fn ties_take_the_first_choice() {
        assert_eq!(best(&[-2.0, -1.0, -1.0]), 1);
    }
}
