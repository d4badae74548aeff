//! Warm-up: compiles every kernel that requests will launch before the first request arrives.

use fox_cache::{Cache, PagePolicy};
use fox_model::{ForwardOptions, Model};

use crate::forward::{Rows, read};

/// Lengths of short prefill chunks: the end of a prompt, and few enough rows for the kernels of few rows.
const SHORT_CHUNKS: [usize; 2] = [33, 8];

/// Prefills full and short chunks, and without slots also decodes batches of all sizes, on devices that compile an op
/// at its first launch.
pub(crate) fn warm_up(
    model: &Model,
    policy: &PagePolicy,
    chunk: usize,
    decodes_in_slots: bool,
) -> fox_model::Result<()> {
    let caps = model.device().backend().caps();
    if !caps.compiles_kernels {
        return Ok(());
    }
    let prefilled = |chunks: &[usize]| -> fox_model::Result<Cache> {
        let mut cache = model.new_paged_cache(policy)?;
        for &len in chunks {
            read(model, &vec![0; len], &mut cache, Rows::Last)?;
        }
        Ok(cache)
    };
    let [short, shortest] = SHORT_CHUNKS;
    prefilled(&[chunk, chunk, short, shortest])?;
    let mut batch = if decodes_in_slots { usize::MAX } else { 1 };
    while batch <= caps.decode_batch {
        let caches = (0..batch).map(|_| prefilled(&[shortest]));
        let mut joined = Cache::join(caches.collect::<fox_model::Result<_>>()?)?;
        model.decode(&vec![&[0][..]; batch], &mut joined, &ForwardOptions::default())?;
        batch *= 2;
    }
    Ok(model.device().backend().synchronize()?)
}
