//! The decode state: what a model must remember of the tokens it has seen.
//!
//! A [`Cache`] holds a batch of sequences. Rows `b * capacity ..` of every layer's tensors belong to
//! sequence `b`, so the keys of one sequence are contiguous, as [`Segments`] asks. Pads are never
//! stored: a sequence starts at its first real token, and so do its positions. The capacity doubles
//! when it is reached. [`Cache::paged`] keeps the keys in pages instead, which can be dropped when they are
//! forgotten and shared between sequences; such caches can be joined for a step and split again.
//!
//! A step may bring any number of new tokens per sequence, also none. The shift needs the last raw
//! projections of the step before; they are staged and become current only when the whole step has
//! succeeded, so a failed step leaves the cache as it was.

use fox_tensor::{
    DType, DecodeKeys, Device, LastRows, Result as TensorResult, Segment, Segments, Tensor,
};

use crate::config::{ForgetGate, ForgettingConfig, MixerConfig, ModelConfig, RecurrentShape};
use crate::mixers::Past;
use crate::paged::{PagePolicy, PagedState};
use crate::recurrent_state::RecurrentState;
use crate::{Error, Result};

/// Capacity is rounded up to this many tokens.
const GRANULE: usize = 16;

/// The decode state of a batch of sequences. A clone shares the past and is written on its own: the way
/// to try several continuations of one prefix.
#[derive(Clone, Debug)]
pub struct Cache {
    device: Device,
    lens: Vec<usize>,
    capacity: usize,
    pub(crate) layers: Vec<LayerState>,
}

/// The state of one layer.
// There is one of these per layer, so the size of the larger variant does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub(crate) enum LayerState {
    Attention(Box<AttentionState>),
    Paged(PagedState),
    Recurrent(RecurrentState),
}

impl LayerState {
    pub fn attention(&mut self) -> Option<&mut AttentionState> {
        match self {
            LayerState::Attention(state) => Some(state),
            LayerState::Paged(_) | LayerState::Recurrent(_) => None,
        }
    }

    /// What a decode step of the whole model needs; `None` in recurrent models.
    pub fn past(&mut self) -> Option<Past<'_>> {
        match self {
            LayerState::Attention(state) => Some(state.past()),
            LayerState::Paged(state) => Some(state.past()),
            LayerState::Recurrent(_) => None,
        }
    }

    /// Notes what such a step has left: raw rows, and with pages the new log gates `[batch, H]`.
    pub fn stage(&mut self, last: LastRows, log_gates: &[f32]) {
        match self {
            LayerState::Attention(state) => {
                let LastRows { mut k, mut v } = last;
                (state.staged_uk, state.staged_uv) = (k.pop(), v.pop());
            }
            LayerState::Paged(state) => state.stage(last, log_gates),
            LayerState::Recurrent(_) => {}
        }
    }

    pub fn recurrent(&mut self) -> Option<&mut RecurrentState> {
        match self {
            LayerState::Attention(_) | LayerState::Paged(_) => None,
            LayerState::Recurrent(state) => Some(state),
        }
    }
}

/// The state of one attention layer.
#[derive(Clone, Debug)]
pub(crate) struct AttentionState {
    /// Keys after shift, norm and rotation `[batch * capacity, H_kv * d]`.
    pub k: Tensor,
    /// Values after the shift `[batch * capacity, H_kv * d]`.
    pub v: Tensor,
    /// Log forget gates `[batch * capacity, H]`.
    pub log_gates: Option<Tensor>,
    /// Last raw key projections `[batch, H_kv * d]`, when keys are shifted.
    pub last_uk: Option<Tensor>,
    /// Last raw value projections `[batch, H_kv * d]`, when values are shifted.
    pub last_uv: Option<Tensor>,
    staged_uk: Option<Tensor>,
    staged_uv: Option<Tensor>,
}

impl Cache {
    /// An empty state for `batch` sequences with room for `capacity` tokens each, to begin with.
    pub fn new(
        config: &ModelConfig,
        batch: usize,
        capacity: usize,
        device: &Device,
    ) -> Result<Cache> {
        if batch == 0 {
            return Err(Error::Argument("a cache needs at least one sequence".into()));
        }
        let capacity = round_up(capacity.max(1))?;
        let rows = checked_rows(batch, capacity)?;
        let recurrent = recurrent_shape(config);
        let layer = || match (&recurrent, config.mixer.forgetting()) {
            (Some(shape), _) => {
                RecurrentState::new(shape, batch, device).map(LayerState::Recurrent)
            }
            (None, Some(mixer)) => {
                let width = mixer.kv_heads * config.head_dim();
                let state = AttentionState::new(mixer, width, batch, rows, device);
                state.map(|state| LayerState::Attention(Box::new(state)))
            }
            (None, None) => Err(fox_tensor::Error::argument("cache", "a layer without a state")),
        };
        let layers = (0..config.num_layers).map(|_| layer()).collect::<TensorResult<_>>()?;
        Ok(Cache { device: device.clone(), lens: vec![0; batch], capacity, layers })
    }

    /// An empty state of one sequence whose keys lie in pages; `policy` is the model's own.
    pub fn paged(config: &ModelConfig, policy: &PagePolicy, device: &Device) -> Result<Cache> {
        let recurrent = recurrent_shape(config);
        let layer = |l: usize| match (&recurrent, config.mixer.forgetting()) {
            (None, Some(mixer)) => {
                PagedState::new(config, mixer, l, policy, device).map(LayerState::Paged)
            }
            (Some(shape), _) => {
                let lease = policy.meter.lease(shape.len() * DType::F32.size());
                let state = RecurrentState::new(shape, 1, device)?;
                Ok(LayerState::Recurrent(state.counted(lease)))
            }
            (None, None) => Err(fox_tensor::Error::argument("cache", "a layer without a state")),
        };
        let layers = (0..config.num_layers).map(layer).collect::<TensorResult<_>>()?;
        Ok(Cache { device: device.clone(), lens: vec![0], capacity: 0, layers })
    }

    /// One state of all sequences of paged states of one model, in order. At least one.
    pub fn join(caches: Vec<Cache>) -> Result<Cache> {
        let mut caches = caches.into_iter();
        let Some(mut joined) = caches.next() else {
            return Err(Error::Argument("there is nothing to join".into()));
        };
        for cache in caches {
            joined.lens.extend(cache.lens);
            for (layer, other) in joined.layers.iter_mut().zip(cache.layers) {
                match (layer, other) {
                    (LayerState::Paged(all), LayerState::Paged(other)) => {
                        all.sequences.extend(other.sequences);
                    }
                    (LayerState::Recurrent(all), LayerState::Recurrent(other)) => {
                        all.extend(other);
                    }
                    _ => return Err(Error::Argument("only paged states can be joined".into())),
                }
            }
        }
        for layer in joined.layers.iter_mut().filter_map(LayerState::recurrent) {
            layer.merge()?;
        }
        Ok(joined)
    }

    /// The states of the single sequences of a paged state.
    pub fn split(self) -> Result<Vec<Cache>> {
        let single = |len: usize| Cache {
            device: self.device.clone(),
            lens: vec![len],
            capacity: 0,
            layers: Vec::with_capacity(self.layers.len()),
        };
        let mut caches: Vec<Cache> = self.lens.iter().map(|&len| single(len)).collect();
        let count = caches.len();
        for layer in self.layers {
            let parts: Vec<LayerState> = match layer {
                LayerState::Paged(state) => {
                    let single =
                        |sequence| LayerState::Paged(PagedState { sequences: vec![sequence] });
                    state.sequences.into_iter().map(single).collect()
                }
                LayerState::Recurrent(state) => {
                    state.split(count)?.into_iter().map(LayerState::Recurrent).collect()
                }
                LayerState::Attention(_) => {
                    return Err(Error::Argument("only paged states can be split".into()));
                }
            };
            for (cache, part) in caches.iter_mut().zip(parts) {
                cache.layers.push(part);
            }
        }
        Ok(caches)
    }

    /// Pages held and dropped, per layer and key head, of sequence `b` of a paged state; no layers in
    /// other states.
    pub fn pages(&self, b: usize) -> Vec<Vec<(usize, usize)>> {
        let pages = |layer: &LayerState| match layer {
            LayerState::Paged(state) => Some(state.sequences.get(b)?.pages().collect()),
            _ => None,
        };
        self.layers.iter().filter_map(pages).collect()
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.lens.len()
    }

    /// Tokens seen so far, per sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Tokens per sequence that fit without growing; 0 for a paged state, which grows by pages.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Log forget gates of a layer `[batch * capacity, H]`: those of sequence `b` are the first
    /// `lens()[b]` rows from row `b * capacity()` on. `None` where nothing is forgotten.
    pub fn log_gates(&self, layer: usize) -> Option<&Tensor> {
        match self.layers.get(layer)? {
            LayerState::Attention(state) => state.log_gates.as_ref(),
            LayerState::Paged(_) | LayerState::Recurrent(_) => None,
        }
    }

    /// Makes room for the new tokens and says where queries and keys of each sequence lie.
    /// `new[b]` are the rows of the step that belong to sequence `b`; rows between are pads.
    pub(crate) fn begin(&mut self, new: &Segments) -> Result<Segments> {
        if new.len() != self.batch() {
            return Err(Error::Argument(format!(
                "a step has {} sequences, but the cache has {}",
                new.len(),
                self.batch()
            )));
        }
        if let Some(s) = new.as_slice().iter().find(|s| s.q_len != s.k_len) {
            return Err(Error::Argument(format!(
                "a step of {} queries against {} keys: with a cache the keys are its own",
                s.q_len, s.k_len
            )));
        }
        let lens = self.lens.iter().zip(new.as_slice()).map(|(len, s)| len + s.q_len);
        let needed = lens.max().unwrap_or(0);
        let in_pages = matches!(self.layers.first(), Some(LayerState::Paged(_)));
        if needed > self.capacity && !in_pages {
            self.grow(needed.max(2 * self.capacity))?;
        }
        // Pages lie anywhere; their keys only have to be told apart.
        let stride = if in_pages { needed } else { self.capacity };
        let place = |(b, (len, s)): (usize, (&usize, &Segment))| Segment {
            q_start: s.q_start,
            q_len: s.q_len,
            k_start: b * stride,
            k_len: len + s.q_len,
        };
        let placed = self.lens.iter().zip(new.as_slice()).enumerate().map(place).collect();
        Ok(Segments::new(placed)?)
    }

    /// Makes room in pages for the next token of each sequence.
    pub(crate) fn reserve_one(&mut self) -> Result<()> {
        for layer in &mut self.layers {
            if let LayerState::Paged(state) = layer {
                state.reserve_one(&self.lens, &self.device)?;
            }
        }
        Ok(())
    }

    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The step has succeeded: its tokens are now part of the past.
    pub(crate) fn commit(&mut self, new: &Segments) {
        for (len, segment) in self.lens.iter_mut().zip(new.as_slice()) {
            *len += segment.q_len;
        }
        for layer in &mut self.layers {
            match layer {
                LayerState::Attention(state) => state.commit(),
                LayerState::Paged(state) => state.commit(),
                LayerState::Recurrent(state) => state.commit(),
            }
        }
    }

    fn grow(&mut self, capacity: usize) -> Result<()> {
        let capacity = round_up(capacity)?;
        let rows = checked_rows(self.batch(), capacity)?;
        let (device, lens, old) = (&self.device, &self.lens, self.capacity);
        let moved = |tensor: &Tensor| -> TensorResult<Tensor> {
            let mut larger = device.zeros([rows, tensor.cols()], tensor.dtype())?;
            for (b, &len) in lens.iter().enumerate() {
                device.backend().copy_rows(tensor, b * old, &mut larger, b * capacity, len)?;
            }
            Ok(larger)
        };
        // All layers or none: a cache whose layers disagree could not be used again.
        let mut larger = Vec::with_capacity(self.layers.len());
        for layer in self.layers.iter_mut().filter_map(LayerState::attention) {
            let gates = layer.log_gates.as_ref().map(&moved).transpose()?;
            larger.push((moved(&layer.k)?, moved(&layer.v)?, gates));
        }
        let layers = self.layers.iter_mut().filter_map(LayerState::attention);
        for (layer, (k, v, log_gates)) in layers.zip(larger) {
            (layer.k, layer.v, layer.log_gates) = (k, v, log_gates);
        }
        self.capacity = capacity;
        Ok(())
    }
}

impl AttentionState {
    fn new(
        mixer: &ForgettingConfig,
        width: usize,
        batch: usize,
        rows: usize,
        device: &Device,
    ) -> TensorResult<Self> {
        let kept = device.backend().activation_type();
        let zeros = |rows: usize, width: usize| device.zeros([rows, width], kept);
        let last = |shifted: bool| shifted.then(|| zeros(batch, width)).transpose();
        let gated = mixer.gate != ForgetGate::None;
        Ok(AttentionState {
            k: zeros(rows, width)?,
            v: zeros(rows, width)?,
            log_gates: gated.then(|| device.zeros([rows, mixer.heads], DType::F32)).transpose()?,
            last_uk: last(mixer.k_shift)?,
            last_uv: last(mixer.v_shift)?,
            staged_uk: None,
            staged_uv: None,
        })
    }

    fn commit(&mut self) {
        for (last, staged) in
            [(&mut self.last_uk, &mut self.staged_uk), (&mut self.last_uv, &mut self.staged_uv)]
        {
            if let Some(staged) = staged.take() {
                *last = Some(staged);
            }
        }
    }

    /// Writes the new rows behind those of each sequence.
    pub fn append(
        &mut self,
        k: &Tensor,
        v: &Tensor,
        log_gates: Option<&Tensor>,
        segments: &Segments,
    ) -> TensorResult<()> {
        write_rows(k, &mut self.k, segments)?;
        write_rows(v, &mut self.v, segments)?;
        match (log_gates, &mut self.log_gates) {
            (Some(new), Some(gates)) => write_rows(new, gates, segments),
            _ => Ok(()),
        }
    }

    fn past(&mut self) -> Past<'_> {
        let (k, v, gates) = (&mut self.k, &mut self.v, self.log_gates.as_mut());
        Past {
            keys: DecodeKeys::Rows { k, v, gates },
            last_k: self.last_uk.iter().collect(),
            last_v: self.last_uv.iter().collect(),
        }
    }

    /// Finds and notes the last raw projections among all rows of the step, for [`Cache::commit`].
    pub fn stage_last(
        &mut self,
        uk: &Tensor,
        uv: &Tensor,
        segments: &Segments,
    ) -> TensorResult<()> {
        self.staged_uk = staged(self.last_uk.as_ref(), uk, segments)?;
        self.staged_uv = staged(self.last_uv.as_ref(), uv, segments)?;
        Ok(())
    }
}

fn write_rows(new: &Tensor, all: &mut Tensor, segments: &Segments) -> TensorResult<()> {
    let device = new.device().clone();
    for s in segments.as_slice().iter().filter(|s| s.q_len > 0) {
        device.backend().copy_rows(new, s.q_start, all, s.k_start + s.offset(), s.q_len)?;
    }
    Ok(())
}

/// The last rows after the step: sequences without new tokens keep theirs.
fn staged(last: Option<&Tensor>, u: &Tensor, segments: &Segments) -> TensorResult<Option<Tensor>> {
    let Some(last) = last else { return Ok(None) };
    let mut next = last.slice_rows(0, last.rows())?;
    for (b, s) in segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        u.device().backend().copy_rows(u, s.q_start + s.q_len - 1, &mut next, b, 1)?;
    }
    Ok(Some(next))
}

/// What a layer of a recurrent model remembers; `None` for attention.
pub(crate) fn recurrent_shape(config: &ModelConfig) -> Option<RecurrentShape> {
    match &config.mixer {
        MixerConfig::Forgetting(_) => None,
        MixerConfig::Delta(mixer) => Some(mixer.shape()),
        MixerConfig::Hgrn2(mixer) => Some(mixer.shape(config.hidden_size)),
        MixerConfig::Mamba2(mixer) => Some(mixer.shape()),
    }
}

fn round_up(capacity: usize) -> Result<usize> {
    capacity
        .checked_next_multiple_of(GRANULE)
        .ok_or_else(|| Error::Argument(format!("a cache of {capacity} tokens per sequence")))
}

fn checked_rows(batch: usize, capacity: usize) -> Result<usize> {
    batch.checked_mul(capacity).ok_or_else(|| {
        Error::Argument(format!("a cache of {batch} sequences of {capacity} tokens"))
    })
}
