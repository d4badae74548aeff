//! Decode steps of sequences whose state stays on the device, in slots.
//!
//! A sequence enters a slot with its first decode step and leaves it when it ends or is preempted. A step has one row per
//! sequence; the host acts on a sequence only at page boundaries.
//!
//! A step begins before the step before it is finished: its tokens are those that the device has sampled. The device does
//! not wait for the host, which meanwhile reports tokens and turns to pages. A sequence that the finished step ends has a
//! row too many in the next one, whose result is dropped. Requests whose tokens are sampled on the host are finished
//! before the next step begins.

use std::collections::VecDeque;

use fox_cache::{PagePolicy, SequenceState, SlotSequence, Slots};
use fox_model::Model;
use fox_tensor::{FinishedStep, PAGE};

use crate::EngineOptions;
use crate::sequence::{Next, Sequence};

/// Largest number of slots.
const MAX_SLOTS: usize = 256;

/// The slots of an engine and their unfinished steps.
#[derive(Debug)]
pub(crate) struct Resident {
    slots: Slots,
    /// Oldest first.
    steps: VecDeque<UnfinishedStep>,
    begun: u64,
}

#[derive(Debug)]
struct UnfinishedStep {
    number: u64,
    /// The sequence of each row, ascending.
    arrivals: Vec<u64>,
    needs_logits: bool,
}

/// The place of a sequence in an unfinished step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRow {
    step: u64,
    pub row: usize,
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
        let slots = model.open_slots(slots, options.max_context, policy)?;
        Ok(slots.map(|slots| Resident { slots, steps: VecDeque::new(), begun: 0 }))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots.count()
    }

    /// Number of unfinished steps.
    pub fn unfinished(&self) -> usize {
        self.steps.len()
    }

    /// Whether the host samples from logits of the step that was begun last, which the next step overwrites.
    pub fn needs_logits(&self) -> bool {
        self.steps.back().is_some_and(|step| step.needs_logits)
    }

    /// Starts a step that feeds each sequence its next token; whether a sequence entered a slot or reserved a page.
    pub fn begin(&mut self, group: &mut [&mut Sequence]) -> fox_model::Result<bool> {
        let mut rows = Vec::with_capacity(group.len());
        let mut pages_changed = false;
        for r in group.iter_mut() {
            pages_changed |= self.make_ready(r)?;
            let (token, draw) = (r.input(), r.draw());
            let (Some(sequence), Some(token)) = (resident(r), token) else {
                let detail = "a step of a sequence without a slot";
                return Err(fox_model::Error::Argument(detail.into()));
            };
            rows.push(self.slots.row(sequence, token, draw)?);
        }
        self.slots.begin(&rows)?;
        self.begun += 1;
        for (row, r) in group.iter_mut().enumerate() {
            r.row = Some(StepRow { step: self.begun, row });
            resident(r).into_iter().for_each(SlotSequence::advance);
        }
        self.steps.push_back(UnfinishedStep {
            number: self.begun,
            arrivals: group.iter().map(|r| r.arrival).collect(),
            needs_logits: group.iter().any(|r| r.needs_logits()),
        });
        Ok(pages_changed)
    }

    /// Reserves the next pages of sequences in the second half of their last one, a few at each step: all at once would
    /// take the host longer than a step takes the device. Whether there were any.
    pub fn reserve_ahead(&mut self, group: &mut [&mut Sequence]) -> fox_model::Result<bool> {
        let most = group.len().div_ceil(PAGE / 4);
        let mut reserved = 0;
        for sequence in group.iter_mut().filter_map(|r| resident(r)) {
            if reserved == most {
                break;
            }
            reserved += usize::from(self.slots.reserve_ahead(sequence, PAGE / 2)?);
        }
        Ok(reserved > 0)
    }

    /// Waits for the oldest unfinished step. The result for each sequence in `running`, oldest first, that took part, by
    /// its index; whether pages were evicted.
    pub fn finish(
        &mut self,
        running: &mut [Sequence],
    ) -> fox_model::Result<(Vec<(usize, Next)>, bool)> {
        let Some(step) = self.steps.pop_front() else { return Ok(Default::default()) };
        let finished = self.slots.finish();
        // The sequence of each row; requests may have been cancelled since.
        let find = |arrival| running.binary_search_by_key(arrival, |r: &Sequence| r.arrival).ok();
        let places: Vec<Option<usize>> = step.arrivals.iter().map(find).collect();
        let FinishedStep { tokens, page_ends } = match finished {
            Ok(finished) => finished,
            Err(error) => {
                places.iter().flatten().for_each(|&at| running[at].fail(error.to_string()));
                return Err(error.into());
            }
        };
        for (row, sums) in &page_ends {
            if let Some(sequence) = places[*row].and_then(|at| resident(&mut running[at])) {
                sequence.seal_page(sums);
            }
        }
        let mut next = Vec::with_capacity(tokens.len());
        for (row, (token, at)) in tokens.into_iter().zip(places).enumerate() {
            let Some(at) = at else { continue };
            let r = &mut running[at];
            r.row = r.row.filter(|row| row.step > step.number);
            if !r.needs_logits() {
                next.push((at, Next::Token(token)));
                continue;
            }
            match self.slots.logits(row) {
                Ok(logits) => next.push((at, Next::Logits(logits))),
                Err(error) => r.fail(error.to_string()),
            }
        }
        Ok((next, !page_ends.is_empty()))
    }

    /// Puts the sequence into a slot, or reserves its next page; whether either was needed.
    fn make_ready(&mut self, r: &mut Sequence) -> fox_cache::Result<bool> {
        match &mut r.cache {
            Some(SequenceState::Cache(cache)) => {
                let sequence = self.slots.enter(cache.take())?;
                r.cache = Some(SequenceState::Slot(sequence));
                Ok(true)
            }
            Some(SequenceState::Slot(sequence)) => self.slots.reserve(sequence),
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
