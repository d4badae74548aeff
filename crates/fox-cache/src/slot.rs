//! A sequence whose decode steps run in a slot of the device ([`fox_tensor::SlotDecoder`]).
//!
//! The device writes keys, values and gates into the pages and sums up the gates. The host acts at page boundaries
//! alone: [`SlotSequence::seal_page`] takes over the sums and evicts forgotten pages, and
//! [`SlotSequence::reserve_page`] makes room for the next tokens.

use fox_tensor::{Device, LayerPast, PAGE, PagedKeys};

use crate::cache::{Cache, Usage};
use crate::layer::LayerState;
use crate::paged::PagedState;
use crate::{Error, Result};

/// The KV cache of one sequence in a slot. There is no way back to a [`Cache`]: parts of the state are on the device
/// alone.
#[derive(Debug)]
pub struct SlotSequence {
    device: Device,
    len: usize,
    /// Tokens that the pages have room for.
    room: usize,
    /// Of this sequence alone.
    layers: Vec<PagedState>,
}

impl SlotSequence {
    /// Takes over the only sequence of a paged cache, and reserves room for its next token.
    ///
    /// # Errors
    /// A cache with several sequences or with layers that are not paged; the device's.
    pub fn new(cache: Cache) -> Result<Self> {
        let (device, lens, layers) = cache.into_layers();
        let [len] = lens[..] else {
            return Err(Error::BatchMismatch { step: 1, cache: lens.len() });
        };
        let paged = |layer| match layer {
            LayerState::Paged(state) => Ok(state),
            _ => Err(Error::NotPaged("put into a slot")),
        };
        let layers = layers.into_iter().map(paged).collect::<Result<_>>()?;
        let mut sequence = SlotSequence { device, len, room: len, layers };
        sequence.reserve_page()?;
        sequence.room = (len + 1).next_multiple_of(PAGE);
        Ok(sequence)
    }

    /// The state of every layer, for [`SlotDecoder::enter`](fox_tensor::SlotDecoder::enter).
    pub fn past(&mut self) -> Vec<LayerPast<'_>> {
        self.layers.iter_mut().filter_map(PagedState::layer_past).collect()
    }

    /// The pages of every layer, for [`SlotDecoder::update_pages`](fox_tensor::SlotDecoder::update_pages).
    pub fn pages_mut(&mut self) -> Vec<&mut dyn PagedKeys> {
        self.layers.iter_mut().filter_map(PagedState::keys_mut).collect()
    }

    /// Tokens seen.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has seen no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the next token needs [`SlotSequence::reserve_page`] first.
    pub fn is_full(&self) -> bool {
        self.len == self.room
    }

    /// Reserves the next page of every layer and head.
    pub fn reserve_page(&mut self) -> Result<()> {
        for layer in &mut self.layers {
            layer.reserve_one(&[self.len], &self.device)?;
        }
        self.room += PAGE;
        Ok(())
    }

    /// Counts the token that a step has fed to the slot; whether it was the last of a page.
    pub fn advance(&mut self) -> bool {
        self.len += 1;
        self.len.is_multiple_of(PAGE)
    }

    /// Takes over the sums of the log gates `[layers][H]` at the end of a page, and evicts forgotten pages.
    pub fn seal_page(&mut self, sums: &[f64]) {
        let mut rest = sums;
        for layer in &mut self.layers {
            let (own, others) = rest.split_at(layer.gated_heads().min(rest.len()));
            layer.seal_page(self.len, own);
            rest = others;
        }
    }

    /// Bytes held and seen.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage { tokens: self.len, ..Usage::default() };
        for layer in &self.layers {
            let (bytes, full_bytes) = layer.bytes(0, &self.device);
            usage.bytes += bytes;
            usage.full_bytes += full_bytes;
        }
        usage
    }

    /// Pages held and evicted, per layer and key head.
    pub fn page_counts(&self) -> Vec<Vec<(usize, usize)>> {
        self.layers.iter().filter_map(|layer| layer.page_counts(0)).collect()
    }
}

/// The KV cache of one sequence: prefilled and decoded op by op, or in a slot.
#[derive(Debug)]
pub enum SequenceState {
    /// For steps op by op, which begin with [`Cache::begin`] and end with [`Cache::commit`].
    Cache(Cache),
    /// For steps in a slot.
    Slot(SlotSequence),
}

impl From<Cache> for SequenceState {
    /// Of a cache with one sequence.
    fn from(cache: Cache) -> Self {
        SequenceState::Cache(cache)
    }
}

impl SequenceState {
    /// Tokens seen.
    pub fn len(&self) -> usize {
        match self {
            SequenceState::Cache(cache) => cache.lens()[0],
            SequenceState::Slot(sequence) => sequence.len(),
        }
    }

    /// Whether it has seen no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held and seen.
    pub fn usage(&self) -> Usage {
        match self {
            SequenceState::Cache(cache) => cache.usage(0),
            SequenceState::Slot(sequence) => sequence.usage(),
        }
    }

    /// Pages held and evicted, per layer and key head.
    pub fn page_counts(&self) -> Vec<Vec<(usize, usize)>> {
        match self {
            SequenceState::Cache(cache) => cache.pages(0),
            SequenceState::Slot(sequence) => sequence.page_counts(),
        }
    }
}
