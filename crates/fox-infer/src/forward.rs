//! Model calls of the engine: a prefill chunk of one prompt, or the next token of several sequences op by op.

use fox_cache::{Cache, SequenceState};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Segments, Tape, Var};

use crate::sequence::Sequence;

/// Rows of logits to compute.
pub(crate) enum Rows {
    None,
    Last,
    All,
}

/// Prefills `chunk`; the logits of `rows`, `[rows, V]`.
pub(crate) fn read(
    model: &Model,
    chunk: &[i32],
    cache: &mut Cache,
    rows: Rows,
) -> fox_model::Result<Vec<f32>> {
    let device = model.device();
    let ids = device.from_i32(chunk, [chunk.len()])?;
    let segments = Segments::uniform(1, chunk.len());
    let mut tape = Tape::inference(device);
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &ids, &segments, Some(cache), &options)?;
    let states = match rows {
        Rows::None => return Ok(Vec::new()),
        Rows::All => hidden.states,
        Rows::Last => Var::constant(hidden.states.value().slice_rows(chunk.len() - 1, 1)?),
    };
    Ok(model.logits(&mut tape, &states)?.value().to_f32()?)
}

/// Feeds every sequence its next token; the logits `[n, V]`.
pub(crate) fn step(model: &Model, group: &mut [&mut Sequence]) -> fox_model::Result<Vec<f32>> {
    let tokens: Vec<i32> = group.iter().filter_map(|r| r.next()).collect();
    let cache = |r: &mut &mut Sequence| match r.cache.take() {
        Some(SequenceState::Cache(cache)) => Some(cache),
        _ => None,
    };
    let caches: Vec<Cache> = group.iter_mut().filter_map(cache).collect();
    let mut joined = Cache::join(caches)?;
    let rows: Vec<&[i32]> = tokens.chunks(1).collect();
    let result = model.decode(&rows, &mut joined, &ForwardOptions::default());
    for (r, cache) in group.iter_mut().zip(joined.split()?) {
        r.cache = Some(cache.into());
    }
    Ok(result?.to_f32()?)
}
