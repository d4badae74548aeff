//! Greedy continuation and logits through the cache, in all the ways that must agree.

use fox_tensor::{Segments, Tape, Tensor};

use super::dump::{Dump, PROMPT};
use crate::{Cache, ForwardOptions, Model, Result};

/// How a continuation is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// Every step evaluates the whole sequence again.
    Full,
    /// Prompt and continuation go through the cache; the prompt in chunks of this many tokens.
    Cached { chunk: usize },
}

/// The ways to compute it, each with the name of its check.
pub(super) const METHODS: [(&str, Method); 4] = [
    ("greedy, evaluated in full", Method::Full),
    ("greedy, cached token by token", Method::Cached { chunk: 1 }),
    ("greedy, cached in chunks", Method::Cached { chunk: 4 }),
    ("greedy, cached prompt at once", Method::Cached { chunk: PROMPT }),
];

/// Prompt and continuation `[B * greedy_len]`. The reference uses no padding mask here.
pub(super) fn continuation(model: &Model, dump: &Dump, method: Method) -> Result<Vec<i32>> {
    let prompt = |b: usize| dump.input_ids[b * dump.time..][..PROMPT].to_vec();
    let mut sequences: Vec<Vec<i32>> = (0..dump.batch).map(prompt).collect();
    let mut cache = model.new_cache(dump.batch, 1)?;
    while sequences[0].len() < dump.greedy_len {
        let logits = match method {
            Method::Full => last_logits(model, &sequences)?,
            Method::Cached { chunk } => feed(model, &sequences, &mut cache, chunk)?,
        };
        let logits = logits.to_f64()?;
        let vocab = logits.len() / sequences.len();
        for (sequence, row) in sequences.iter_mut().zip(logits.chunks(vocab)) {
            sequence.push(argmax(row));
        }
    }
    Ok(sequences.concat())
}

/// Logits `[B, V]` after the last token of sequences of equal length, evaluated in full.
fn last_logits(model: &Model, sequences: &[Vec<i32>]) -> Result<Tensor> {
    let (device, time) = (model.device(), sequences[0].len());
    let tokens = device.from_i32(&sequences.concat(), [sequences.len() * time])?;
    let segments = Segments::uniform(sequences.len(), time);
    let mut tape = Tape::inference(device);
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &tokens, &segments, None, &options)?;
    let logits = model.logits(&mut tape, &hidden.states)?;
    let mut last =
        device.uninit([sequences.len(), logits.value().cols()], logits.value().dtype())?;
    for b in 0..sequences.len() {
        let row = (b + 1) * time - 1;
        device.backend().copy_rows(logits.value(), row, &mut last, b, 1)?;
    }
    Ok(last)
}

/// Feeds the tokens that are not in the cache, `chunk` at a time; returns the logits of the last step.
fn feed(model: &Model, sequences: &[Vec<i32>], cache: &mut Cache, chunk: usize) -> Result<Tensor> {
    loop {
        let seen = cache.lens()[0];
        let end = sequences[0].len().min(seen + chunk);
        let new: Vec<&[i32]> = sequences.iter().map(|s| &s[seen..end]).collect();
        let logits = model.decode(&new, cache, &ForwardOptions::default())?;
        if end == sequences[0].len() {
            return Ok(logits);
        }
    }
}

/// The logits of all real positions through the cache, and the dump's: each step brings up to
/// `chunk` tokens of every sequence, so sequences of different length end at different steps.
pub(super) fn cached_logits(
    model: &Model,
    dump: &Dump,
    chunk: usize,
) -> Result<(Vec<f64>, Vec<f32>)> {
    let device = model.device();
    let mut cache = model.new_cache(dump.sequences.len(), 1)?;
    let vocab = model.config().vocab_size;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    loop {
        let mut cu_seqlens = vec![0];
        let mut tokens = Vec::new();
        for (n, rows) in dump.sequences.iter().enumerate() {
            let (sequence, seen) = (dump.sequence(n), cache.lens()[n]);
            let new = &sequence[seen..sequence.len().min(seen + chunk)];
            tokens.extend_from_slice(new);
            cu_seqlens.push(tokens.len());
            let row = rows.start + seen;
            want.extend_from_slice(&dump.logits[row * vocab..(row + new.len()) * vocab]);
        }
        if tokens.is_empty() {
            return Ok((got, want));
        }
        let ids = device.from_i32(&tokens, [tokens.len()])?;
        let segments = Segments::packed(&cu_seqlens)?;
        let mut tape = Tape::inference(device);
        let options = ForwardOptions::default();
        let hidden = model.forward(&mut tape, &ids, &segments, Some(&mut cache), &options)?;
        got.extend(model.logits(&mut tape, &hidden.states)?.value().to_f64()?);
    }
}

/// The first of the largest values, as the reference breaks ties.
fn argmax(row: &[f64]) -> i32 {
    let mut best = 0;
    for (i, &value) in row.iter().enumerate() {
        if value > row[best] {
            best = i;
        }
    }
    best as i32
}
