//! Greedy answers.

use fox_model::{SequenceState, TokenDecoder};

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

/// The greedy continuations of prompts, decoded together as far as `decoder` allows. `enough` is asked after every token
/// of an answer whether it is the last.
///
/// # Errors
/// An empty prompt, logits that are not finite numbers, and whatever computing can fail with.
pub fn greedy(
    subject: &Subject<'_>,
    decoder: &mut TokenDecoder<'_>,
    prompts: &[Vec<u32>],
    ending: &Ending,
    enough: impl Fn(&[u32]) -> Result<bool>,
) -> Result<Vec<Vec<u32>>> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + ending.max_tokens;
    let width = decoder.reserve(longest)?;
    let mut answers = Vec::with_capacity(prompts.len());
    for group in prompts.chunks(width) {
        let mut running = Vec::with_capacity(group.len());
        for prompt in group {
            running.push(Answer::begin(subject, decoder, prompt, ending, &enough)?);
        }
        while running.iter().any(|answer| !answer.is_complete) {
            let (mut open, mut tokens) = (Vec::new(), Vec::new());
            for answer in running.iter_mut().filter(|answer| !answer.is_complete) {
                tokens.push(answer.tokens.last().map_or(0, |id| *id as i32));
                open.push(answer);
            }
            let mut states: Vec<_> = open.iter_mut().map(|answer| &mut answer.state).collect();
            let logits = decoder.step(&mut states, &tokens)?;
            for (answer, logits) in open.into_iter().zip(logits) {
                answer.add(subject, &logits, ending, &enough)?;
            }
        }
        answers.extend(running.into_iter().map(|answer| answer.tokens));
    }
    Ok(answers)
}

/// An answer and the decode state behind it.
struct Answer {
    state: SequenceState,
    tokens: Vec<u32>,
    is_complete: bool,
}

impl Answer {
    /// Prefills the prompt and takes the first token.
    fn begin(
        subject: &Subject<'_>,
        decoder: &mut TokenDecoder<'_>,
        prompt: &[u32],
        ending: &Ending,
        enough: &impl Fn(&[u32]) -> Result<bool>,
    ) -> Result<Answer> {
        if prompt.is_empty() {
            return Err(Error::Empty { what: "the prompt".into() });
        }
        let ids: Vec<i32> = prompt.iter().map(|id| *id as i32).collect();
        let mut cache = decoder.new_cache(prompt.len() + ending.max_tokens)?;
        let is_complete = ending.max_tokens == 0;
        let logits = if is_complete { Vec::new() } else { decoder.prefill(&ids, &mut cache)? };
        let mut answer = Answer { state: cache.into(), tokens: Vec::new(), is_complete };
        if !is_complete {
            answer.add(subject, &logits, ending, enough)?;
        }
        Ok(answer)
    }

    /// Takes the most likely next token.
    fn add(
        &mut self,
        subject: &Subject<'_>,
        logits: &[f32],
        ending: &Ending,
        enough: &impl Fn(&[u32]) -> Result<bool>,
    ) -> Result<()> {
        subject.check_finite(logits, |id| format!("a logit of token {id}"))?;
        let barred: &[u32] = if self.tokens.len() < ending.min_tokens { &ending.ids } else { &[] };
        let best = most_likely(logits, barred);
        self.is_complete = ending.ids.contains(&best);
        if !self.is_complete {
            self.tokens.push(best);
            self.is_complete = self.tokens.len() >= ending.max_tokens || enough(&self.tokens)?;
        }
        Ok(())
    }
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
