//! Inspects forget gates, attention and pruning of a model on a given text.
//!
//! Two forward passes: the first sees only the gates and the pruned blocks of every head and decides
//! which heads are worth a picture; the second looks at queries and keys, one layer at a time. Pictures
//! are averaged over blocks, so that a text of 64k tokens gives a file as small as one of 2k.

mod attend;
mod boundary;
mod boundary_output;
mod forget;
mod observe;
mod output;

pub use attend::AttentionSample;
pub use boundary::{
    Boundaries, HeadBoundary, MarkedMatrix, Span, WINDOWS_PER_DOCUMENT, Window, boundaries,
    boundary_pattern, boundary_windows,
};
pub(crate) use forget::{GLOBAL_FROM, LOCAL_BELOW};
pub use forget::{HalfLife, Reach, cumulative, forget_matrix, half_life};
pub use output::half_life_chart;

use fox_model::Pruning;
use fox_plot::MatrixImage;
use serde::{Deserialize, Serialize};

use crate::subject::Subject;
use crate::{Error, Result};
use observe::Chosen;

/// Options of an inspection.
#[derive(Clone, Debug, PartialEq)]
pub struct InspectOptions {
    /// Layer and head of the pictures; chosen by half-life when empty.
    pub heads: Vec<(usize, usize)>,
    /// Tolerance of the pruning whose blocks are counted, natural log.
    pub log_pruning_tolerance: f32,
    /// Rows and columns of a picture, at most.
    pub pixels: usize,
    /// Queries looked at per row of a picture, at most.
    pub queries_per_pixel: usize,
}

impl Default for InspectOptions {
    fn default() -> Self {
        InspectOptions {
            heads: Vec::new(),
            log_pruning_tolerance: -10.0,
            pixels: 384,
            queries_per_pixel: 4,
        }
    }
}

/// Measurements of one head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadSummary {
    /// Its layer, from 0.
    pub layer: usize,
    /// Its number in the layer, from 0.
    pub head: usize,
    /// How long it remembers; absent without forget gates.
    pub half_life: Option<HalfLife>,
    /// Mean of its gates over the text.
    pub mean_gate: Option<f64>,
    /// Mean entropy of attention in nats, over sampled queries.
    pub entropy: f64,
    /// Entropy as a fraction of the largest possible.
    pub evenness: f64,
    /// Mean distance in tokens of what it attends to.
    pub distance: f64,
    /// Attention blocks that pruning visits.
    pub blocks_visited: i64,
    /// Attention blocks in all.
    pub blocks: i64,
}

impl HeadSummary {
    /// `L1 H3`.
    pub fn name(&self) -> String {
        format!("L{} H{}", self.layer, self.head)
    }

    /// Fraction of the attention blocks that pruning skips.
    pub fn pruned(&self) -> f64 {
        1.0 - self.blocks_visited as f64 / self.blocks.max(1) as f64
    }
}

/// Tokens of a close-up, at least.
const SHORTEST_CLOSE_UP: f64 = 64.0;

/// The end of a text.
#[derive(Clone, Debug)]
pub struct CloseUp {
    /// How many tokens.
    pub last: usize,
    /// F among them.
    pub forget: MatrixImage,
    /// A among them.
    pub attention: MatrixImage,
}

/// The pictures of one head.
#[derive(Clone, Debug)]
pub struct HeadPicture {
    /// Layer and head.
    pub place: (usize, usize),
    /// F; absent without forget gates.
    pub forget: Option<MatrixImage>,
    /// A and what was measured with it.
    pub attention: AttentionSample,
    /// The end of the text, for a head that looks back too little to be seen in the whole.
    pub close_up: Option<CloseUp>,
    /// The gate of every token.
    pub gates: Vec<f32>,
}

/// A token and how much is forgotten when it is read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenGate {
    /// The token.
    pub id: u32,
    /// How often it occurs.
    pub count: usize,
    /// Mean gate over all heads and occurrences.
    pub mean_gate: f64,
}

/// Results of an inspection.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Name of the model.
    pub model: String,
    /// The tokens of the text.
    pub tokens: Vec<u32>,
    /// Every head of every layer, in order.
    pub heads: Vec<HeadSummary>,
    /// The chosen heads.
    pub pictures: Vec<HeadPicture>,
    /// Per layer, the gates of its heads over the text: a row per head, columns averaged.
    pub gate_strips: Vec<MatrixImage>,
    /// Tokens by how much is forgotten when they are read, most first; those that occur twice or more.
    pub token_gates: Vec<TokenGate>,
    /// Tolerance of the pruning.
    pub log_pruning_tolerance: f32,
}

/// Inspects a model on `tokens`; the first one should be the start marker.
///
/// # Errors
/// An empty text, ids that the model does not know, heads that it does not have, a model without
/// attention, a tolerance that is not negative, and gates or states that are not finite numbers.
pub fn inspect(
    subject: &Subject<'_>,
    tokens: &[u32],
    options: &InspectOptions,
) -> Result<Inspection> {
    if tokens.is_empty() {
        return Err(Error::Empty { what: "the text".into() });
    }
    let largest = tokens.iter().copied().max().unwrap_or(0) as usize;
    subject.check_vocabulary("text", largest + 1)?;
    let tolerance = options.log_pruning_tolerance;
    if tolerance.is_nan() || tolerance >= 0.0 {
        return Err(Error::Argument(format!(
            "a pruning tolerance is the natural log of a fraction, so negative; not {tolerance}"
        )));
    }
    let pruning = Pruning::Tolerance(tolerance);
    let layers = observe::gates(subject, tokens, pruning)?;
    if layers.is_empty() {
        return Err(Error::Argument(format!(
            "the model {} has no attention to look at",
            subject.name
        )));
    }
    let chosen: Vec<Chosen> = choose(&layers, &options.heads)?
        .into_iter()
        .map(|place| Chosen {
            place,
            close_up: close_up_of(&layers[place.0], place.1, tokens.len()),
        })
        .collect();
    let samples = observe::attention(subject, tokens, options, &chosen)?;

    let mut heads = Vec::new();
    for (layer, seen) in layers.iter().enumerate() {
        for head in 0..seen.heads {
            let sample = &samples.summaries[layer][head];
            heads.push(HeadSummary {
                layer,
                head,
                half_life: seen.half_life(head),
                mean_gate: seen.mean_gate(head),
                entropy: sample.entropy,
                evenness: sample.evenness,
                distance: sample.distance,
                blocks_visited: seen.tiles[head].0,
                blocks: seen.tiles[head].1,
            });
        }
    }
    let picture = |(chosen, attention, close): (Chosen, AttentionSample, Option<MatrixImage>)| {
        let place = chosen.place;
        let seen = &layers[place.0];
        let forget = |last: usize| seen.forget_matrix(place.1, last, options.pixels);
        // Only heads with gates have a close-up.
        let close_up = chosen.close_up.zip(close);
        let close_up =
            close_up.map(|(last, attention)| CloseUp { last, forget: forget(last), attention });
        HeadPicture {
            place,
            forget: seen.is_gated().then(|| forget(usize::MAX)),
            attention,
            close_up,
            gates: seen.gates(place.1),
        }
    };
    Ok(Inspection {
        model: subject.name.to_string(),
        tokens: tokens.to_vec(),
        heads,
        pictures: samples.pictures.into_iter().map(picture).collect(),
        gate_strips: layers.iter().filter_map(|l| l.strip(options.pixels)).collect(),
        token_gates: token_gates(tokens, &layers),
        log_pruning_tolerance: options.log_pruning_tolerance,
    })
}

/// The attention weights of one head at the last of `tokens`, over all of them: `[T]`, exact.
///
/// # Errors
/// As [`inspect`].
pub fn last_attention(
    subject: &Subject<'_>,
    tokens: &[u32],
    place: (usize, usize),
) -> Result<Vec<f32>> {
    if tokens.is_empty() {
        return Err(Error::Empty { what: "the text".into() });
    }
    let largest = tokens.iter().copied().max().unwrap_or(0) as usize;
    subject.check_vocabulary("text", largest + 1)?;
    let row = observe::last_row(subject, tokens, place)?;
    let (layer, head) = place;
    row.ok_or_else(|| Error::Argument(format!("there is no head {head} in layer {layer}")))
}

/// How many of the last tokens show a head whose memory is too short to be seen in a picture of all `tokens`:
/// eight of its longer half-lives. `None` when the whole picture shows it.
fn close_up_of(layer: &observe::LayerGates, head: usize, tokens: usize) -> Option<usize> {
    let reach = (8.0 * layer.half_life(head)?.high).max(SHORTEST_CLOSE_UP);
    let last = reach.log2().ceil().exp2();
    (4.0 * last <= tokens as f64).then_some(last as usize)
}

/// The heads that were asked for; or the one that forgets at the fewest places, as where a chapter begins, and then the
/// shortest, a middle and the two longest memories.
fn choose(layers: &[observe::LayerGates], asked: &[(usize, usize)]) -> Result<Vec<(usize, usize)>> {
    let exists = |&&(l, h): &&(usize, usize)| layers.get(l).is_some_and(|layer| h < layer.heads);
    if let Some((l, h)) = asked.iter().find(|place| !exists(place)) {
        return Err(Error::Argument(format!(
            "there is no head {h} in layer {l}: the model has {} layers of {} heads, counted from 0",
            layers.len(),
            layers.iter().map(|layer| layer.heads).max().unwrap_or(0)
        )));
    }
    if !asked.is_empty() {
        return Ok(asked.to_vec());
    }
    let places = layers.iter().enumerate().flat_map(|(l, s)| (0..s.heads).map(move |h| (l, h)));
    let mut ranked: Vec<(f64, (usize, usize))> = places
        .map(|(l, h)| (layers[l].half_life(h).map_or(0.0, |life| life.median), (l, h)))
        .collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let last = ranked.len() - 1;
    let mut picked = vec![0, last / 2, last.saturating_sub(1), last];
    picked.dedup();
    picked.sort_unstable();
    picked.dedup();
    let by_memory = picked.into_iter().map(|i| ranked[i].1);
    let suddenness = |(l, h): (usize, usize)| layers[l].suddenness(h);
    let places = ranked.iter().map(|(_, place)| *place).filter(|place| suddenness(*place) > 0.0);
    let telling = places.max_by(|a, b| suddenness(*a).total_cmp(&suddenness(*b)));
    let others = by_memory.filter(|place| Some(*place) != telling);
    Ok(telling.into_iter().chain(others).collect())
}

fn token_gates(tokens: &[u32], layers: &[observe::LayerGates]) -> Vec<TokenGate> {
    let mut sums: std::collections::BTreeMap<u32, (usize, f64)> = Default::default();
    let gated: Vec<&observe::LayerGates> = layers.iter().filter(|l| l.is_gated()).collect();
    if gated.is_empty() {
        return Vec::new();
    }
    for (t, id) in tokens.iter().enumerate() {
        let mean = gated.iter().map(|l| l.mean_at(t)).sum::<f64>() / gated.len() as f64;
        let entry = sums.entry(*id).or_default();
        *entry = (entry.0 + 1, entry.1 + mean);
    }
    let mut list: Vec<TokenGate> = sums
        .into_iter()
        .filter(|(_, (count, _))| *count > 1)
        .map(|(id, (count, sum))| TokenGate { id, count, mean_gate: sum / count as f64 })
        .collect();
    list.sort_by(|a, b| a.mean_gate.total_cmp(&b.mean_gate));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Heads that forget too little to be sudden stay in the order of their memory.
    #[test]
    fn heads_are_ordered_by_memory() {
        let gates = (0..256).flat_map(|_| [-1e-4, -2e-4, -4e-4]);
        let layer = observe::LayerGates {
            heads: 3,
            log_gates: gates.collect(),
            ..observe::LayerGates::default()
        };
        assert_eq!(choose(&[layer], &[]).unwrap(), [(0, 2), (0, 1), (0, 0)]);
    }
}
