//! Decode steps of sequences whose state stays on the device, in slots.
//!
//! A sequence takes a slot with its first decode step and keeps it until it ends or is put back. A step then takes as
//! many rows as there are sequences, and the host has something to do for one of them only at the ends of its pages.

use std::sync::{Arc, Mutex, PoisonError};

use fox_cache::{Cache, PagePolicy};
use fox_model::Model;
use fox_tensor::{DecodeRow, PAGE, SlotDecoder};

use crate::EngineOptions;
use crate::sequence::{Next, Sequence};

/// Sequences that a device keeps at most.
const MAX_SLOTS: usize = 256;

/// The slots of an engine.
#[derive(Debug)]
pub(crate) struct Resident {
    streams: SlotDecoder,
    free: FreeSlots,
}

/// Slots that nobody has; the last one is taken first.
#[derive(Clone, Debug)]
struct FreeSlots(Arc<Mutex<Vec<usize>>>);

/// A slot that a sequence has; dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct Slot {
    index: usize,
    /// Tokens of its sequence that there are pages for.
    room: usize,
    free: FreeSlots,
}

/// What the rows of a step say about the next tokens, in their order.
pub(crate) struct Stepped {
    pub next: Vec<Next>,
    /// Whether a sequence took a slot, or a page was added or dropped.
    pub pages_changed: bool,
}

impl FreeSlots {
    fn take(&self) -> Option<Slot> {
        let index = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Slot { index, room: 0, free: self.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.free.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

impl Resident {
    /// Slots for the sequences of an engine; `None` where they are not asked for or the device has no such way. All that
    /// steps need is compiled and planned afterwards.
    pub fn open(
        model: &Model,
        options: &EngineOptions,
        policy: &PagePolicy,
    ) -> fox_model::Result<Option<Resident>> {
        if !options.resident {
            return Ok(None);
        }
        let slots = options.max_batch.min(MAX_SLOTS);
        let Some(streams) = model.open_slots(slots, options.max_context, policy)? else {
            return Ok(None);
        };
        let free = FreeSlots(Arc::new(Mutex::new((0..slots).rev().collect())));
        Ok(Some(Resident { streams, free }))
    }

    /// Sequences at a time.
    pub fn slots(&self) -> usize {
        self.streams.slots()
    }

    /// Feeds every sequence its next token. While the step runs, the tokens of the last one are reported, and where there
    /// is room, pages that it fills get their successors.
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
                return Err(fox_model::Error::Argument(
                    "a step of a sequence without a slot".into(),
                ));
            };
            let (slot, position) = (slot.index, cache.lens()[0]);
            rows.push(DecodeRow { slot, token, position, draw: r.draw() });
        }
        self.streams.begin(&rows)?;
        let mut full = Vec::new();
        for (row, r) in group.iter_mut().enumerate() {
            r.report();
            if r.cache.as_mut().is_some_and(Cache::advance) {
                full.push(row);
                if is_roomy {
                    self.make_ready(r)?;
                }
            }
        }
        let choices = self.streams.finish()?;
        for &row in &full {
            if let Some(cache) = &mut group[row].cache {
                cache.seal_page(&self.streams.sums(rows[row].slot)?);
            }
        }
        let mut next = Vec::with_capacity(group.len());
        for (row, (r, choice)) in group.iter().zip(choices).enumerate() {
            next.push(match r.needs_logits() {
                true => Next::Logits(self.streams.logits(row)?),
                false => Next::Choice(choice),
            });
        }
        Ok(Stepped { next, pages_changed: pages_changed || !full.is_empty() })
    }

    /// Gives the sequence a slot, or room for its next page; whether either was needed.
    fn make_ready(&mut self, r: &mut Sequence) -> fox_model::Result<bool> {
        let Some(cache) = &mut r.cache else { return Ok(false) };
        let len = cache.lens()[0];
        match &mut r.slot {
            None => {
                let Some(mut slot) = self.free.take() else { return Ok(false) };
                self.streams.enter(slot.index, len, &mut cache.stream_past()?)?;
                slot.room = (len + 1).next_multiple_of(PAGE);
                r.slot = Some(slot);
            }
            Some(slot) if len == slot.room => {
                cache.reserve_one()?;
                self.streams.extend(slot.index, &mut cache.stream_keys())?;
                slot.room += PAGE;
            }
            Some(_) => return Ok(false),
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_slot_is_free_again() {
        let free = FreeSlots(Arc::new(Mutex::new(vec![1, 0])));
        let (first, second) = (free.take().unwrap(), free.take().unwrap());
        assert_eq!((first.index, second.index), (0, 1));
        assert!(free.take().is_none());
        drop(first);
        assert_eq!(free.take().map(|slot| slot.index), Some(0));
    }
}
