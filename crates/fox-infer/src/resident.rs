//! Decode steps of sequences whose state stays on the device, in slots.
//!
//! A sequence enters a slot with its first decode step and leaves it when it ends or is preempted. A step has one row per
//! sequence; the host acts on a sequence only at page boundaries.

use fox_cache::{PagePolicy, SequenceState, SlotSequence, Slots};
use fox_model::Model;

use crate::EngineOptions;
use crate::sequence::{Next, Sequence};

/// Largest number of slots.
const MAX_SLOTS: usize = 256;

/// The slots of an engine.
#[derive(Debug)]
pub(crate) struct Resident(Slots);

/// The outcome of a step.
pub(crate) struct Stepped {
    /// The next token of each row.
    pub next: Vec<Next>,
    /// Whether a sequence entered a slot, or a page was reserved or evicted.
    pub pages_changed: bool,
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
        Ok(model.open_slots(slots, options.max_context, policy)?.map(Resident))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.0.count()
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
            let (token, draw) = (r.next(), r.draw());
            let (Some(sequence), Some(token)) = (resident(r), token) else {
                let detail = "a step of a sequence without a slot";
                return Err(fox_model::Error::Argument(detail.into()));
            };
            rows.push(self.0.row(sequence, token, draw)?);
        }
        self.0.begin(&rows)?;
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
        let tokens = self.0.finish()?;
        for &row in &full {
            if let Some(sequence) = resident(group[row]) {
                self.0.seal_page(sequence)?;
            }
        }
        let mut next = Vec::with_capacity(group.len());
        for (row, (r, token)) in group.iter().zip(tokens).enumerate() {
            next.push(match r.needs_logits() {
                true => Next::Logits(self.0.logits(row)?),
                false => Next::Token(token),
            });
        }
        Ok(Stepped { next, pages_changed: pages_changed || !full.is_empty() })
    }

    /// Puts the sequence into a slot, or reserves its next page; whether either was needed.
    fn make_ready(&mut self, r: &mut Sequence) -> fox_cache::Result<bool> {
        match &mut r.cache {
            Some(SequenceState::Cache(cache)) => {
                let sequence = self.0.enter(cache.take())?;
                r.cache = Some(SequenceState::Slot(sequence));
                Ok(true)
            }
            Some(SequenceState::Slot(sequence)) => self.0.reserve(sequence),
            None => Ok(false),
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
