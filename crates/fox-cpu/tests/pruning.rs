//! Pruning at its edge: what may be dropped is dropped, and a threshold looser by a nat would drop too much.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_tensor::{
    Acp, AttentionInputs, AttentionSpec, Device, LogitBound, Segment, Segments, output_change_bound,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const D: usize = 8;
const LOG_TOLERANCE: f64 = -3.0;

/// Norm weights of the query heads and of the key heads, all negative in the tensors.
const Q: [f64; HEADS] = [0.5, 1.0, 0.75, 0.25];
const K: [f64; KV_HEADS] = [1.0, 8.0];

/// Old keys `old`, for which nothing decays, and then `new` tokens that ask. The first of them forgets all
/// that is older at once. Queries of a head meet the old keys at `+U` and their own at `-U`, so that the
/// `old` keys together have a softmax mass of `old e^(2 U - decay)` of what the first new token sees, beside 1.
struct Edge {
    old: usize,
    new: usize,
    /// By how much the decay exceeds what the rule asks for, in nats.
    beyond: f64,
}

/// What pruning has dropped for the first query, per head.
struct Dropped {
    /// The softmax mass.
    share: f64,
    /// How far the output has moved, the norm over a head, and the largest norm of a value.
    moved: f64,
    value: f64,
}

/// `|q . k| scale` of head `h`, for all pairs.
fn bound(h: usize) -> f64 {
    Q[h] * K[h / (HEADS / KV_HEADS)] * (D as f64).sqrt()
}

impl Edge {
    fn run(&self, device: &Device, from_weights: bool) -> Vec<Dropped> {
        let keys = self.old + self.new;
        let rows = |count: usize, width: usize, value: &dyn Fn(usize, usize) -> f64| {
            let data: Vec<f64> = (0..count * width).map(|i| value(i / width, i % width)).collect();
            (device.from_f64(&data, [count, width]).unwrap(), data)
        };
        let sign = |j: usize| if j < self.old { 1.0 } else { -1.0 };
        let (q, _) = rows(self.new, HEADS * D, &|_, c| Q[c / D]);
        let (k, _) = rows(keys, KV_HEADS * D, &|j, c| sign(j) * K[c / D]);
        // Values of one norm that point against each other: the output moves as far as it can.
        let (v, _) = rows(keys, KV_HEADS * D, &|j, _| sign(j));
        let decay = |h: usize| 2.0 * bound(h) + (keys as f64).ln() - LOG_TOLERANCE + self.beyond;
        let (gates, _) = rows(keys, HEADS, &|j, h| if j == self.old { -decay(h) } else { 0.0 });
        let weights = |w: &[f64]| {
            let w: Vec<f64> = w.iter().flat_map(|w| [-w; D]).collect();
            device.from_f64(&w, [w.len()]).unwrap()
        };
        let logit_bound = match from_weights {
            true => LogitBound::QkNorm { q: weights(&Q), k: weights(&K) },
            false => LogitBound::Norms,
        };
        let segment = Segment { q_start: 0, q_len: self.new, k_start: 0, k_len: keys };
        let full = AttentionSpec {
            kv_heads: KV_HEADS,
            ..AttentionSpec::causal(HEADS, D, Segments::new(vec![segment]).unwrap())
        };
        let acp = Acp::On { log_tolerance: LOG_TOLERANCE as f32, bound: logit_bound };
        let pruned = AttentionSpec { acp, ..full.clone() };
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: Some(&gates) };
        let [full, pruned] = [&full, &pruned].map(|spec| {
            let out = device.backend().attention_fwd(&inputs, spec).unwrap();
            (out.lse.to_f64().unwrap(), out.o.to_f64().unwrap())
        });
        let dropped = |h: usize| {
            let pairs = full.1[h * D..].iter().zip(&pruned.1[h * D..]).take(D);
            Dropped {
                share: -(pruned.0[h] - full.0[h]).exp_m1(),
                moved: pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt(),
                value: (D as f64).sqrt(),
            }
        };
        (0..HEADS).map(dropped).collect()
    }
}

/// A few queries and a block of them, with both bounds, on the oracle and on the CPU.
fn everywhere(beyond: f64, check: impl Fn(&str, &Dropped)) {
    for (name, device) in [("oracle", Device::naive()), ("cpu", fox_cpu::device())] {
        for (new, from_weights) in [(1, true), (1, false), (64, true), (64, false)] {
            let dropped = Edge { old: 15 * 64, new, beyond }.run(&device, from_weights);
            for (h, dropped) in dropped.iter().enumerate() {
                let what = format!("{name}, {new} queries, from weights: {from_weights}, head {h}");
                check(&format!("{what}: {}", dropped.share), dropped);
            }
        }
    }
}

#[test]
fn drops_nearly_the_tolerance_beyond_the_threshold() {
    let allowed = LOG_TOLERANCE.exp();
    everywhere(0.03, |what, dropped| {
        assert!(dropped.share > 0.8 * allowed && dropped.share <= allowed, "{what}");
        // The bound on the output is met as closely as the mass.
        let most = output_change_bound(allowed, dropped.value);
        assert!(dropped.moved > 0.8 * most && dropped.moved <= most, "{what}");
    });
}

#[test]
fn keeps_blocks_above_the_threshold() {
    // With a threshold looser by a nat, the first would drop more than its tolerance.
    let looser = (LOG_TOLERANCE + 0.9).exp();
    assert!(15.0 / 16.0 * looser / (1.0 + looser) > 1.9 * LOG_TOLERANCE.exp());
    for beyond in [-0.9, -0.03] {
        everywhere(beyond, |what, dropped| assert!(dropped.share.abs() < 1e-4, "{what}"));
    }
}
