//! The paged KV cache of an attention layer: one list of pages per sequence and key head.
//!
//! Eviction needs the sums of the log gates at the ends of pages on the host. On a device that reads gates from the pages,
//! the gates of a step stay on the device, and [`Cache::commit`](crate::Cache::commit) downloads the sums of all layers
//! at once. Other devices read the sums at every key, so they are computed when the keys are written.

use std::sync::Arc;

use fox_tensor::{
    Device, LayerPast, NewKeys, PAGE, PagedKeys, Result, Segment, Segments, Tensor, clamp_log_gate,
    page_parts,
};

use crate::eviction::{EvictionRule, PagePolicy};
use crate::meter::Lease;
use crate::pages::LayerPages;
use crate::recurrent::RecurrentState;
use crate::spec::AttentionStateSpec;

/// One attention layer of a batch of sequences.
#[derive(Clone, Debug)]
pub struct PagedState {
    sequences: Vec<PagedSequence>,
    /// Of all sequences.
    conv: Option<RecurrentState>,
    /// Log gates `[R, H]` of the step that are not part of the sums yet.
    staged_gates: Option<Tensor>,
}

/// One attention layer of one sequence.
#[derive(Clone, Debug)]
struct PagedSequence {
    pages: LayerPages,
    /// Sums of the log gates of all tokens, per query head; empty without forget gates.
    sums: Vec<f64>,
    staged_sums: Vec<f64>,
    last_uk: Option<Last>,
    last_uv: Option<Last>,
    rule: EvictionRule,
    /// Bytes of the last raw projections.
    lease: Lease,
}

/// The last raw projection `[1, H_kv * d]`, and the staged one of the step.
#[derive(Clone, Debug)]
struct Last {
    row: Tensor,
    staged: Option<Tensor>,
}

impl PagedState {
    /// One sequence of layer `layer` without tokens.
    pub(crate) fn new(
        spec: &AttentionStateSpec,
        layer: usize,
        policy: &PagePolicy,
        device: &Device,
    ) -> Result<Self> {
        let last = |shifted: bool| -> Result<Option<Last>> {
            let kept = device.backend().caps().activation_type;
            let zeros = || device.zeros([1, spec.width()], kept);
            shifted.then(|| Ok(Last { row: zeros()?, staged: None })).transpose()
        };
        let sums = vec![0.0; if spec.gated { spec.heads } else { 0 }];
        let sequence = PagedSequence {
            pages: LayerPages::new(spec.page_shape(), policy.meter()),
            staged_sums: sums.clone(),
            sums,
            last_uk: last(spec.k_shift)?,
            last_uv: last(spec.v_shift)?,
            rule: policy.rule(layer, spec.window, spec.gated),
            lease: policy.meter().lease(spec.last_bytes(device)),
        };
        let conv =
            spec.conv_state().map(|conv| RecurrentState::new(&conv, 1, device)).transpose()?;
        Ok(PagedState { sequences: vec![sequence], conv, staged_gates: None })
    }

    /// Appends the sequences of another state.
    pub(crate) fn extend(&mut self, other: PagedState) {
        self.sequences.extend(other.sequences);
        if let (Some(conv), Some(other)) = (&mut self.conv, other.conv) {
            conv.extend(other);
        }
    }

    /// The states of the single sequences.
    pub(crate) fn split(self) -> Result<Vec<PagedState>> {
        let count = self.sequences.len();
        let convs = self.conv.map(|conv| conv.split(count)).transpose()?;
        let mut convs = convs.unwrap_or_default().into_iter();
        let single = |sequence| PagedState {
            sequences: vec![sequence],
            conv: convs.next(),
            staged_gates: None,
        };
        Ok(self.sequences.into_iter().map(single).collect())
    }

    pub(crate) fn conv(&mut self) -> Option<&mut RecurrentState> {
        self.conv.as_mut()
    }

    /// The last raw key and value projections before the step, `[batch, H_kv * d]` each.
    pub(crate) fn last(&self) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let rows = |f: fn(&PagedSequence) -> Option<&Last>| -> Result<Option<Tensor>> {
            let Some(first) = self.sequences.first().and_then(f) else { return Ok(None) };
            let device = first.row.device();
            let shape = [self.sequences.len(), first.row.cols()];
            let mut all = device.uninit(shape, first.row.dtype())?;
            for (b, last) in self.sequences.iter().filter_map(f).enumerate() {
                device.backend().copy_rows(&last.row, 0, &mut all, b, 1)?;
            }
            Ok(Some(all))
        };
        Ok((rows(|s| s.last_uk.as_ref())?, rows(|s| s.last_uv.as_ref())?))
    }

    /// Appends keys and values `[R, H_kv * d]` and log gates `[R, H]` to each sequence, and stages the last raw projections
    /// `[R, H_kv * d]`.
    pub fn append(
        &mut self,
        (k, v): (&Tensor, &Tensor),
        log_gates: Option<&Tensor>,
        raw: (&Tensor, &Tensor),
        segments: &Segments,
    ) -> Result<()> {
        self.append_rows((k, v), None, log_gates, raw, segments)
    }

    /// [`PagedState::append`] of keys with transitions `[R, H_kv * transition]`, whose layer has no token shift.
    pub fn append_with(
        &mut self,
        keys: (&Tensor, &Tensor),
        transitions: &Tensor,
        log_gates: Option<&Tensor>,
        segments: &Segments,
    ) -> Result<()> {
        self.append_rows(keys, Some(transitions), log_gates, keys, segments)
    }

    fn append_rows(
        &mut self,
        (k, v): (&Tensor, &Tensor),
        transitions: Option<&Tensor>,
        log_gates: Option<&Tensor>,
        (uk, uv): (&Tensor, &Tensor),
        segments: &Segments,
    ) -> Result<()> {
        for (sequence, s) in self.sequences.iter_mut().zip(segments.as_slice()) {
            if s.q_len == 0 {
                continue;
            }
            let new = NewKeys { k, v, transitions, log_gates, row: s.q_start, count: s.q_len };
            sequence.pages.append(&new, s.offset())?;
            for (last, u) in [(&mut sequence.last_uk, uk), (&mut sequence.last_uv, uv)] {
                if let Some(last) = last {
                    last.staged = Some(u.slice_rows(s.q_start + s.q_len - 1, 1)?);
                }
            }
        }
        match log_gates {
            Some(gates) if k.device().backend().caps().gates_in_pages() => {
                self.staged_gates = Some(gates.clone());
            }
            Some(gates) => self.add_gates(&gates.to_f32()?, segments),
            None => {}
        }
        Ok(())
    }

    /// The pages of all sequences.
    pub fn pages(&self) -> Vec<&dyn PagedKeys> {
        self.sequences.iter().map(|sequence| &sequence.pages as &dyn PagedKeys).collect()
    }

    /// Pages held and evicted, per key head, of sequence `b`.
    pub(crate) fn page_counts(&self, b: usize) -> Option<Vec<(usize, usize)>> {
        let pages = &self.sequences.get(b)?.pages;
        let heads = 0..pages.shape().kv_heads;
        Some(heads.map(|head| (pages.held(head), pages.dropped(head))).collect())
    }

    /// Bytes that sequence `b` holds, and would hold without eviction.
    pub(crate) fn bytes(&self, b: usize, device: &Device) -> (usize, usize) {
        let Some(sequence) = self.sequences.get(b) else { return (0, 0) };
        let page = sequence.pages.shape().page_bytes(device.backend());
        let pages = self.page_counts(b).unwrap_or_default();
        let held: usize = pages.iter().map(|(held, _)| held).sum();
        let dropped: usize = pages.iter().map(|(_, dropped)| dropped).sum();
        let fixed = sequence.lease.bytes();
        (fixed + held * page, fixed + (held + dropped) * page)
    }

    /// Reserves room for the next token of each sequence; `lens` are their tokens.
    pub(crate) fn reserve_one(&mut self, lens: &[usize], device: &Device) -> Result<()> {
        for (sequence, &len) in self.sequences.iter_mut().zip(lens) {
            sequence.pages.reserve(len, 1, device)?;
        }
        Ok(())
    }

    /// The state of the first sequence, for a slot.
    pub(crate) fn layer_past(&mut self) -> Option<LayerPast<'_>> {
        let PagedSequence { pages, sums, last_uk, last_uv, .. } = self.sequences.first_mut()?;
        Some(LayerPast {
            pages,
            last_k: last_uk.as_ref().map(|last| &last.row),
            last_v: last_uv.as_ref().map(|last| &last.row),
            gate_sums: sums,
        })
    }

    /// The pages of the first sequence.
    pub(crate) fn keys_mut(&mut self) -> Option<&mut dyn PagedKeys> {
        self.sequences.first_mut().map(|sequence| &mut sequence.pages as &mut dyn PagedKeys)
    }

    /// Seals the full page at the end of the `len` tokens of the first sequence, whose log gates have these sums `[H]`, and
    /// evicts forgotten pages.
    pub(crate) fn seal_page(&mut self, len: usize, sums: &[f64]) {
        let Some(sequence) = self.sequences.first_mut() else { return };
        sequence.sums.clone_from_slice(sums);
        sequence.staged_sums.clone_from_slice(sums);
        sequence.pages.set_seen(len);
        sequence.pages.write_end(len / PAGE - 1, sums);
        sequence.evict();
    }

    /// Log gates `[R, H]` of the step that were not downloaded yet.
    pub(crate) fn staged_gates(&self) -> Option<&Tensor> {
        self.staged_gates.as_ref()
    }

    /// Query heads with forget gates.
    pub(crate) fn gated_heads(&self) -> usize {
        self.sequences.first().map_or(0, |sequence| sequence.sums.len())
    }

    /// Adds the step's log gates `[R, H]` to the sums, after its keys were written.
    fn add_gates(&mut self, gates: &[f32], segments: &Segments) {
        for (sequence, s) in self.sequences.iter_mut().zip(segments.as_slice()) {
            sequence.add_gates(gates, s);
        }
    }

    /// Adds sums of the step's log gates `[range, H]`, after its keys were written; see
    /// [`Cache::commit`](crate::Cache::commit).
    pub(crate) fn add_totals(&mut self, totals: &[f64], new: &Segments) {
        let mut totals = totals.chunks(self.gated_heads().max(1));
        for (sequence, s) in self.sequences.iter_mut().zip(new.as_slice()) {
            sequence.add_totals(&mut totals, s.q_len);
        }
    }

    /// Sums of the log gates of all tokens, `[H]` per sequence; empty without forget gates.
    pub fn sums(&self) -> Vec<&[f64]> {
        self.sequences.iter().map(|sequence| &sequence.sums[..]).collect()
    }

    /// Per query head, the decay below which a page may be skipped.
    pub fn thresholds(&self) -> Option<Arc<[f64]>> {
        self.sequences.first().and_then(|sequence| sequence.rule.thresholds.clone())
    }

    /// Discards a failed step; `lens` are the tokens of each sequence.
    pub(crate) fn discard(&mut self, lens: &[usize]) {
        self.staged_gates = None;
        self.conv.iter_mut().for_each(RecurrentState::discard);
        for (sequence, &len) in self.sequences.iter_mut().zip(lens) {
            sequence.staged_sums.clone_from(&sequence.sums);
            sequence.pages.truncate(len);
            for last in [&mut sequence.last_uk, &mut sequence.last_uv].into_iter().flatten() {
                last.staged = None;
            }
        }
    }

    /// Makes a successful step part of the past and evicts forgotten pages.
    pub(crate) fn commit(&mut self) {
        self.staged_gates = None;
        self.conv.iter_mut().for_each(RecurrentState::commit);
        for sequence in &mut self.sequences {
            for last in [&mut sequence.last_uk, &mut sequence.last_uv].into_iter().flatten() {
                if let Some(staged) = last.staged.take() {
                    last.row = staged;
                }
            }
            sequence.sums.clone_from(&sequence.staged_sums);
            sequence.evict();
        }
    }
}

impl PagedSequence {
    /// Adds the log gates of the sequence's rows of `gates: [R, H]` to the sums.
    fn add_gates(&mut self, gates: &[f32], s: &Segment) {
        let (heads, count) = (self.sums.len(), s.q_len);
        if count == 0 {
            return;
        }
        let own = &gates[s.q_start * heads..][..count * heads];
        let mut sums = vec![0.0; heads * count];
        for (h, sum) in self.staged_sums.iter_mut().enumerate() {
            for t in 0..count {
                *sum += clamp_log_gate(f64::from(own[t * heads + h]));
                sums[h * count + t] = *sum;
            }
        }
        self.pages.write_sums(self.pages.seen() - count, count, &sums);
    }

    /// Adds the next `totals: [range, H]` of `count` new tokens to the sums.
    fn add_totals<'a>(&mut self, totals: &mut impl Iterator<Item = &'a [f64]>, count: usize) {
        for part in page_parts(self.pages.seen() - count, count) {
            let Some(totals) = totals.next() else { return };
            self.staged_sums.iter_mut().zip(totals).for_each(|(sum, total)| *sum += total);
            if part.slots.end == PAGE {
                self.pages.write_end(part.index, &self.staged_sums);
            }
        }
    }

    fn evict(&mut self) {
        let (len, group) = (self.pages.seen(), self.pages.shape().group);
        for head in 0..self.pages.shape().kv_heads {
            let (rule, now) = (&self.rule, &self.sums[head * group..][..group]);
            self.pages.drop_while(head, |first, end| rule.forgets(head, (first, end), len, now));
        }
    }
}
