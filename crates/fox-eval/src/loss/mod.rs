//! Loss at every position: what perplexity hides.
//!
//! A model that uses long context has a per-token loss L(i) that keeps falling with the position i. The
//! slope dL/d(ln i) shows this; a perplexity, which averages over positions, does not.
//!
//! Documents are read one batch after the other and only sums are kept ([`LossSums`]), so memory does
//! not depend on their number. The logits of a document are never held at once: the output projection
//! and the cross-entropy are one op that works in blocks.

mod bins;
mod curve;
mod output;
mod state;
mod sums;

pub use bins::Bins;
pub use curve::{CurvePoint, LossCurve, Perplexity};
pub use output::{LossReport, loss_chart, raw_points, slope_chart};
pub use sums::{GROUPS, LossSums};

use std::path::Path;

use fox_data::Dataset;
use fox_model::{ForwardOptions, Pruning};
use fox_tensor::{Segments, Tape};

use crate::subject::Subject;
use crate::{Error, Result};
use state::StateFile;

/// Short documents are evaluated together, up to this many tokens at a time.
const BATCH_TOKENS: usize = 4096;

/// What to evaluate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossOptions {
    /// Tokens of every document, from its start; shorter documents are passed over.
    pub length: usize,
    /// How many documents, at most.
    pub documents: u64,
    /// Which attention blocks may be skipped.
    pub pruning: Pruning,
}

/// Sums the losses of the first documents that are long enough.
///
/// With a state file the sums are kept there: an evaluation that was stopped goes on, and one that is
/// asked for more documents adds only those. `progress` is told the documents done.
///
/// # Errors
/// No document of this length, a model with a smaller vocabulary than the data, a state file of another
/// evaluation, a loss that is NaN or infinite, and whatever reading and computing can fail with.
pub fn evaluate_loss(
    subject: &Subject<'_>,
    data: &dyn Dataset,
    options: &LossOptions,
    state: Option<&Path>,
    mut progress: impl FnMut(u64),
) -> Result<LossSums> {
    let LossOptions { length, documents, .. } = *options;
    if length == 0 || documents == 0 {
        return Err(Error::Argument(
            "a length and a number of documents above 0 are needed".into(),
        ));
    }
    subject.check_data(data)?;
    let longest = data.lengths().longest();
    if longest == 0 {
        return Err(Error::Empty { what: "every document of the data".into() });
    }
    if longest < length as u64 {
        return Err(Error::TooShort { length, longest });
    }
    let mut file = StateFile::open(state, subject, data, options)?;
    let bins = Bins::new(length);
    let mut sums = file.take_sums();
    let batch = (BATCH_TOKENS / length).max(1) as u64;
    while sums.documents < documents {
        let wanted = batch.min(documents - sums.documents);
        let tokens = next_documents(data, &mut sums, wanted as usize)?;
        if tokens.is_empty() {
            break;
        }
        for losses in losses_of(subject, data.bos(), &tokens, length, options.pruning)? {
            subject.check_finite(&losses, |at| format!("a loss at position {}", at + 1))?;
            sums.add(&losses, &bins);
        }
        file.save_now_and_then(&sums)?;
        progress(sums.documents);
    }
    file.save(&sums)?;
    Ok(sums)
}

/// The next documents that are long enough, cut to the length, end to end; fewer than wanted at the end
/// of the data.
fn next_documents(data: &dyn Dataset, sums: &mut LossSums, wanted: usize) -> Result<Vec<u32>> {
    let length = sums.length();
    let mut tokens = Vec::with_capacity(wanted * length);
    let mut next = sums.documents + sums.skipped;
    while tokens.len() < wanted * length {
        match data.lengths().len_of(next) {
            None => break,
            Some(len) if len < length as u64 => sums.skipped += 1,
            Some(_) => {
                let start = tokens.len();
                tokens.resize(start + length, 0);
                data.read(next, 0, &mut tokens[start..])?;
            }
        }
        next += 1;
    }
    Ok(tokens)
}

/// The loss of every token of documents of equal length.
fn losses_of(
    subject: &Subject<'_>,
    bos: u32,
    tokens: &[u32],
    length: usize,
    pruning: Pruning,
) -> Result<Vec<Vec<f32>>> {
    let device = subject.model.device();
    let rows = tokens.len();
    let mut inputs = Vec::with_capacity(rows);
    for document in tokens.chunks(length) {
        inputs.push(bos as i32);
        inputs.extend(document[..length - 1].iter().map(|id| *id as i32));
    }
    let labels: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
    let (inputs, labels) = (device.from_i32(&inputs, [rows])?, device.from_i32(&labels, [rows])?);
    // Without a recording tape the weights of the losses are not looked at.
    let weights = device.full([rows], 1.0)?;
    let segments = Segments::uniform(rows / length, length);
    let mut tape = Tape::inference(device);
    let options = ForwardOptions { pruning, ..ForwardOptions::default() };
    let loss = subject.model.loss(&mut tape, &inputs, &labels, &weights, &segments, &options)?;
    Ok(loss.per_token.to_f32()?.chunks(length).map(<[f32]>::to_vec).collect())
}
