//! Readers: a model, or any other function that continues a text.

use fox_model::{Cache, ForwardOptions, Pruning, SequenceState, TokenDecoder};

use crate::subject::Subject;
use crate::tasks::{Likelihood, Scorer, Verdict};
use crate::{Error, Result};

/// Keys of all branches of a batch: a device that gathers pages holds a copy of the prompt's for every branch.
const BRANCH_KEYS: usize = 1 << 19;
/// Continuations of a batch, at most.
const MAX_BRANCHES: usize = 64;

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

/// A language model. The prompt is computed once, into pages that all continuations share; the continuations are then
/// scored in batches.
#[derive(Debug)]
pub struct ModelReader<'a> {
    subject: Subject<'a>,
    options: ForwardOptions,
    decoder: TokenDecoder<'a>,
}

impl<'a> ModelReader<'a> {
    /// A reader that skips attention blocks as `pruning` says.
    pub fn new(subject: Subject<'a>, pruning: Pruning) -> Self {
        let options = ForwardOptions { pruning, ..ForwardOptions::default() };
        ModelReader { subject, options, decoder: subject.model.token_decoder(options) }
    }

    /// The `count` most likely tokens, one after the other, after the prompt in `cache`, whose last token is `last`.
    fn greedy(&mut self, last: u32, count: usize, mut cache: Cache) -> Result<Vec<u32>> {
        let mut answer: Vec<u32> = Vec::with_capacity(count);
        if count == 0 {
            return Ok(answer);
        }
        self.decoder.reserve(cache.lens().iter().sum::<usize>() + 1 + count)?;
        let mut logits = self.decoder.prefill(&[last as i32], &mut cache)?;
        let mut state = SequenceState::from(cache);
        loop {
            self.subject.check_finite(&logits, |id| format!("a logit of token {id}"))?;
            let best = argmax(&logits);
            answer.push(best);
            if answer.len() == count {
                return Ok(answer);
            }
            logits = self.decoder.step(&mut [&mut state], &[best as i32])?.concat();
        }
    }

    /// Log-probabilities of continuations after the prompt in `cache`, whose last token is `last`.
    fn score(&self, last: u32, continuations: &[Vec<u32>], cache: &Cache) -> Result<Vec<f64>> {
        let scorer = Scorer { subject: &self.subject, options: &self.options };
        let mut found = vec![Likelihood { log_prob: 0.0, is_greedy: true }; continuations.len()];
        let keys = cache.lens().iter().sum::<usize>() + 1;
        let rows = (BRANCH_KEYS / keys).clamp(1, MAX_BRANCHES);
        let judged: Vec<usize> =
            (0..continuations.len()).filter(|i| !continuations[*i].is_empty()).collect();
        for batch in judged.chunks(rows) {
            let mut branches =
                Cache::join(vec![cache.clone(); batch.len()]).map_err(fox_model::Error::from)?;
            let (mut read, mut verdicts) = (Vec::new(), Vec::new());
            let mut row = 0;
            for &request in batch {
                let continuation = &continuations[request];
                // The last token is judged, not read.
                read.push([&[last], &continuation[..continuation.len() - 1]].concat());
                for &token in continuation {
                    verdicts.push(Verdict { row, token, request });
                    row += 1;
                }
            }
            let read: Vec<&[u32]> = read.iter().map(Vec::as_slice).collect();
            scorer.add(&scorer.states(&read, &mut branches)?, &verdicts, &mut found)?;
        }
        Ok(found.iter().map(|likelihood| likelihood.log_prob).collect())
    }
}

impl Reader for ModelReader<'_> {
    fn read(
        &mut self,
        prompt: &[u32],
        continuations: &[Vec<u32>],
        greedy: usize,
    ) -> Result<Reading> {
        let Some((&last, before)) = prompt.split_last() else {
            return Err(Error::Empty { what: "the prompt".into() });
        };
        let model = self.subject.model;
        let vocab = model.config().vocab_size;
        if let Some(id) = continuations.iter().flatten().find(|id| **id as usize >= vocab) {
            return Err(Error::Argument(format!("token {id} is outside the model's {vocab} ids")));
        }
        let mut cache = model.new_paged_cache(&model.page_policy(None, 0)?)?;
        if !before.is_empty() {
            let scorer = Scorer { subject: &self.subject, options: &self.options };
            scorer.states(&[before], &mut cache)?;
        }
        let log_probs = self.score(last, continuations, &cache)?;
        Ok(Reading { greedy: self.greedy(last, greedy, cache)?, log_probs })
    }
}

/// The first of the largest values.
fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best as u32
}
