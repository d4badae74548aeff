//! Observers of a forward pass.

use std::cell::RefCell;

use fox_model::{AttentionView, ForwardOptions, Observer, Pruning};
use fox_plot::MatrixImage;
use fox_tensor::{Mask, Result as TensorResult, Segments, tile_counts};
use rayon::prelude::*;

use super::InspectOptions;
use super::attend::{AttentionSample, HeadData, row, sample};
use super::forget::{HalfLife, cumulative, forget_matrix, half_life};
use crate::Result;
use crate::subject::Subject;

/// Blocks of queries that every head is sampled in, whether it gets a picture or not.
const SUMMARY_BLOCKS: usize = 128;

/// One token in so many counts as few.
const FEW: usize = 64;
/// Nats of decay that are little over a whole text, and much at one token.
const LITTLE: f64 = 5.0;

/// Gates and pruned tiles of a layer; no heads for layers without attention.
#[derive(Default)]
pub(super) struct LayerGates {
    pub heads: usize,
    /// Blocks visited and in all, per head.
    pub tiles: Vec<(i64, i64)>,
    /// Log gates `[T, H]`; empty without gates.
    pub log_gates: Vec<f32>,
    /// Whether queries see later keys too.
    pub bidirectional: bool,
}

impl LayerGates {
    pub fn is_gated(&self) -> bool {
        !self.log_gates.is_empty()
    }

    /// Log gates `[T]` of a head.
    pub fn log_gates(&self, head: usize) -> impl Iterator<Item = f32> {
        self.log_gates.iter().skip(head).step_by(self.heads).copied()
    }

    pub fn gates(&self, head: usize) -> Vec<f32> {
        self.log_gates(head).map(f32::exp).collect()
    }

    pub fn cumulative(&self, head: usize) -> Option<Vec<f64>> {
        self.is_gated().then(|| cumulative(self.log_gates(head)))
    }

    /// F of a head over the `last` tokens; see [`forget_matrix`].
    pub fn forget_matrix(&self, head: usize, last: usize, pixels: usize) -> MatrixImage {
        let sums = cumulative(self.log_gates(head));
        let mask = if self.bidirectional { Mask::Bidirectional } else { Mask::Causal };
        forget_matrix(&sums[sums.len().saturating_sub(last)..], mask, pixels)
    }

    pub fn half_life(&self, head: usize) -> Option<HalfLife> {
        self.cumulative(head).map(|c| half_life(&c))
    }

    /// The fraction of a head's forgetting that happens at a few tokens, one in [`FEW`]; 0 for heads that forget less than
    /// [`LITTLE`] nats in all of the text.
    pub fn suddenness(&self, head: usize) -> f64 {
        // A gate may be closed for good; one such token must not count for all others.
        let mut steps: Vec<f64> = self.log_gates(head).map(|g| f64::from(-g).min(LITTLE)).collect();
        steps.sort_by(|a, b| b.total_cmp(a));
        let all: f64 = steps.iter().sum();
        let few: f64 = steps.iter().take(steps.len().div_ceil(FEW)).sum();
        if all >= LITTLE { few / all } else { 0.0 }
    }

    pub fn mean_gate(&self, head: usize) -> Option<f64> {
        let gates = self.gates(head);
        self.is_gated()
            .then(|| gates.iter().map(|f| f64::from(*f)).sum::<f64>() / gates.len() as f64)
    }

    /// Mean gate of all heads at a position.
    pub fn mean_at(&self, t: usize) -> f64 {
        let row = &self.log_gates[t * self.heads..(t + 1) * self.heads];
        row.iter().map(|g| f64::from(g.exp())).sum::<f64>() / self.heads as f64
    }

    /// The gates over the text: a row per head, columns averaged over blocks.
    pub fn strip(&self, pixels: usize) -> Option<MatrixImage> {
        let n = self.log_gates.len() / self.heads.max(1);
        let block = n.div_ceil(pixels.max(1)).max(1);
        let row = |head| -> Vec<f64> {
            let mean =
                |part: &[f32]| part.iter().map(|f| f64::from(*f)).sum::<f64>() / part.len() as f64;
            self.gates(head).chunks(block).map(mean).collect()
        };
        let values = (0..self.heads).flat_map(row).collect();
        self.is_gated().then_some(MatrixImage { rows: self.heads, cols: n.div_ceil(block), values })
    }
}

/// Collects one value per layer; the default for layers without attention.
struct Collector<F, T> {
    look: F,
    seen: RefCell<Vec<T>>,
}

impl<F: Fn(&AttentionView<'_>) -> TensorResult<T>, T: Default> Observer for Collector<F, T> {
    fn attention(&self, view: &AttentionView<'_>) -> TensorResult<()> {
        let one = (self.look)(view)?;
        let mut seen = self.seen.borrow_mut();
        seen.resize_with(view.layer, T::default);
        seen.push(one);
        Ok(())
    }
}

fn watch<T: Default>(
    subject: &Subject<'_>,
    tokens: &[u32],
    pruning: Pruning,
    look: impl Fn(&AttentionView<'_>) -> TensorResult<T>,
) -> Result<Vec<T>> {
    let model = subject.model;
    let ids: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
    let ids = model.device().from_i32(&ids, [tokens.len()])?;
    let collector = Collector { look, seen: RefCell::new(Vec::new()) };
    let options = ForwardOptions { pruning, ..ForwardOptions::default() };
    let segments = Segments::uniform(1, tokens.len());
    let hidden = model.observe(&ids, &segments, &options, &collector)?;
    let (states, width) = (hidden.states.value().to_f32()?, model.config().hidden_size);
    subject.check_finite(&states, |at| format!("a state at position {}", at / width + 1))?;
    Ok(collector.seen.into_inner())
}

/// The gates and the pruned tiles of every layer.
pub(super) fn gates(
    subject: &Subject<'_>,
    tokens: &[u32],
    pruning: Pruning,
) -> Result<Vec<LayerGates>> {
    let layers = watch(subject, tokens, pruning, |view| {
        let pair = |[visited, all]: [u64; 2]| (visited as i64, all as i64);
        Ok(LayerGates {
            heads: view.spec.heads,
            tiles: tile_counts(view.tiles)?.into_iter().map(pair).collect(),
            log_gates: view.log_gates.map_or(Ok(Vec::new()), |g| g.to_f32())?,
            bidirectional: view.spec.mask == Mask::Bidirectional,
        })
    })?;
    for (l, layer) in layers.iter().enumerate() {
        let gate = |at: usize| format!("a log forget gate of L{l} H{}", at % layer.heads);
        subject.check_finite(&layer.log_gates, gate)?;
    }
    Ok(layers)
}

/// Attention samples of the second pass.
pub(super) struct Samples {
    /// Per layer and head, a coarse sample without its map.
    pub summaries: Vec<Vec<AttentionSample>>,
    /// The chosen heads, in the order they were asked for, and the close-ups of those that have one.
    pub pictures: Vec<(Chosen, AttentionSample, Option<MatrixImage>)>,
}

/// A head that is pictured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    /// Layer and head.
    pub place: (usize, usize),
    /// Tokens of its close-up, if it has one.
    pub close_up: Option<usize>,
}

/// Samples the attention of every head, finely where a picture is wanted.
pub(super) fn attention(
    subject: &Subject<'_>,
    tokens: &[u32],
    options: &InspectOptions,
    chosen: &[Chosen],
) -> Result<Samples> {
    let layers = watch(subject, tokens, Pruning::Off, |view| {
        let (q, k) = (view.q.to_f32()?, view.k.to_f32()?);
        let gates = view.log_gates.map_or(Ok(Vec::new()), |g| g.to_f32())?;
        let look = |head: usize| {
            let data = head_data(view, &q, &k, &gates, head);
            let wanted = chosen.iter().find(|c| c.place == (view.layer, head));
            let picture = wanted.map(|chosen| {
                let look = |last| sample(&data, last, options.pixels, options.queries_per_pixel);
                (look(usize::MAX), chosen.close_up.map(|last| look(last).map))
            });
            (sample(&data, usize::MAX, SUMMARY_BLOCKS, 1), picture)
        };
        Ok((0..view.spec.heads).into_par_iter().map(look).collect::<Vec<_>>())
    })?;
    let pictures = chosen.iter().filter_map(|chosen| {
        let (whole, close_up) = layers[chosen.place.0][chosen.place.1].1.clone()?;
        Some((*chosen, whole, close_up))
    });
    Ok(Samples {
        pictures: pictures.collect(),
        summaries: layers.into_iter().map(|l| l.into_iter().map(|h| h.0).collect()).collect(),
    })
}

/// The attention of one head at the last of the tokens; `None` where there is no such head.
pub(super) fn last_row(
    subject: &Subject<'_>,
    tokens: &[u32],
    (layer, head): (usize, usize),
) -> Result<Option<Vec<f32>>> {
    let rows = watch(subject, tokens, Pruning::Off, |view| {
        if view.layer != layer || head >= view.spec.heads {
            return Ok(None);
        }
        let (q, k) = (view.q.to_f32()?, view.k.to_f32()?);
        let gates = view.log_gates.map_or(Ok(Vec::new()), |g| g.to_f32())?;
        Ok(Some(row(&head_data(view, &q, &k, &gates, head), tokens.len() - 1)))
    })?;
    Ok(rows.into_iter().flatten().next())
}

/// One head's part of the layer's tensors.
fn head_data(
    view: &AttentionView<'_>,
    q: &[f32],
    k: &[f32],
    gates: &[f32],
    head: usize,
) -> HeadData {
    let spec = view.spec;
    let dim = spec.head_dim;
    let kv_head = head / (spec.heads / spec.kv_heads);
    let part = |rows: &[f32], heads: usize, h: usize| -> Vec<f32> {
        rows.chunks_exact(heads * dim)
            .flat_map(|row| &row[h * dim..(h + 1) * dim])
            .copied()
            .collect()
    };
    let c = match gates.is_empty() {
        true => vec![0.0; view.q.rows()],
        false => cumulative(gates.iter().skip(head).step_by(spec.heads).copied()),
    };
    HeadData {
        q: part(q, spec.heads, head),
        k: part(k, spec.kv_heads, kv_head),
        c,
        dim,
        scale: spec.scale,
        window: spec.window,
        mask: spec.mask,
        weights: view.weights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abrupt_forgetting_ranks_above_steady_decay() {
        // 256 tokens; the heads: closed at two tokens, decaying evenly, remembering all.
        let gates = (0..256).flat_map(|t| [if t % 128 == 5 { -30.0 } else { -1e-4 }, -0.1, -1e-4]);
        let layer = LayerGates { heads: 3, log_gates: gates.collect(), ..LayerGates::default() };
        assert!(layer.suddenness(0) > 0.99);
        assert!((layer.suddenness(1) - 4.0 / 256.0).abs() < 1e-6);
        assert_eq!(layer.suddenness(2), 0.0);
    }
}
