//! Readers: a model, or any other function that continues a text.

use fox_model::{Cache, ForwardOptions, Pruning};

use crate::subject::Subject;
use crate::{Error, Result};

/// Output of a reader for a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The greedy continuation.
    pub greedy: Vec<u32>,
    /// Natural log of the probability of each continuation that was asked for.
    pub log_probs: Vec<f64>,
}

/// Continues a text and judges continuations.
pub trait Reader {
    /// Reads `prompt`, generates `greedy` tokens and scores each of `continuations`.
    fn read(
        &mut self,
        prompt: &[u32],
        continuations: &[Vec<u32>],
        greedy: usize,
    ) -> Result<Reading>;
}

/// A language model. The prompt is computed once; every continuation branches off its decode state.
#[derive(Clone, Copy, Debug)]
pub struct ModelReader<'a> {
    subject: Subject<'a>,
    options: ForwardOptions,
}

impl<'a> ModelReader<'a> {
    /// A reader that skips attention blocks as `pruning` says.
    pub fn new(subject: Subject<'a>, pruning: Pruning) -> Self {
        ModelReader { subject, options: ForwardOptions { pruning, ..ForwardOptions::default() } }
    }

    /// Log-probabilities of the next token after `ids`.
    fn step(&self, ids: &[u32], cache: &mut Cache) -> Result<Vec<f64>> {
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let logits = self.subject.model.decode(&[&ids], cache, &self.options)?.to_f32()?;
        self.subject.check_finite(&logits, |id| format!("a logit of token {id}"))?;
        let logits = || logits.iter().map(|x| f64::from(*x));
        let largest = logits().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits().map(|x| (x - largest).exp()).sum();
        let norm = largest + sum.ln();
        Ok(logits().map(|x| x - norm).collect())
    }
}

impl Reader for ModelReader<'_> {
    fn read(
        &mut self,
        prompt: &[u32],
        continuations: &[Vec<u32>],
        greedy: usize,
    ) -> Result<Reading> {
        if prompt.is_empty() {
            return Err(Error::Empty { what: "the prompt".into() });
        }
        let longest = continuations.iter().map(Vec::len).max().unwrap_or(0).max(greedy);
        let mut cache = self.subject.model.new_cache(1, prompt.len() + longest)?;
        let first = self.step(prompt, &mut cache)?;
        let mut log_probs = Vec::with_capacity(continuations.len());
        for continuation in continuations {
            // A single token is scored by the logits of the prompt's last position.
            let mut branch = (continuation.len() > 1).then(|| cache.clone());
            let (mut total, mut next) = (0.0, first.clone());
            for (i, id) in continuation.iter().enumerate() {
                total += log_prob(&next, *id)?;
                if let Some(branch) = branch.as_mut().filter(|_| i + 1 < continuation.len()) {
                    next = self.step(&[*id], branch)?;
                }
            }
            log_probs.push(total);
        }
        let mut answer = Vec::with_capacity(greedy);
        let mut next = first;
        while answer.len() < greedy {
            let best = argmax(&next);
            answer.push(best);
            if answer.len() < greedy {
                next = self.step(&[best], &mut cache)?;
            }
        }
        Ok(Reading { greedy: answer, log_probs })
    }
}

fn log_prob(next: &[f64], id: u32) -> Result<f64> {
    next.get(id as usize).copied().ok_or_else(|| {
        Error::Argument(format!("token {id} is outside the model's {} ids", next.len()))
    })
}

/// The first of the largest values.
fn argmax(values: &[f64]) -> u32 {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best as u32
}
