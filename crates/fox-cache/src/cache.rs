//! The decode state of a batch of sequences.
//!
//! In a contiguous cache, rows `b * capacity ..` of every layer's tensors belong to sequence `b`. Padding is never stored:
//! a sequence starts at its first real token, and so do its positions. The capacity doubles when it is reached. A paged
//! cache stores keys in pages, which can be evicted and shared between sequences; such caches can be joined for a step
//! and split again.
//!
//! A step has any number of new tokens per sequence, possibly none:
//!
//! ```text
//! begin     reserves room, returns the positions of queries and keys, and discards the rest of a failed step
//! layers    append keys and stage values that would overwrite the past
//! commit    downloads the sums of the gates that eviction needs, makes the step part of the past, and evicts
//! ```

use std::ops::Range;

use fox_tensor::{
    Device, Result as TensorResult, Segment, Segments, Tensor, gate_totals, page_parts,
};

use crate::blocks::BlockState;
use crate::eviction::PagePolicy;
use crate::layer::LayerState;
use crate::paged::PagedState;
use crate::recurrent::RecurrentState;
use crate::rows::RowState;
use crate::spec::StateSpec;
use crate::{Error, Result};

/// Capacity is rounded up to this many tokens.
const GRANULE: usize = 16;

/// The decode state of a batch of sequences. A clone shares the past and diverges afterwards, for several continuations of
/// one prefix.
#[derive(Clone, Debug)]
pub struct Cache {
    device: Device,
    lens: Vec<usize>,
    capacity: usize,
    layers: Vec<LayerState>,
}

/// The memory of one sequence of a paged state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens seen.
    pub tokens: usize,
    /// Bytes held, shared pages included.
    pub bytes: usize,
    /// Bytes that would be held without eviction.
    pub full_bytes: usize,
}

impl Cache {
    /// An empty contiguous state for `batch` sequences with room for `capacity` tokens each at first.
    pub fn new(
        specs: impl IntoIterator<Item = StateSpec>,
        batch: usize,
        capacity: usize,
        device: &Device,
    ) -> Result<Cache> {
        if batch == 0 {
            return Err(Error::NoSequences);
        }
        let (capacity, rows) = checked_rows(batch, capacity.max(1))?;
        let layer = |spec: StateSpec| match spec {
            StateSpec::Attention(spec) => {
                let state = RowState::new(&spec, batch, rows, device)?;
                Ok(LayerState::Rows(Box::new(state)))
            }
            StateSpec::Recurrent(spec) => {
                RecurrentState::new(&spec, batch, device).map(LayerState::Recurrent)
            }
            StateSpec::Blocks(spec) => Ok(LayerState::Blocks(BlockState::new(&spec, batch, None))),
        };
        let layers = specs.into_iter().map(layer).collect::<TensorResult<_>>()?;
        let lens = vec![0; batch];
        Ok(Cache { device: device.clone(), lens, capacity, layers })
    }

    /// An empty paged state of one sequence; `policy` must be the model's.
    pub fn paged(
        specs: impl IntoIterator<Item = StateSpec>,
        policy: &PagePolicy,
        device: &Device,
    ) -> Result<Cache> {
        let layer = |(l, spec): (usize, StateSpec)| match spec {
            StateSpec::Attention(spec) => {
                PagedState::new(&spec, l, policy, device).map(LayerState::Paged)
            }
            StateSpec::Recurrent(spec) => {
                let lease = policy.meter().lease(spec.bytes());
                let state = RecurrentState::new(&spec, 1, device)?;
                Ok(LayerState::Recurrent(state.counted(lease)))
            }
            StateSpec::Blocks(spec) => {
                Ok(LayerState::Blocks(BlockState::new(&spec, 1, Some(policy.meter()))))
            }
        };
        let layers = specs.into_iter().enumerate().map(layer).collect::<TensorResult<_>>()?;
        Ok(Cache::of_pages(device.clone(), vec![0], layers))
    }

    fn of_pages(device: Device, lens: Vec<usize>, layers: Vec<LayerState>) -> Cache {
        Cache { device, lens, capacity: 0, layers }
    }

    /// Joins paged states of one model into one batch, in order. At least one.
    pub fn join(caches: Vec<Cache>) -> Result<Cache> {
        let mut caches = caches.into_iter();
        let mut joined = caches.next().ok_or(Error::NoSequences)?;
        for cache in caches {
            if joined.layers.len() != cache.layers.len() {
                return Err(Error::LayerMismatch(joined.layers.len(), cache.layers.len()));
            }
            joined.lens.extend(cache.lens);
            for (layer, other) in joined.layers.iter_mut().zip(cache.layers) {
                match (layer, other) {
                    (LayerState::Paged(all), LayerState::Paged(other)) => all.extend(other),
                    (LayerState::Recurrent(all), LayerState::Recurrent(other)) => all.extend(other),
                    (LayerState::Blocks(all), LayerState::Blocks(other)) => all.extend(other),
                    _ => return Err(Error::NotPaged("joined")),
                }
            }
        }
        for layer in joined.layers.iter_mut().filter_map(LayerState::recurrent) {
            layer.merge()?;
        }
        Ok(joined)
    }

    /// Splits a paged state into one state per sequence.
    pub fn split(self) -> Result<Vec<Cache>> {
        let single = |&len: &usize| Cache::of_pages(self.device.clone(), vec![len], Vec::new());
        let mut caches: Vec<Cache> = self.lens.iter().map(single).collect();
        let count = caches.len();
        for layer in self.layers {
            let parts: Vec<LayerState> = match layer {
                LayerState::Paged(state) => {
                    state.split()?.into_iter().map(LayerState::Paged).collect()
                }
                LayerState::Recurrent(state) => {
                    state.split(count)?.into_iter().map(LayerState::Recurrent).collect()
                }
                LayerState::Blocks(state) => state.split().map(LayerState::Blocks).collect(),
                LayerState::Rows(_) => return Err(Error::NotPaged("split")),
            };
            for (cache, part) in caches.iter_mut().zip(parts) {
                cache.layers.push(part);
            }
        }
        Ok(caches)
    }

    /// Moves the state out and leaves one without sequences.
    pub fn take(&mut self) -> Cache {
        let empty = Cache::of_pages(self.device.clone(), Vec::new(), Vec::new());
        std::mem::replace(self, empty)
    }

    /// Device, tokens and layers, for [`SlotSequence`](crate::SlotSequence).
    pub(crate) fn into_layers(self) -> (Device, Vec<usize>, Vec<LayerState>) {
        (self.device, self.lens, self.layers)
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.lens.len()
    }

    /// Tokens seen so far, per sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// The state of every layer, for a step between [`Cache::begin`] and [`Cache::commit`].
    pub fn layers_mut(&mut self) -> &mut [LayerState] {
        &mut self.layers
    }

    /// Log forget gates of a layer `[batch * capacity, H]`: those of sequence `b` are the first
    /// `lens()[b]` rows from row `b * capacity` on. `None` for paged states and without forget gates.
    pub fn log_gates(&self, layer: usize) -> Option<&Tensor> {
        match self.layers.get(layer)? {
            LayerState::Rows(state) => state.log_gates(),
            LayerState::Paged(_) | LayerState::Recurrent(_) | LayerState::Blocks(_) => None,
        }
    }

    /// Pages held and evicted, per layer and key head, of sequence `b`; empty if the state is not paged. Closed blocks are
    /// the pages of a layer that has them, for all heads at once.
    pub fn pages(&self, b: usize) -> Vec<Vec<(usize, usize)>> {
        let pages = |layer: &LayerState| match layer {
            LayerState::Paged(state) => state.page_counts(b),
            LayerState::Blocks(state) => state.block_counts(b).map(|counts| vec![counts]),
            LayerState::Rows(_) | LayerState::Recurrent(_) => None,
        };
        self.layers.iter().filter_map(pages).collect()
    }

    /// The memory of sequence `b` of a paged state.
    pub fn usage(&self, b: usize) -> Usage {
        let mut usage = Usage { tokens: self.lens[b], ..Usage::default() };
        for layer in &self.layers {
            let (bytes, full_bytes) = match layer {
                LayerState::Paged(state) => state.bytes(b, &self.device),
                LayerState::Recurrent(state) => (state.bytes(b), state.bytes(b)),
                LayerState::Blocks(state) => state.bytes(b),
                LayerState::Rows(_) => (0, 0),
            };
            usage.bytes += bytes;
            usage.full_bytes += full_bytes;
        }
        usage
    }

    /// Reserves room for the new tokens and returns the positions of queries and keys of each sequence. `new[b]` are the
    /// rows of the step that belong to sequence `b`; rows between are padding.
    pub fn begin(&mut self, new: &Segments) -> Result<Segments> {
        if new.len() != self.batch() {
            return Err(Error::BatchMismatch { step: new.len(), cache: self.batch() });
        }
        if let Some(s) = new.as_slice().iter().find(|s| s.q_len != s.k_len) {
            return Err(Error::ForeignKeys { queries: s.q_len, keys: s.k_len });
        }
        self.discard();
        let lens = self.lens.iter().zip(new.as_slice()).map(|(len, s)| len + s.q_len);
        let needed = lens.max().unwrap_or(0);
        let in_rows = self.layers.iter().any(|layer| matches!(layer, LayerState::Rows(_)));
        if needed > self.capacity && in_rows {
            self.grow(needed.max(2 * self.capacity))?;
        }
        // Keys in pages have no rows: any disjoint ranges do.
        let stride = if in_rows { self.capacity } else { needed };
        let place = |(b, (len, s)): (usize, (&usize, &Segment))| Segment {
            q_start: s.q_start,
            q_len: s.q_len,
            k_start: b * stride,
            k_len: len + s.q_len,
        };
        let placed = self.lens.iter().zip(new.as_slice()).enumerate().map(place).collect();
        Ok(Segments::new(placed)?)
    }

    /// Makes the tokens of a successful step part of the past and evicts forgotten pages, with at most one download for all
    /// layers.
    ///
    /// # Errors
    /// The device's, from that download; nothing has changed then.
    pub fn commit(&mut self, new: &Segments) -> Result<()> {
        let totals = self.read_totals(new)?;
        if !totals.is_empty() {
            let heads: usize = self.layers.iter().map(LayerState::gated_heads).sum();
            let (mut rest, parts) = (&totals[..], totals.len() / heads);
            for layer in self.layers.iter_mut().filter_map(LayerState::paged) {
                let (own, others) = rest.split_at(parts * layer.gated_heads());
                layer.add_totals(own, new);
                rest = others;
            }
        }
        for (len, segment) in self.lens.iter_mut().zip(new.as_slice()) {
            *len += segment.q_len;
        }
        self.layers.iter_mut().for_each(LayerState::commit);
        Ok(())
    }

    /// Sums of the staged log gates `[layer][range][H]`, for the ranges of new tokens of one sequence after the other, cut
    /// at page boundaries.
    fn read_totals(&self, new: &Segments) -> Result<Vec<f64>> {
        let staged: Vec<&Tensor> =
            self.layers.iter().filter_map(LayerState::staged_gates).collect();
        let rows = |(&len, s): (&usize, &Segment)| {
            let first = s.q_start;
            page_parts(len, s.q_len)
                .map(move |part| first + part.before..first + part.before + part.slots.len())
        };
        let rows: Vec<Range<usize>> = self.lens.iter().zip(new.as_slice()).flat_map(rows).collect();
        Ok(gate_totals(&staged, &rows)?)
    }

    /// Discards a step that was not committed.
    fn discard(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.discard(&self.lens));
    }

    fn grow(&mut self, capacity: usize) -> Result<()> {
        let (capacity, rows) = checked_rows(self.batch(), capacity)?;
        let (device, lens, old) = (&self.device, &self.lens, self.capacity);
        let moved = |tensor: &Tensor| -> TensorResult<Tensor> {
            let mut larger = device.zeros([rows, tensor.cols()], tensor.dtype())?;
            for (b, &len) in lens.iter().enumerate() {
                device.backend().copy_rows(tensor, b * old, &mut larger, b * capacity, len)?;
            }
            Ok(larger)
        };
        // All layers or none, so that a failure leaves the cache usable.
        let mut larger = Vec::with_capacity(self.layers.len());
        for layer in self.layers.iter_mut().filter_map(LayerState::rows) {
            larger.push(layer.map_rows(moved)?);
        }
        for (layer, rows) in self.layers.iter_mut().filter_map(LayerState::rows).zip(larger) {
            layer.set_rows(rows);
        }
        self.capacity = capacity;
        Ok(())
    }
}

/// The rounded capacity, and the number of rows.
fn checked_rows(batch: usize, capacity: usize) -> Result<(usize, usize)> {
    let rounded = capacity.checked_next_multiple_of(GRANULE);
    let sizes = rounded.and_then(|rounded| Some((rounded, batch.checked_mul(rounded)?)));
    sizes.ok_or(Error::TooLarge { batch, capacity })
}
