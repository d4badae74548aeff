//! Greedy answers.

use fox_model::ForwardOptions;

use crate::subject::Subject;
use crate::{Error, Result};

/// When an answer ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Tokens, at most.
    pub max_tokens: usize,
    /// Ids that end it and are no part of it.
    pub ids: Vec<u32>,
    /// Tokens that are said before an id may end it.
    pub min_tokens: usize,
}

/// The greedy continuation of `prompt`. `enough` is asked after every token whether it is the last.
///
/// # Errors
/// An empty prompt, logits that are not finite numbers, and whatever computing can fail with.
pub fn greedy(
    subject: &Subject<'_>,
    prompt: &[u32],
    ending: &Ending,
    options: &ForwardOptions,
    enough: impl Fn(&[u32]) -> Result<bool>,
) -> Result<Vec<u32>> {
    if prompt.is_empty() {
        return Err(Error::Empty { what: "the prompt".into() });
    }
    let mut cache = subject.model.new_cache(1, prompt.len() + ending.max_tokens)?;
    let mut new: Vec<i32> = prompt.iter().map(|id| *id as i32).collect();
    let mut answer = Vec::new();
    while answer.len() < ending.max_tokens {
        let logits = subject.model.decode(&[&new], &mut cache, options)?.to_f32()?;
        subject.check_finite(&logits, |id| format!("a logit of token {id}"))?;
        let barred: &[u32] = if answer.len() < ending.min_tokens { &ending.ids } else { &[] };
        let best = most_likely(&logits, barred);
        if ending.ids.contains(&best) {
            break;
        }
        answer.push(best);
        if enough(&answer)? {
            break;
        }
        new = vec![best as i32];
    }
    Ok(answer)
}

/// The first of the largest, except those that are barred.
fn most_likely(logits: &[f32], barred: &[u32]) -> u32 {
    let mut best: Option<u32> = None;
    for (id, value) in (0..).zip(logits) {
        if !barred.contains(&id) && best.is_none_or(|b| *value > logits[b as usize]) {
            best = Some(id);
        }
    }
    best.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn barred_ids_are_not_generated() {
        let logits = [1.0, 5.0, 3.0, 5.0];
        assert_eq!(most_likely(&logits, &[]), 1);
        assert_eq!(most_likely(&logits, &[1]), 3);
        assert_eq!(most_likely(&logits, &[1, 3]), 2);
    }
}
