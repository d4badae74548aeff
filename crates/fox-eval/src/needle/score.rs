//! Scores of needle answers.

use serde::{Deserialize, Serialize};

use super::{Case, Reader};
use crate::Result;

/// The score of one case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Whether the greedy answer contains what was expected.
    pub found: bool,
    /// Natural log of the probability of the right answer, divided by its tokens.
    pub log_prob: f64,
    /// Log-probability of the right answer less that of the best wrong one, where wrong ones are known;
    /// above 0, the right answer is preferred.
    pub margin: Option<f64>,
    /// Rank of the right answer by log-probability among all candidates, from 1; ties count as lost.
    #[serde(default)]
    pub rank: Option<usize>,
}

/// Asks a reader and scores its answer. `decode` turns ids into text for cases that expect text.
pub fn score(
    reader: &mut dyn Reader,
    case: &Case,
    answer_tokens: usize,
    decode: &dyn Fn(&[u32]) -> Result<String>,
) -> Result<Score> {
    let mut continuations = vec![case.answer.clone()];
    continuations.extend(case.wrong.iter().cloned());
    let reading = reader.read(&case.prompt, &continuations, answer_tokens)?;
    let found = match &case.expected {
        Some(text) => decode(&reading.greedy)?.contains(text.as_str()),
        None => reading.greedy.starts_with(&case.answer),
    };
    let right = reading.log_probs[0];
    let best_wrong = reading.log_probs[1..].iter().copied().reduce(f64::max);
    let above = reading.log_probs[1..].iter().filter(|wrong| **wrong >= right).count();
    Ok(Score {
        found,
        log_prob: right / case.answer.len().max(1) as f64,
        margin: best_wrong.map(|wrong| right - wrong),
        rank: best_wrong.map(|_| 1 + above),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::needle::Reading;

    /// Returns the same answer for every prompt.
    struct Fixed(Reading);

    impl Reader for Fixed {
        fn read(&mut self, _: &[u32], _: &[Vec<u32>], _: usize) -> Result<Reading> {
            Ok(self.0.clone())
        }
    }

    fn case(expected: Option<&str>) -> Case {
        Case {
            prompt: vec![1],
            answer: vec![7, 8],
            wrong: vec![vec![3], vec![4]],
            expected: expected.map(String::from),
        }
    }

    fn letters(ids: &[u32]) -> Result<String> {
        Ok(ids.iter().filter_map(|id| char::from_u32(96 + id)).collect())
    }

    #[test]
    fn scores_by_hand() {
        let mut reader =
            Fixed(Reading { greedy: vec![2, 7, 8], log_probs: vec![-3.0, -4.0, -2.5] });
        // Ids 2, 7, 8 read "bgh".
        let found = |reader: &mut Fixed, text| score(reader, &case(text), 3, &letters).unwrap();
        let text = found(&mut reader, Some("gh"));
        let expected = Score { found: true, log_prob: -1.5, margin: Some(-0.5), rank: Some(2) };
        assert_eq!(text, expected);
        assert!(!found(&mut reader, Some("hg")).found);
        // Without text the ids must come first.
        assert!(!found(&mut reader, None).found);
        reader.0.greedy = vec![7, 8, 1];
        assert!(found(&mut reader, None).found);
    }

    /// Answers of which only a part is right.
    #[test]
    fn needle_needs_the_full_answer() {
        let right = Reading { greedy: vec![7, 8], log_probs: vec![-1.0, -2.0, -2.0] };
        for greedy in [vec![7, 1], vec![7], vec![1, 8], vec![8, 7], vec![]] {
            let mut reader = Fixed(Reading { greedy: greedy.clone(), ..right.clone() });
            for text in [None, Some("gh")] {
                assert!(!score(&mut reader, &case(text), 2, &letters).unwrap().found, "{greedy:?}");
            }
        }
        for text in [None, Some("gh")] {
            assert!(score(&mut Fixed(right.clone()), &case(text), 2, &letters).unwrap().found);
        }
    }
}
