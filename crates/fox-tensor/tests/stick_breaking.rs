//! What stick-breaking attention means, on the oracle: the formula, and what pruning may drop.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::cases::{Rng, relative_error};
use fox_tensor::{
    Acp, AttentionInputs, AttentionOut, AttentionSpec, AttentionWeights, Device, LogitBound, Mask,
    Segments, Tape, Var, tile_counts,
};

const D: usize = 8;

struct Operands {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    gates: Vec<f64>,
}

impl Operands {
    fn random(seed: u64, len: usize, strength: f64) -> Self {
        let mut rng = Rng::new(seed);
        Operands {
            q: rng.normals(len * D),
            k: rng.normals(len * D),
            v: rng.normals(len * D),
            gates: (0..len).map(|_| -strength * rng.uniform()).collect(),
        }
    }

    fn run(&self, gated: bool, acp: Acp) -> AttentionOut {
        let (device, len) = (Device::naive(), self.gates.len());
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| device.from_f64(x, [len, D]).unwrap());
        let gates = device.from_f64(&self.gates, [len, 1]).unwrap();
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: gated.then_some(&gates) };
        let spec = AttentionSpec { acp, ..AttentionSpec::causal(1, D, Segments::uniform(1, len)) };
        device.backend().stick_breaking_fwd(&inputs, &spec).unwrap()
    }
}

/// The definition with plain products: the current token takes no part, the remaining stick
/// is what no key took, and the gates multiply the weights.
#[test]
fn matches_the_definition_of_stick_breaking() {
    let (len, x) = (9, Operands::random(1, 9, 2.0));
    for gated in [false, true] {
        let out = x.run(gated, Acp::Off);
        let (o, rest) = (out.o.to_f64().unwrap(), out.lse.to_f64().unwrap());
        for i in 0..len {
            let share = |j: usize| {
                let logit: f64 = (0..D).map(|c| x.q[i * D + c] * x.k[j * D + c]).sum();
                1.0 / (1.0 + (-logit * f64::from(1.0 / (D as f32).sqrt())).exp())
            };
            let weight = |j: usize| {
                let left: f64 = (j + 1..i).map(|l| 1.0 - share(l)).product();
                let gates: f64 = (j + 1..=i).map(|l| x.gates[l].exp()).product();
                share(j) * left * if gated { gates } else { 1.0 }
            };
            let left: f64 = (0..i).map(|l| 1.0 - share(l)).product();
            assert!((rest[i] - left.ln()).abs() < 1e-12);
            if !gated {
                let taken: f64 = (0..i).map(weight).sum();
                assert!((taken + left - 1.0).abs() < 1e-12, "the whole stick is shared out");
            }
            let want: Vec<f64> =
                (0..D).map(|c| (0..i).map(|j| weight(j) * x.v[j * D + c]).sum()).collect();
            assert!(relative_error(&o[i * D..][..D], &want) < 1e-13);
        }
        assert!(o[..D].iter().all(|&o| o == 0.0), "the first token sees nothing");
    }
}

#[test]
fn dropped_mass_is_bounded() {
    for seed in 0..6 {
        let x = Operands::random(seed, 300, 0.02);
        let tolerance = [-10.0, -3.0, -0.5][seed as usize % 3];
        for gated in [false, true] {
            let with = x.run(gated, Acp::On { log_tolerance: tolerance, bound: LogitBound::Norms });
            let without = x.run(gated, Acp::Off);
            let tiles = tile_counts(&with.tiles).unwrap()[0];
            assert!(tiles[0] < tiles[1], "{tiles:?}");
            let largest = x.v.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
            let bound = f64::from(tolerance).exp() * largest;
            let (with, without) = (with.o.to_f64().unwrap(), without.o.to_f64().unwrap());
            assert!(with.iter().zip(&without).all(|(a, b)| (a - b).abs() <= bound));
        }
    }
}

/// A stick that is used up in f32 is not followed any further, but one that is not, is.
#[test]
fn without_pruning_drops_only_f32_underflow() {
    let len = 640;
    let tiles = |score: f64| {
        let x = Operands {
            q: vec![1.0; len * D],
            k: vec![score / (D as f64).sqrt(); len * D],
            v: vec![1.0; len * D],
            gates: vec![0.0; len],
        };
        tile_counts(&x.run(false, Acp::Off).tiles).unwrap()[0]
    };
    assert_eq!(tiles(-6.0), [55, 55]);
    // ln 2 per key: 104 nats are gone after 151 keys, in the third or fourth block of a row.
    assert_eq!(tiles(0.0), [1 + 2 + 3 + 7 * 4, 55]);
}

#[test]
fn rejects_a_bidirectional_mask() {
    let device = Device::naive();
    let x = Var::constant(device.full([3, D], 1.0).unwrap());
    let spec = AttentionSpec {
        mask: Mask::Bidirectional,
        ..AttentionSpec::causal(1, D, Segments::uniform(1, 3))
    };
    let mut tape = Tape::inference(&device);
    let error = tape.attend(AttentionWeights::StickBreaking, &x, &x, &x, None, &spec).unwrap_err();
    assert!(error.to_string().contains("causal mask"), "{error}");
}
