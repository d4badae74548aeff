//! Sequences whose decode steps run in slots of the device ([`fox_tensor::SlotDecoder`]).
//!
//! The device writes keys, values and gates into the pages and sums up the gates. The host acts at page boundaries
//! alone: [`Slots::seal_page`] takes over the sums and evicts forgotten pages, and [`Slots::reserve`] makes room for the
//! next tokens. A step:
//!
//! ```text
//! row       of every sequence, which reserves its next page if it has none for the token
//! begin     starts the step; advance counts the token of each sequence
//! finish    waits for the sampled tokens; seal_page where a row has ended a page
//! ```
//!
//! The next step may begin before the last one is finished.

use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::{
    DecodeRow, Device, FinishedStep, LayerPast, PAGE, PagedKeys, RowToken, SlotDecoder, TokenDraw,
};

use crate::cache::{Cache, Usage};
use crate::layer::LayerState;
use crate::paged::PagedState;
use crate::{Error, Result};

/// The slots of a model.
#[derive(Debug)]
pub struct Slots {
    decoder: SlotDecoder,
    free: FreeSlots,
}

/// Free slots; the last one is taken first.
#[derive(Clone, Debug)]
pub struct FreeSlots(Arc<Mutex<Vec<usize>>>);

/// A slot that a sequence has taken, freed when dropped.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    free: FreeSlots,
}

impl FreeSlots {
    /// `count` slots.
    pub fn new(count: usize) -> Self {
        FreeSlots(Arc::new(Mutex::new((0..count).rev().collect())))
    }

    /// Takes a slot.
    ///
    /// # Errors
    /// All slots are taken.
    pub fn take(&self) -> Result<Slot> {
        let index = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Ok(Slot { index: index.ok_or(Error::NoFreeSlot)?, free: self.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.free.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

impl Slots {
    /// The slots of a device, all free.
    pub fn new(decoder: SlotDecoder) -> Self {
        let free = FreeSlots::new(decoder.slots());
        Slots { decoder, free }
    }

    /// Number of slots, which is also the largest number of rows of a step.
    pub fn count(&self) -> usize {
        self.decoder.slots()
    }

    /// Puts the only sequence of a paged cache into a free slot, with room for its next token.
    ///
    /// # Errors
    /// All slots are taken; those of [`SlotSequence::new`]; the device's.
    pub fn enter(&mut self, cache: Cache) -> Result<SlotSequence> {
        let mut sequence = SlotSequence::new(cache, self.free.take()?)?;
        self.decoder.enter(sequence.slot.index, sequence.len, &mut sequence.past())?;
        Ok(sequence)
    }

    /// Reserves the next page if the next token needs one; whether it did.
    pub fn reserve(&mut self, sequence: &mut SlotSequence) -> Result<bool> {
        self.reserve_ahead(sequence, 1)
    }

    /// Reserves the next page if the next `tokens` tokens, at most a page, need one; whether it did.
    pub fn reserve_ahead(&mut self, sequence: &mut SlotSequence, tokens: usize) -> Result<bool> {
        let is_short = sequence.room - sequence.len < tokens;
        if is_short {
            sequence.reserve_page()?;
            self.decoder.update_pages(sequence.slot.index, &mut sequence.pages_mut())?;
        }
        Ok(is_short)
    }

    /// The row of the next step that feeds `token` to a sequence.
    ///
    /// # Errors
    /// A sequence in a slot of another model; the device's, from reserving a page.
    pub fn row(
        &mut self,
        sequence: &mut SlotSequence,
        token: RowToken,
        draw: Option<TokenDraw>,
    ) -> Result<DecodeRow> {
        if !Arc::ptr_eq(&sequence.slot.free.0, &self.free.0) {
            return Err(Error::ForeignSlot);
        }
        self.reserve(sequence)?;
        Ok(DecodeRow { slot: sequence.slot.index, token, position: sequence.len, draw })
    }

    /// Starts a step without waiting for it.
    pub fn begin(&mut self, rows: &[DecodeRow]) -> Result<()> {
        Ok(self.decoder.begin(rows)?)
    }

    /// Waits for the oldest unfinished step.
    pub fn finish(&mut self) -> Result<FinishedStep> {
        Ok(self.decoder.finish()?)
    }

    /// Logits `[V]` of a row of the step that was begun last.
    pub fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        Ok(self.decoder.logits(row)?)
    }
}

/// The KV cache of one sequence in a slot. There is no way back to a [`Cache`]: parts of the state are on the device
/// alone.
#[derive(Debug)]
pub struct SlotSequence {
    slot: Slot,
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
    pub fn new(cache: Cache, slot: Slot) -> Result<Self> {
        let (device, lens, layers) = cache.into_layers();
        let [len] = lens[..] else {
            return Err(Error::BatchMismatch { step: 1, cache: lens.len() });
        };
        let paged = |layer| match layer {
            LayerState::Paged(state) => Ok(state),
            _ => Err(Error::NotPaged("put into a slot")),
        };
        let layers = layers.into_iter().map(paged).collect::<Result<_>>()?;
        let mut sequence = SlotSequence { slot, device, len, room: len, layers };
        sequence.reserve_page()?;
        Ok(sequence)
    }

    /// The state of every layer, for [`SlotDecoder::enter`](fox_tensor::SlotDecoder::enter).
    pub fn past(&mut self) -> Vec<LayerPast<'_>> {
        self.layers.iter_mut().filter_map(PagedState::layer_past).collect()
    }

    /// The pages of every layer, for [`SlotDecoder::update_pages`](fox_tensor::SlotDecoder::update_pages).
    pub(crate) fn pages_mut(&mut self) -> Vec<&mut dyn PagedKeys> {
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

    /// Reserves the next page of every layer and head.
    pub fn reserve_page(&mut self) -> Result<()> {
        for layer in &mut self.layers {
            layer.reserve_one(&[self.room], &self.device)?;
        }
        self.room = (self.room + 1).next_multiple_of(PAGE);
        Ok(())
    }

    /// Counts the token that a step feeds to the slot.
    pub fn advance(&mut self) {
        self.len += 1;
    }

    /// Takes over the sums of the log gates `[layers][H]` at the end of the last full page, and evicts forgotten pages.
    pub fn seal_page(&mut self, sums: &[f64]) {
        let (mut rest, end) = (sums, self.len / PAGE * PAGE);
        for layer in &mut self.layers {
            let (own, others) = rest.split_at(layer.gated_heads().min(rest.len()));
            layer.seal_page(end, own);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_slots_are_reused() {
        let free = FreeSlots::new(2);
        let (first, second) = (free.take().unwrap(), free.take().unwrap());
        assert_eq!((first.index, second.index), (0, 1));
        assert!(matches!(free.take(), Err(Error::NoFreeSlot)));
        drop(first);
        assert_eq!(free.take().map(|slot| slot.index).unwrap(), 0);
    }
}
