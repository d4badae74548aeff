//! Forgetting and stick-breaking attention: from a description of features and sizes to a case.

mod list;

pub(crate) use list::{cases, named, random};
pub use list::{large_attention, random_attention};

use crate::cases::{Args, Case, Output, Rng, round};
use crate::{
    Acp, AttentionInputs, AttentionSpec, AttentionWeights, LogitBound, Mask, Result, Segment,
    Segments, Tape, tile_counts,
};

/// Strength of the forget gates of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gates {
    /// No gates at all: plain softmax attention.
    None,
    /// Gates of exactly 1.
    Zero,
    /// Gates as at the start of training, around 0.5, some near 1.
    Mild,
    /// A decay of about 0.2 nat per step: the border of pruning is some blocks away and depends on the exact bound.
    Weak,
    /// A decay of about 2 nat per step: blocks further than the neighbour can be pruned.
    Strong,
    /// 50 nat per step: only the diagonal has weight.
    VeryStrong,
    /// Mild gates, one in forty of them -3e38, so that two of them overflow f32.
    Closed,
    /// From 2 nat per step in the first head to 0.0002 in the last: tiles of every length.
    Spread,
}

/// Pruning of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pruning {
    /// Not at all.
    Off,
    /// [`Acp::auto`].
    Auto,
    /// Norm-based bound, this log tolerance.
    Norms(f32),
    /// Bound from QK-norm weights, per head or (`true`) shared, and this log tolerance. Queries
    /// and keys are normalised so that the bound holds.
    QkNorm(f32, bool),
    /// Bound from QK-norm weights per head that are 8 times as large in every second key head, and this
    /// log tolerance. Queries agree with the older half of the keys and disagree with the rest, so that
    /// the older half has most of the weight until it has decayed by nearly what the bound allows.
    UnevenQkNorm(f32),
    /// Bounds that set the threshold of head `h` of segment `n` to `1 + h + n` times this, for any queries and keys.
    Given(f32),
}

/// Description of an attention case.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rows of the query and of the key tensors.
    pub rows: (usize, usize),
    /// The sequences.
    pub segments: Vec<Segment>,
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// The attention mask.
    pub mask: Mask,
    /// Sliding window.
    pub window: Option<usize>,
    /// Forgetting.
    pub gates: Gates,
    /// Pruning.
    pub pruning: Pruning,
    /// A label in the name.
    pub label: &'static str,
}

fn segment(q_start: usize, q_len: usize, k_start: usize, k_len: usize) -> Segment {
    Segment { q_start, q_len, k_start, k_len }
}

impl AttentionCase {
    /// One sequence with `q_len` queries at the end of `k_len` keys. One head of width 16, mild gates.
    pub fn new(q_len: usize, k_len: usize) -> Self {
        AttentionCase {
            heads: 1,
            kv_heads: 1,
            head_dim: 16,
            rows: (q_len, k_len),
            segments: vec![segment(0, q_len, 0, k_len)],
            weights: AttentionWeights::Softmax,
            mask: Mask::Causal,
            window: None,
            gates: Gates::Mild,
            pruning: Pruning::Off,
            label: "",
        }
    }

    pub(crate) fn heads(self, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        AttentionCase { heads, kv_heads, head_dim, ..self }
    }

    pub(crate) fn gates(self, gates: Gates) -> Self {
        AttentionCase { gates, ..self }
    }

    pub(crate) fn pruning(self, pruning: Pruning) -> Self {
        AttentionCase { pruning, ..self }
    }

    pub(crate) fn window(self, window: usize) -> Self {
        AttentionCase { window: Some(window), ..self }
    }

    pub(crate) fn stick_breaking(self) -> Self {
        AttentionCase { weights: AttentionWeights::StickBreaking, ..self }
    }

    pub(crate) fn bidirectional(self) -> Self {
        AttentionCase { mask: Mask::Bidirectional, ..self }
    }

    /// Documents one after the other.
    pub(crate) fn packed(mut self, lengths: &[usize]) -> Self {
        self.segments.clear();
        let mut start = 0;
        for &len in lengths {
            self.segments.push(segment(start, len, start, len));
            start += len;
        }
        self.rows = (start, start);
        self.label = "packed";
        self
    }

    /// Sequences of `time` rows with left padding.
    pub(crate) fn padded(mut self, time: usize, pads: &[usize]) -> Self {
        let row = |(b, &pad): (usize, &usize)| {
            segment(b * time + pad, time - pad, b * time + pad, time - pad)
        };
        self.segments = pads.iter().enumerate().map(row).collect();
        self.rows = (pads.len() * time, pads.len() * time);
        self.label = "padded";
        self
    }

    /// Several KV caches of different lengths with unused rows between them.
    pub(crate) fn cached(mut self, queries: &[usize], keys: &[usize], room: usize) -> Self {
        self.segments.clear();
        let mut start = 0;
        for (b, (&q_len, &k_len)) in queries.iter().zip(keys).enumerate() {
            self.segments.push(segment(start, q_len, b * room, k_len));
            start += q_len;
        }
        self.rows = (start, queries.len() * room);
        self.label = "cached";
        self
    }

    /// The name of the case, unique in a list.
    pub fn name(&self) -> String {
        let mut features = Vec::new();
        let mut add = |feature: String| features.push(feature);
        match self.mask {
            Mask::Causal => add("causal".into()),
            Mask::Bidirectional => add("bidirectional".into()),
        }
        if !self.label.is_empty() {
            add(self.label.into());
        }
        if self.kv_heads < self.heads {
            add("gqa".into());
        }
        if let Some(window) = self.window {
            add(format!("window {window}"));
        }
        match self.gates {
            Gates::Mild => {}
            gates => add(format!("{gates:?} gates")),
        }
        match self.pruning {
            Pruning::Off => {}
            Pruning::Auto => add("acp auto".into()),
            Pruning::Norms(tolerance) => add(format!("acp {tolerance}")),
            Pruning::QkNorm(tolerance, false) => add(format!("acp qk-norm {tolerance}")),
            Pruning::QkNorm(tolerance, true) => add(format!("acp shared qk-norm {tolerance}")),
            Pruning::UnevenQkNorm(tolerance) => add(format!("acp uneven qk-norm {tolerance}")),
            Pruning::Given(threshold) => add(format!("acp below {threshold}")),
        }
        let AttentionCase { heads, kv_heads, head_dim, rows, .. } = self;
        let (queries, keys) = rows;
        let (op, features) = (self.op(), features.join("+"));
        format!("{op}/{features}/{queries}x{keys}/h{heads}:{kv_heads}/d{head_dim}")
    }

    fn op(&self) -> &'static str {
        match self.weights {
            AttentionWeights::Softmax => "attention",
            AttentionWeights::StickBreaking => "stick_breaking",
        }
    }

    /// The options, without pruning. Fails when the segments overlap.
    pub(crate) fn spec(&self) -> Result<AttentionSpec> {
        Ok(AttentionSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            mask: self.mask,
            window: self.window,
            acp: Acp::Off,
            segments: Segments::new(self.segments.clone())?,
            full_sequence: None,
        })
    }

    /// The case. Fails when the segments overlap.
    pub fn build(&self) -> Result<Case> {
        let (spec, pruning, weights) = (self.spec()?, self.pruning, self.weights);
        let case = Case::new(self.name(), move |tape, args| {
            attend(tape, args, weights, &AttentionSpec { acp: pruning.acp(args)?, ..spec.clone() })
        });
        Ok(self.operands(case))
    }

    /// Adds queries, keys, values and gates, and the operands of the bound.
    pub(crate) fn operands(&self, mut case: Case) -> Case {
        let d = self.head_dim;
        let (q_width, kv_width) = (self.heads * d, self.kv_heads * d);
        let mut q = case.rng("q").normals(self.rows.0 * q_width);
        let mut k = case.rng("k").normals(self.rows.1 * kv_width);
        let uneven = matches!(self.pruning, Pruning::UnevenQkNorm(_));
        if uneven {
            let old = |i: usize| i / kv_width < self.rows.1 / 2;
            q.iter_mut().for_each(|x| *x = 1.0 + 0.1 * *x);
            let sign = |i: usize| if old(i) { 1.0 } else { -1.0 };
            k.iter_mut().enumerate().for_each(|(i, x)| *x = sign(i) * (1.0 + 0.1 * *x));
        }
        if uneven || matches!(self.pruning, Pruning::QkNorm(..)) {
            let shared = matches!(self.pruning, Pruning::QkNorm(_, true));
            for (name, x, width) in [("q_norm", &mut q, q_width), ("k_norm", &mut k, kv_width)] {
                let width = if shared { d } else { width };
                // Weights around 0.7: a bound small enough that pruning sets in within few blocks.
                let mut rng = case.rng(name);
                let factor =
                    |c: usize| if uneven && name == "k_norm" && c / d % 2 == 1 { 8.0 } else { 1.0 };
                let w: Vec<f64> =
                    (0..width).map(|c| factor(c) * round(0.5 + 0.4 * rng.uniform())).collect();
                normalise(x, &w, d);
                case = case.constant(name, &[width], w);
            }
        }
        if let Pruning::Given(threshold) = self.pruning {
            let bound = |(n, s): (usize, &Segment), h: usize| {
                let threshold = (1 + h + n) as f64 * f64::from(threshold);
                round(-((s.k_len as f64).ln() + threshold) / 2.0)
            };
            let of = |segment| (0..self.heads).map(move |h| bound(segment, h));
            let bounds = self.segments.iter().enumerate().flat_map(of).collect();
            case = case.constant("bounds", &[self.segments.len(), self.heads], bounds);
        }
        let case = case
            .real("q", &[self.rows.0, q_width], q)
            .real("k", &[self.rows.1, kv_width], k)
            .normal("v", &[self.rows.1, kv_width]);
        if self.gates == Gates::None {
            return case;
        }
        let mut rng = case.rng("log_gates");
        let relative = |n: usize| (n % self.heads) as f64 / (self.heads - 1).max(1) as f64;
        let gate = |n| self.gates.draw(&mut rng, relative(n));
        let gates = (0..self.rows.1 * self.heads).map(gate).collect();
        case.real("log_gates", &[self.rows.1, self.heads], gates)
    }
}

impl Pruning {
    /// The option, with the bounds of the case.
    pub(crate) fn acp(self, args: &Args<'_>) -> Result<Acp> {
        Ok(match self {
            Pruning::Off => Acp::Off,
            Pruning::Auto => Acp::auto(),
            Pruning::Norms(log_tolerance) => Acp::On { log_tolerance, bound: LogitBound::Norms },
            Pruning::QkNorm(log_tolerance, _) | Pruning::UnevenQkNorm(log_tolerance) => {
                let (q, k) = (args.tensor("q_norm")?.clone(), args.tensor("k_norm")?.clone());
                Acp::On { log_tolerance, bound: LogitBound::QkNorm { q, k } }
            }
            Pruning::Given(_) => {
                let bounds = args.tensor("bounds")?.clone();
                Acp::On { log_tolerance: 0.0, bound: LogitBound::Given(bounds) }
            }
        })
    }
}

impl Gates {
    /// One log gate of a head; `head` is its relative index, 0 for the first and 1 for the last.
    fn draw(self, rng: &mut Rng, head: f64) -> f64 {
        round(match self {
            Gates::None | Gates::Zero => 0.0,
            Gates::Mild => -(-rng.normal() - 1.0).exp().ln_1p(),
            Gates::Weak => -0.4 * rng.uniform(),
            Gates::Strong => -1.0 - 2.0 * rng.uniform(),
            Gates::VeryStrong => -50.0,
            Gates::Closed if rng.chance(0.025) => -3e38,
            Gates::Closed => Gates::Mild.draw(rng, head),
            Gates::Spread => -4.0 * rng.uniform() * 1e-4f64.powf(head),
        })
    }
}

/// Per-head RMS norm in place, rounded down a little so that f32 keeps the bound.
fn normalise(x: &mut [f64], w: &[f64], d: usize) {
    let heads = w.len() / d;
    for (n, head) in x.chunks_mut(d).enumerate() {
        let r = (head.iter().map(|x| x * x).sum::<f64>() / d as f64).sqrt();
        let w = &w[n % heads * d..][..d];
        head.iter_mut().zip(w).for_each(|(x, w)| *x = round(0.999 * *x / r * w));
    }
}

/// Runs the op on the tape, and on the backend for the row statistics, which the tape does not return.
fn attend(
    tape: &mut Tape<'static>,
    args: &Args<'_>,
    weights: AttentionWeights,
    spec: &AttentionSpec,
) -> Result<Vec<Output>> {
    let (q, k, v, gates) = (args.var("q")?, args.var("k")?, args.var("v")?, args.get("log_gates"));
    let (o, tiles) = tape.attend(weights, q, k, v, gates, spec)?;
    let inputs = AttentionInputs {
        q: q.value(),
        k: k.value(),
        v: v.value(),
        log_gates: gates.map(|gates| gates.value()),
    };
    let backend = tape.device().backend();
    let lse = match weights {
        AttentionWeights::Softmax => backend.attention_fwd(&inputs, spec)?.lse,
        AttentionWeights::StickBreaking => backend.stick_breaking_fwd(&inputs, spec)?.lse,
    };
    Ok(vec![
        Output::Var("o", o),
        Output::Plain("lse", lse.to_f64()?),
        Output::Plain(
            "tiles",
            tile_counts(&tiles)?.into_iter().flatten().map(|n| n as f64).collect(),
        ),
    ])
}
