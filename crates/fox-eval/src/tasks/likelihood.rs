//! How likely continuations are.
//!
//! Requests with the same context are one group. Groups of similar length form a batch: their contexts run
//! through the model once, side by side, and every continuation then branches off the decode state. Only the
//! rows that judge a token are projected to logits, a chunk at a time.

use std::collections::HashMap;

use fox_model::ForwardOptions;
use fox_tensor::{DType, Segments, Tape, Tensor, Var};
use rayon::prelude::*;

use crate::subject::Subject;
use crate::{Error, Result};

/// Tokens of a batch's contexts and longest continuations, unless a single group has more.
const BATCH_TOKENS: usize = 4096;
/// Logits held at once: 16 MiB, and 64 rows at least.
const LOGITS: usize = 4 << 20;

/// A continuation to be judged after a context; neither is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is read first.
    pub context: Vec<u32>,
    /// What is judged.
    pub continuation: Vec<u32>,
}

/// Likelihood of a continuation under a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likelihood {
    /// Natural log of its probability.
    pub log_prob: f64,
    /// Whether greedy decoding would generate it.
    pub is_greedy: bool,
}

/// Judges all requests, in their order. `progress` receives the number of finished requests.
///
/// # Errors
/// An empty context or continuation, ids that the model does not know, logits that are not finite numbers, and
/// whatever computing can fail with.
pub fn log_likelihoods(
    subject: &Subject<'_>,
    requests: &[Request],
    options: &ForwardOptions,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Likelihood>> {
    check(subject, requests)?;
    let mut found = vec![Likelihood { log_prob: 0.0, is_greedy: true }; requests.len()];
    let groups = groups(requests);
    let mut done = 0;
    let mut rest = &groups[..];
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = rest.iter().take_while(|group| {
            tokens += group.tokens(requests);
            tokens <= BATCH_TOKENS
        });
        let (batch, behind) = rest.split_at(fits.count().max(1));
        Batch { scorer: Scorer { subject, options }, requests, groups: batch }.judge(&mut found)?;
        done += batch.iter().map(|group| group.members.len()).sum::<usize>();
        progress(done);
        rest = behind;
    }
    Ok(found)
}

fn check(subject: &Subject<'_>, requests: &[Request]) -> Result<()> {
    let vocab = subject.model.config().vocab_size;
    for request in requests {
        if request.context.is_empty() || request.continuation.is_empty() {
            return Err(Error::Empty { what: "a context or a continuation".into() });
        }
        let mut ids = request.context.iter().chain(&request.continuation);
        if let Some(id) = ids.find(|id| **id as usize >= vocab) {
            return Err(Error::Argument(format!("token {id} is outside the model's {vocab} ids")));
        }
    }
    Ok(())
}

/// The requests with one context, by number.
struct Group {
    members: Vec<usize>,
}

impl Group {
    fn context<'r>(&self, requests: &'r [Request]) -> &'r [u32] {
        &requests[self.members[0]].context
    }

    fn tokens(&self, requests: &[Request]) -> usize {
        let longest = self.members.iter().map(|&r| requests[r].continuation.len()).max();
        self.context(requests).len() + longest.unwrap_or(0)
    }
}

/// Groups of requests, the longest first, so that a batch that is too large fails at once.
fn groups(requests: &[Request]) -> Vec<Group> {
    let mut numbers: HashMap<&[u32], usize> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    for (r, request) in requests.iter().enumerate() {
        let group = *numbers.entry(&request.context).or_insert_with(|| {
            groups.push(Group { members: Vec::new() });
            groups.len() - 1
        });
        groups[group].members.push(r);
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.tokens(requests)));
    groups
}

/// A token to be judged by the logits of a row.
pub(crate) struct Verdict {
    /// Row of the hidden states.
    pub row: usize,
    /// The token that follows it.
    pub token: u32,
    /// Number of the continuation that it belongs to.
    pub request: usize,
}

struct Batch<'a> {
    scorer: Scorer<'a>,
    requests: &'a [Request],
    groups: &'a [Group],
}

impl Batch<'_> {
    fn judge(&self, found: &mut [Likelihood]) -> Result<()> {
        let longest = self.groups.iter().map(|group| group.tokens(self.requests)).max();
        let mut cache =
            self.scorer.subject.model.new_cache(self.groups.len(), longest.unwrap_or(1))?;
        let contexts: Vec<&[u32]> =
            self.groups.iter().map(|group| group.context(self.requests)).collect();
        let states = self.scorer.states(&contexts, &mut cache)?;
        // The last token of a context judges the first of all its continuations.
        let mut verdicts = Vec::new();
        let mut end = 0;
        for (group, context) in self.groups.iter().zip(&contexts) {
            end += context.len();
            verdicts.extend(group.members.iter().map(|&request| Verdict {
                row: end - 1,
                token: self.requests[request].continuation[0],
                request,
            }));
        }
        self.scorer.add(&states, &verdicts, found)?;
        drop(states);
        let turns = self.groups.iter().map(|group| group.members.len()).max().unwrap_or(0);
        for turn in 0..turns {
            // The last branch needs no copy.
            match turn + 1 < turns {
                true => self.branch(turn, &mut cache.clone(), found)?,
                false => self.branch(turn, &mut cache, found)?,
            }
        }
        Ok(())
    }

    /// The continuation number `turn` of every group that has as many.
    fn branch(
        &self,
        turn: usize,
        cache: &mut fox_model::Cache,
        found: &mut [Likelihood],
    ) -> Result<()> {
        let mut read: Vec<&[u32]> = Vec::with_capacity(self.groups.len());
        let mut verdicts = Vec::new();
        let mut row = 0;
        for group in self.groups {
            let Some(&request) = group.members.get(turn) else {
                read.push(&[]);
                continue;
            };
            let continuation = &self.requests[request].continuation;
            // The last token is judged, not read.
            read.push(&continuation[..continuation.len() - 1]);
            for &token in &continuation[1..] {
                verdicts.push(Verdict { row, token, request });
                row += 1;
            }
        }
        if verdicts.is_empty() {
            return Ok(());
        }
        let states = self.scorer.states(&read, cache)?;
        self.scorer.add(&states, &verdicts, found)
    }
}

/// A model that judges tokens.
#[derive(Clone, Copy)]
pub(crate) struct Scorer<'a> {
    pub subject: &'a Subject<'a>,
    pub options: &'a ForwardOptions,
}

impl Scorer<'_> {
    /// Normalised states `[R, D]` of new tokens of every sequence, one after the other.
    pub fn states(&self, tokens: &[&[u32]], cache: &mut fox_model::Cache) -> Result<Tensor> {
        let mut ends = vec![0];
        for new in tokens {
            ends.push(ends[ends.len() - 1] + new.len());
        }
        let segments = Segments::packed(&ends)?;
        let ids: Vec<i32> = tokens.concat().into_iter().map(|id| id as i32).collect();
        let device = self.subject.model.device();
        let ids = device.from_i32(&ids, [ids.len()])?;
        let mut tape = Tape::inference(device);
        let hidden =
            self.subject.model.forward(&mut tape, &ids, &segments, Some(cache), self.options)?;
        Ok(hidden.states.value().clone())
    }

    /// Adds the verdicts, which are in the order of their rows, to what was found before.
    pub fn add(
        &self,
        states: &Tensor,
        verdicts: &[Verdict],
        found: &mut [Likelihood],
    ) -> Result<()> {
        let vocab = self.subject.model.config().vocab_size;
        let device = self.subject.model.device();
        let by_row: Vec<&[Verdict]> = verdicts.chunk_by(|a, b| a.row == b.row).collect();
        for rows in by_row.chunks((LOGITS / vocab).max(64)) {
            let mut chosen = device.zeros([rows.len(), states.cols()], DType::F32)?;
            for (i, row) in rows.iter().enumerate() {
                device.backend().copy_rows(states, row[0].row, &mut chosen, i, 1)?;
            }
            let mut tape = Tape::inference(device);
            let logits =
                self.subject.model.logits(&mut tape, &Var::constant(chosen))?.value().to_f32()?;
            self.subject.check_finite(&logits, |at| format!("a logit of token {}", at % vocab))?;
            let judged: Vec<Vec<(f64, bool)>> = logits
                .par_chunks(vocab)
                .zip(rows)
                .map(|(logits, row)| verdicts_of(logits, row))
                .collect();
            for (row, judged) in rows.iter().zip(judged) {
                for (verdict, (log_prob, is_greedy)) in row.iter().zip(judged) {
                    let likelihood = &mut found[verdict.request];
                    likelihood.log_prob += log_prob;
                    likelihood.is_greedy &= is_greedy;
                }
            }
        }
        Ok(())
    }
}

/// Log-probability of each token, and whether it is the most likely one.
fn verdicts_of(logits: &[f32], verdicts: &[Verdict]) -> Vec<(f64, bool)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let best = logits.iter().position(|x| *x == largest);
    // Terms in f32 are good to 1e-7 each, and their sum is kept in f64.
    let sum: f64 = logits.iter().map(|x| f64::from((x - largest).exp())).sum();
    let verdict = |v: &Verdict| {
        let log_prob = f64::from(logits[v.token as usize]) - f64::from(largest) - sum.ln();
        (log_prob, best == Some(v.token as usize))
    };
    verdicts.iter().map(verdict).collect()
}
