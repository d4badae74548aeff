//! Everything that requests need is compiled and planned before the first one comes.

use fox_cache::{Cache, PagePolicy};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Segments, Tape, Var};

/// Lets a device that compiles and plans when something is used for the first time do so now: pieces of prompts, with
/// and without tokens before them, and decode steps.
pub(crate) fn warm_up(model: &Model, policy: &PagePolicy, piece: usize) -> fox_model::Result<()> {
    let caps = model.device().backend().caps();
    if caps.decode.is_none() {
        return Ok(());
    }
    let options = ForwardOptions::default();
    let mut sizes = 1;
    while sizes <= caps.decode_batch {
        let caches: fox_model::Result<Vec<Cache>> =
            (0..sizes).map(|_| read_pieces(model, policy, &[8])).collect();
        let mut joined = Cache::join(caches?)?;
        model.decode(&vec![&[0][..]; sizes], &mut joined, &options)?;
        sizes *= 2;
    }
    read_pieces(model, policy, &[piece, piece, 33])?;
    Ok(model.device().backend().synchronize()?)
}

/// A cache after pieces of so many tokens.
fn read_pieces(model: &Model, policy: &PagePolicy, pieces: &[usize]) -> fox_model::Result<Cache> {
    let device = model.device();
    let mut cache = model.new_paged_cache(policy)?;
    for &len in pieces {
        let ids = device.from_i32(&vec![0; len], [len])?;
        let segments = Segments::uniform(1, len);
        let mut tape = Tape::inference(device);
        let options = ForwardOptions::default();
        let hidden = model.forward(&mut tape, &ids, &segments, Some(&mut cache), &options)?;
        let last = Var::constant(hidden.states.value().slice_rows(len - 1, 1)?);
        model.logits(&mut tape, &last)?.value().to_f32()?;
    }
    Ok(cache)
}
