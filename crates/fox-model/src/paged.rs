//! The decode state of an attention layer in pages, one list of pages per sequence and key head.
//!
//! What every later query has provably forgotten is dropped head by head. For a query at position `i` and
//! a key at `j`, `|q . k| scale <= U` on both sides of the softmax gives key `j` a share of at most
//! `exp(2 U + c_i - c_j)`, because query `i` sees at least itself. `c` never increases, so once
//! `c_i - c_j < -(2 U + ln N) + ln eps` the share is below `eps / N` for this and all later queries, and at
//! most `N` such keys have together at most `eps`. The last key of a page has the largest share of the page.

use std::sync::Arc;

use fox_tensor::{
    DType, DecodeKeys, Device, LastRows, LayerPages, Lease, NewKeys, PAGE, Page, PageMeter, Result,
    Segments, Tensor,
};

use crate::config::{ForgetGate, ForgettingConfig, MixerConfig, ModelConfig};
use crate::mixers::Past;

/// What paged caches drop, and who counts their bytes.
#[derive(Clone, Debug)]
pub struct PagePolicy {
    /// Per layer and query head, the decay below which a key is forgotten; see
    /// [`Model::page_policy`](crate::Model::page_policy). Empty when nothing is dropped.
    pub(crate) thresholds: Vec<Arc<[f64]>>,
    pub(crate) meter: PageMeter,
}

impl PagePolicy {
    /// Counts the bytes of all caches with this policy.
    pub fn meter(&self) -> &PageMeter {
        &self.meter
    }

    /// Per layer and query head, the decay (a sum of log gates) below which a key is forgotten.
    pub fn thresholds(&self) -> &[Arc<[f64]>] {
        &self.thresholds
    }
}

/// Bytes of the paged cache of one sequence on a device after `tokens` tokens of which nothing was forgotten;
/// with a sliding window, what `step` more tokens at a time may need at most.
pub fn paged_cache_bytes(
    config: &ModelConfig,
    device: &Device,
    tokens: usize,
    step: usize,
) -> usize {
    let layers = config.num_layers;
    match (&config.mixer, recurrent_values(config)) {
        (MixerConfig::Forgetting(mixer), _) => {
            let all = tokens.div_ceil(PAGE);
            // The page that the window begins in, the one that it ends in, and those of the step.
            let most = |window: usize| window.saturating_add(step).div_ceil(PAGE) + 2;
            let pages = mixer.window.map_or(all, |window| all.min(most(window)));
            let page = Page::bytes(config.head_dim(), group(mixer), device.backend());
            layers.saturating_mul(
                mixer
                    .kv_heads
                    .saturating_mul(pages.saturating_mul(page))
                    .saturating_add(last_bytes(mixer, config.head_dim(), device)),
            )
        }
        (_, values) => layers * values * DType::F32.size(),
    }
}

/// Values per layer that a recurrent model keeps.
fn recurrent_values(config: &ModelConfig) -> usize {
    crate::cache::recurrent_shape(config).map_or(0, |shape| shape.len())
}

/// Query heads with gates of their own per key head.
fn group(mixer: &ForgettingConfig) -> usize {
    if mixer.gate == ForgetGate::None { 0 } else { mixer.heads / mixer.kv_heads }
}

/// Bytes of the last raw projections of one sequence.
fn last_bytes(mixer: &ForgettingConfig, head_dim: usize, device: &Device) -> usize {
    let shifted = usize::from(mixer.k_shift) + usize::from(mixer.v_shift);
    shifted * mixer.kv_heads * head_dim * device.backend().activation_type().size()
}

/// One attention layer of a batch of sequences.
#[derive(Clone, Debug)]
pub(crate) struct PagedState {
    pub sequences: Vec<PagedSequence>,
}

/// One attention layer of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct PagedSequence {
    pages: LayerPages,
    /// Sums of the log gates of all tokens, per query head; empty when nothing is forgotten.
    sums: Vec<f64>,
    staged_sums: Vec<f64>,
    last_uk: Option<Last>,
    last_uv: Option<Last>,
    window: Option<usize>,
    thresholds: Option<Arc<[f64]>>,
    _lease: Lease,
}

/// The last raw projection `[1, H_kv * d]`, and that of the step under way.
#[derive(Clone, Debug)]
struct Last {
    row: Tensor,
    staged: Option<Tensor>,
}

impl PagedState {
    pub fn new(
        config: &ModelConfig,
        mixer: &ForgettingConfig,
        layer: usize,
        policy: &PagePolicy,
        device: &Device,
    ) -> Result<Self> {
        let (d, group) = (config.head_dim(), group(mixer));
        let last = |shifted: bool| -> Result<Option<Last>> {
            let kept = device.backend().activation_type();
            let zeros = || device.zeros([1, mixer.kv_heads * d], kept);
            shifted.then(|| Ok(Last { row: zeros()?, staged: None })).transpose()
        };
        let sums = vec![0.0; group * mixer.kv_heads];
        Ok(PagedState {
            sequences: vec![PagedSequence {
                pages: LayerPages::new(mixer.kv_heads, d, group, &policy.meter),
                staged_sums: sums.clone(),
                sums,
                last_uk: last(mixer.k_shift)?,
                last_uv: last(mixer.v_shift)?,
                window: mixer.window,
                thresholds: policy.thresholds.get(layer).filter(|_| group > 0).cloned(),
                _lease: policy.meter.lease(last_bytes(mixer, d, device)),
            }],
        })
    }

    /// The last raw key and value projections before the step, `[batch, H_kv * d]` each.
    pub fn last(&self) -> Result<(Option<Tensor>, Option<Tensor>)> {
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

    /// Writes the new keys and values `[R, H_kv * d]` and log gates `[R, H]` behind those of each
    /// sequence, and notes the last raw projections `[R, H_kv * d]`.
    pub fn append(
        &mut self,
        (k, v): (&Tensor, &Tensor),
        log_gates: Option<&Tensor>,
        (uk, uv): (&Tensor, &Tensor),
        segments: &Segments,
    ) -> Result<()> {
        let gates = log_gates.map(Tensor::to_f32).transpose()?;
        let heads = log_gates.map_or(0, Tensor::cols);
        for (sequence, s) in self.sequences.iter_mut().zip(segments.as_slice()) {
            sequence.staged_sums.clone_from(&sequence.sums);
            if s.q_len == 0 {
                continue;
            }
            let own = gates.as_ref().map(|gates| &gates[s.q_start * heads..][..s.q_len * heads]);
            let sums = sequence.running_sums(own, heads, s.q_len);
            let new = NewKeys { k, v, log_gates, sums: &sums, row: s.q_start, count: s.q_len };
            sequence.pages.append(&new, s.offset())?;
            for (last, u) in [(&mut sequence.last_uk, uk), (&mut sequence.last_uv, uv)] {
                if let Some(last) = last {
                    last.staged = Some(u.slice_rows(s.q_start + s.q_len - 1, 1)?);
                }
            }
        }
        Ok(())
    }

    /// The pages of all sequences.
    pub fn pages(&self) -> Vec<&LayerPages> {
        self.sequences.iter().map(|sequence| &sequence.pages).collect()
    }

    /// Makes room for the next token of each sequence, of which `lens` are there.
    pub fn reserve_one(&mut self, lens: &[usize], device: &Device) -> Result<()> {
        for (sequence, &len) in self.sequences.iter_mut().zip(lens) {
            sequence.pages.reserve(len, 1, device)?;
        }
        Ok(())
    }

    /// What a decode step of the whole model needs.
    pub fn past(&mut self) -> Past<'_> {
        let (mut pages, mut last_k, mut last_v) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in &mut self.sequences {
            pages.push(&mut sequence.pages);
            last_k.extend(sequence.last_uk.as_ref().map(|last| &last.row));
            last_v.extend(sequence.last_uv.as_ref().map(|last| &last.row));
        }
        Past { keys: DecodeKeys::Pages(pages), last_k, last_v }
    }

    /// Notes what such a step has left: raw rows and log gates `[batch, H]`.
    pub fn stage(&mut self, last: LastRows, log_gates: &[f32]) {
        let heads = log_gates.len() / self.sequences.len();
        let (mut last_k, mut last_v) = (last.k.into_iter(), last.v.into_iter());
        for (b, sequence) in self.sequences.iter_mut().enumerate() {
            let own = (heads > 0).then(|| &log_gates[b * heads..][..heads]);
            sequence.staged_sums.clone_from(&sequence.sums);
            let sums = sequence.running_sums(own, heads, 1);
            let len = sequence.pages.heads().first().map_or(0, |keys| keys.len());
            sequence.pages.write_sums(len - 1, 1, &sums);
            for (last, next) in
                [(&mut sequence.last_uk, &mut last_k), (&mut sequence.last_uv, &mut last_v)]
            {
                if let Some(last) = last {
                    last.staged = next.next();
                }
            }
        }
    }

    /// Per query head, the decay below which a block of keys may be skipped.
    pub fn thresholds(&self) -> Option<Arc<[f64]>> {
        self.sequences.first().and_then(|sequence| sequence.thresholds.clone())
    }

    /// The step has succeeded: its tokens are part of the past, and what they make forgotten is dropped.
    pub fn commit(&mut self) {
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
    /// Sums of the log gates at each new token, `[H, count]`; `gates` are `[count, H]`.
    fn running_sums(&mut self, gates: Option<&[f32]>, heads: usize, count: usize) -> Vec<f64> {
        let Some(gates) = gates else { return Vec::new() };
        let mut sums = vec![0.0; heads * count];
        for (h, sum) in self.staged_sums.iter_mut().enumerate() {
            for t in 0..count {
                *sum += f64::from(gates[t * heads + h]);
                sums[h * count + t] = *sum;
            }
        }
        sums
    }

    fn evict(&mut self) {
        for (h, keys) in self.pages.heads_mut().iter_mut().enumerate() {
            let (len, group) = (keys.len(), keys.group());
            let sums = &self.sums[h * group..][..group];
            let (window, thresholds) = (self.window, &self.thresholds);
            keys.drop_while(|first, page| {
                // The next query, at position `len`, sees keys from `len + 1 - window` on.
                let out_of_window = window.is_some_and(|window| first + PAGE + window <= len + 1);
                let forgotten = thresholds.as_ref().is_some_and(|thresholds| {
                    let last_key = |g: usize| page.sums[g * PAGE + PAGE - 1];
                    (0..group).all(|g| sums[g] - last_key(g) < thresholds[h * group + g])
                });
                out_of_window || forgotten
            });
        }
    }

    /// Pages held and dropped, per key head.
    pub fn pages(&self) -> impl Iterator<Item = (usize, usize)> {
        self.pages.heads().iter().map(|keys| (keys.pages().len(), keys.dropped()))
    }
}
