//! Decode steps of sequences whose state stays on the device, in slots.
//!
//! A sequence enters a slot with its first decode step and leaves it when it ends or is preempted. A step has one row per
//! sequence; the host acts on a sequence only at page boundaries.

use std::sync::{Arc, Mutex, PoisonError};

use fox_cache::{PagePolicy, SequenceState, SlotSequence};
use fox_model::Model;
use fox_tensor::{DecodeRow, SlotDecoder};

use crate::EngineOptions;
use crate::sequence::{Next, Sequence};

/// Largest number of slots.
const MAX_SLOTS: usize = 256;

/// The slots of an engine.
#[derive(Debug)]
pub(crate) struct Resident {
    decoder: SlotDecoder,
    free: FreeSlots,
}

/// Free slots; the last one is taken first.
#[derive(Clone, Debug)]
struct FreeSlots(Arc<Mutex<Vec<usize>>>);

/// The slot of a sequence, freed when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    index: usize,
    free: FreeSlots,
}

/// The outcome of a step.
pub(crate) struct Stepped {
    /// The next token of each row.
    pub next: Vec<Next>,
    /// Whether a sequence entered a slot, or a page was reserved or evicted.
    pub pages_changed: bool,
}

impl FreeSlots {
    fn take(&self) -> Option<Slot> {
        let index = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Slot { index, free: self.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.free.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

impl Resident {
    /// Opens the slots of an engine and compiles all kernels of their steps; `None` if they are switched off or the
    /// device does not support the model.
    pub fn open(
        model: &Model,
        options: &EngineOptions,
        policy: &PagePolicy,
    ) -> fox_model::Result<Option<Resident>> {
        if !options.resident {
            return Ok(None);
        }
        let slots = options.max_batch.min(MAX_SLOTS);
        let Some(decoder) = model.open_slots(slots, options.max_context, policy)? else {
            return Ok(None);
        };
        let free = FreeSlots(Arc::new(Mutex::new((0..slots).rev().collect())));
        Ok(Some(Resident { decoder, free }))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.decoder.slots()
    }

    /// Feeds every sequence its next token. While the step runs, the host reports the tokens of the step before and,
    /// with `is_roomy`, reserves pages for the next step.
    pub fn step(
        &mut self,
        group: &mut [&mut Sequence],
        is_roomy: bool,
    ) -> fox_model::Result<Stepped> {
        let mut rows = Vec::with_capacity(group.len());
        let mut pages_changed = false;
        for r in group.iter_mut() {
            pages_changed |= self.make_ready(r)?;
            let (Some(slot), Some(cache), Some(token)) = (&r.slot, &r.cache, r.next()) else {
                let detail = "a step of a sequence without a slot";
                return Err(fox_model::Error::Argument(detail.into()));
            };
            let (slot, position) = (slot.index, cache.len());
            rows.push(DecodeRow { slot, token, position, draw: r.draw() });
        }
        self.decoder.begin(&rows)?;
        let mut full = Vec::new();
        for (row, r) in group.iter_mut().enumerate() {
            r.report();
            if resident(r).is_some_and(SlotSequence::advance) {
                full.push(row);
                if is_roomy {
                    self.make_ready(r)?;
                }
            }
        }
        let tokens = self.decoder.finish()?;
        for &row in &full {
            if let Some(sequence) = resident(group[row]) {
                sequence.seal_page(&self.decoder.gate_sums(rows[row].slot)?);
            }
        }
        let mut next = Vec::with_capacity(group.len());
        for (row, (r, token)) in group.iter().zip(tokens).enumerate() {
            next.push(match r.needs_logits() {
                true => Next::Logits(self.decoder.logits(row)?),
                false => Next::Token(token),
            });
        }
        Ok(Stepped { next, pages_changed: pages_changed || !full.is_empty() })
    }

    /// Puts the sequence into a slot, or reserves its next page; whether either was needed.
    fn make_ready(&mut self, r: &mut Sequence) -> fox_model::Result<bool> {
        match (r.cache.take(), &r.slot) {
            (Some(SequenceState::Cache(cache)), None) => {
                let Some(slot) = self.free.take() else {
                    r.cache = Some(cache.into());
                    return Ok(false);
                };
                let mut sequence = SlotSequence::new(cache)?;
                self.decoder.enter(slot.index, sequence.len(), &mut sequence.past())?;
                (r.slot, r.cache) = (Some(slot), Some(SequenceState::Slot(sequence)));
                Ok(true)
            }
            (Some(SequenceState::Slot(mut sequence)), Some(slot)) => {
                let is_full = sequence.is_full();
                if is_full {
                    sequence.reserve_page()?;
                    self.decoder.update_pages(slot.index, &mut sequence.pages_mut())?;
                }
                r.cache = Some(SequenceState::Slot(sequence));
                Ok(is_full)
            }
            (cache, _) => {
                r.cache = cache;
                Ok(false)
            }
        }
    }
}

/// The state of a sequence in a slot.
fn resident(r: &mut Sequence) -> Option<&mut SlotSequence> {
    match &mut r.cache {
        Some(SequenceState::Slot(sequence)) => Some(sequence),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_slots_are_reused() {
        let free = FreeSlots(Arc::new(Mutex::new(vec![1, 0])));
        let (first, second) = (free.take().unwrap(), free.take().unwrap());
        assert_eq!((first.index, second.index), (0, 1));
        assert!(free.take().is_none());
        drop(first);
        assert_eq!(free.take().map(|slot| slot.index), Some(0));
    }
}
