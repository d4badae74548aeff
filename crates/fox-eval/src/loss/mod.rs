//! Loss at every position: what perplexity hides. For encoders it is the pseudo-likelihood.
//!
//! A model that uses long context has a per-token loss L(i) that keeps falling with the position i. The
//! slope dL/d(ln i) shows this; a perplexity, which averages over positions, does not.
//!
//! The first chunks of all documents are read, then their second chunks ([`fox_data::DocumentChunks`]), as in the evaluations
//! during training (encoders: other masked tokens): the same number of chunks of the same length gives the same loss. Only sums are kept
//! ([`LossSums`]), so memory does not depend on the number of documents. The logits of a document are never held at once: the output projection
//! and the cross-entropy are one op that works in blocks.

mod bins;
mod curve;
mod masked;
mod output;
mod state;
mod sums;

pub use bins::Bins;
pub use curve::{CurvePoint, LossCurve, Perplexity};
pub use masked::MASK_EVERY;
pub(crate) use output::slope_chart;
pub use output::{LossReport, loss_chart};
pub use sums::{GROUPS, LossSums};

use std::path::Path;

use fox_data::{Dataset, DocumentChunk, DocumentChunks};
use fox_dist::Group;
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
    /// Tokens of a chunk; shorter documents are passed over.
    pub length: usize,
    /// How many chunks, at most: of as many documents, and further ones of the same where there are fewer.
    pub documents: u64,
    /// Which attention blocks may be skipped.
    pub pruning: Pruning,
    /// Encoders: one token of so many is masked at a time, in as many passes; [`MASK_EVERY`] is usual.
    pub mask_every: usize,
}

/// [`evaluate_loss_in`] a single process.
pub fn evaluate_loss(
    subject: &Subject<'_>,
    data: &dyn Dataset,
    options: &LossOptions,
    state: Option<&Path>,
    progress: impl FnMut(u64),
) -> Result<LossSums> {
    evaluate_loss_in(&Group::alone(), subject, data, options, state, progress)
}

/// Sums the losses of the first chunks of documents that are long enough. Several processes that call this with the same
/// model and data share the chunks; each gets the sums of all, with the bits of one process.
///
/// With a state file the sums are kept there: a stopped evaluation resumes, and one that is
/// asked for more documents adds only those; the first process alone reads and writes it. `progress` receives the number of finished chunks. The bootstrap's unit is the document;
/// with a single one it is the chunk.
///
/// # Errors
/// No document of this length, a model with a smaller vocabulary than the data, another model or other data in another
/// process, a state file of another evaluation, a loss that is NaN or infinite, and whatever reading and computing can
/// fail with.
pub fn evaluate_loss_in(
    group: &Group,
    subject: &Subject<'_>,
    data: &dyn Dataset,
    options: &LossOptions,
    state: Option<&Path>,
    mut progress: impl FnMut(u64),
) -> Result<LossSums> {
    let LossOptions { length, documents, .. } = *options;
    if length == 0 || documents == 0 || options.mask_every == 0 {
        return Err(Error::Argument(
            "a length, a number of documents and a distance of masks above 0 are needed".into(),
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
    let evaluation = match state.is_some() || group.size() > 1 {
        true => identity(subject, data, options)?,
        false => String::new(),
    };
    let remedy = "give all ranks the same models and data";
    group.check_same(&evaluation, "another model or other data", remedy)?;
    let mut file = StateFile::open(state.filter(|_| group.is_first()), evaluation, length)?;
    let bins = Bins::new(length);
    let mut sums = first_sums(group, file.take_sums())?;
    let mut chunks = DocumentChunks::new(data.lengths(), length);
    let single = chunks.clone().nth(1).is_none_or(|second| second.start > 0);
    for _ in 0..sums.chunks {
        chunks.next();
    }
    let batch = (BATCH_TOKENS / length).max(1) as u64;
    while sums.chunks < documents {
        // A batch for each process.
        let wanted = (batch * group.size() as u64).min(documents - sums.chunks);
        let read: Vec<DocumentChunk> = chunks.by_ref().take(wanted as usize).collect();
        sums.skipped = chunks.too_short();
        if read.is_empty() {
            break;
        }
        let own = match read.chunks(batch as usize).nth(group.rank()) {
            Some(read) => {
                let tokens = tokens_of(data, read, length)?;
                losses_of(subject, data.bos(), &tokens, options)?
            }
            None => Vec::new(),
        };
        let losses = group.all_values(&own)?;
        for (chunk, losses) in read.iter().zip(losses.chunks(length)) {
            subject.check_finite(losses, |at| format!("a loss at position {}", at + 1))?;
            sums.documents = sums.documents.max(chunk.ordinal + 1);
            let unit = if single { sums.chunks } else { chunk.ordinal };
            sums.add(unit, losses, &bins);
        }
        file.save_now_and_then(&sums)?;
        progress(sums.chunks);
    }
    file.save(&sums)?;
    Ok(sums)
}

/// What is evaluated on what: sums of anything else cannot be added.
fn identity(subject: &Subject<'_>, data: &dyn Dataset, options: &LossOptions) -> Result<String> {
    let (model, data, length) = (subject.fingerprint()?, data.identity(), options.length);
    let masks = match subject.model.config().is_encoder() {
        true => format!(" with one of {} tokens masked", options.mask_every),
        false => String::new(),
    };
    Ok(format!("model {model:016x} at length {length}{masks} on {data}"))
}

/// The sums that the first process begins with.
fn first_sums(group: &Group, own: LossSums) -> Result<LossSums> {
    if group.size() == 1 {
        return Ok(own);
    }
    let wrong = |e: serde_json::Error| Error::Argument(format!("sums of another process: {e}"));
    let text = serde_json::to_vec(&own).map_err(wrong)?;
    serde_json::from_slice(&group.broadcast(0, &text)?).map_err(wrong)
}

/// The tokens of chunks, end to end.
fn tokens_of(data: &dyn Dataset, chunks: &[DocumentChunk], length: usize) -> Result<Vec<u32>> {
    let mut tokens = vec![0; chunks.len() * length];
    for (chunk, out) in chunks.iter().zip(tokens.chunks_mut(length)) {
        data.read(chunk.document, chunk.start, out)?;
    }
    Ok(tokens)
}

/// The loss of every token of documents of equal length, end to end.
fn losses_of(
    subject: &Subject<'_>,
    bos: u32,
    tokens: &[u32],
    options: &LossOptions,
) -> Result<Vec<f32>> {
    let LossOptions { length, pruning, mask_every, .. } = *options;
    if subject.model.config().is_encoder() {
        return masked::masked_losses_of(subject, tokens, length, mask_every, pruning);
    }
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
    Ok(loss.per_token.to_f32()?)
}
