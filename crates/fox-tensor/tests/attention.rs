//! What forgetting attention means, on the oracle: the formula, segments, pruning.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::cases::{Rng, relative_error};
use fox_tensor::naive::{BM, BN};
use fox_tensor::{
    Acp, AttentionInputs, AttentionSpec, Device, Gradients, LogitBound, Mask, Segment, Segments,
    Tape, Tensor, tile_counts, tile_words,
};

const H: usize = 2;
const D: usize = 8;
const C: usize = H * D;

/// Operands of one attention: `q`, `k`, `v` of width `C`, gates of width `H`.
#[derive(Clone)]
struct Operands {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    gates: Vec<f64>,
    d_out: Vec<f64>,
}

/// Results: output, row statistics, block counts, gradients.
struct Outcome {
    o: Vec<f64>,
    lse: Vec<f64>,
    tiles: Vec<u64>,
    grads: Vec<Vec<f64>>,
}

impl Operands {
    fn random(seed: u64, q_rows: usize, k_rows: usize, strength: f64) -> Self {
        let mut rng = Rng::new(seed);
        Operands {
            q: rng.normals(q_rows * C),
            k: rng.normals(k_rows * C),
            v: rng.normals(k_rows * C),
            gates: (0..k_rows * H).map(|_| -strength * rng.uniform()).collect(),
            d_out: rng.normals(q_rows * C),
        }
    }

    /// Query rows and key rows of these ranges.
    fn part(&self, q: std::ops::Range<usize>, k: std::ops::Range<usize>) -> Self {
        Operands {
            q: self.q[q.start * C..q.end * C].to_vec(),
            k: self.k[k.start * C..k.end * C].to_vec(),
            v: self.v[k.start * C..k.end * C].to_vec(),
            gates: self.gates[k.start * H..k.end * H].to_vec(),
            d_out: self.d_out[q.start * C..q.end * C].to_vec(),
        }
    }

    fn run(&self, spec: &AttentionSpec) -> Outcome {
        self.run_on(&Device::naive(), spec)
    }

    fn run_on(&self, device: &Device, spec: &AttentionSpec) -> Outcome {
        let real = |x: &[f64], cols: usize| device.from_f64(x, [x.len() / cols, cols]).unwrap();
        let mut tape = Tape::recording(device);
        let leaves = [real(&self.q, C), real(&self.k, C), real(&self.v, C), real(&self.gates, H)]
            .map(|x| tape.leaf(x));
        let [q, k, v, gates] = &leaves;
        let inputs = AttentionInputs {
            q: q.value(),
            k: k.value(),
            v: v.value(),
            log_gates: Some(gates.value()),
        };
        let lse = device.backend().attention_fwd(&inputs, spec).unwrap().lse.to_f64().unwrap();
        let (o, tiles) = tape.attention(q, k, v, Some(gates), spec).unwrap();
        let out = o.value().to_f64().unwrap();
        let seeds = [(o, real(&self.d_out, C))];
        let grads = tape.backward_from(&seeds, &leaves, &mut Gradients::default()).unwrap();
        let values = |x: Option<Tensor>| x.unwrap().to_f64().unwrap();
        Outcome {
            o: out,
            lse,
            tiles: tile_counts(&tiles).unwrap().concat(),
            grads: grads.into_iter().map(values).collect(),
        }
    }
}

fn segment(q_start: usize, q_len: usize, k_start: usize, k_len: usize) -> Segment {
    Segment { q_start, q_len, k_start, k_len }
}

fn one(q_len: usize, k_len: usize) -> AttentionSpec {
    let segments = Segments::new(vec![segment(0, q_len, 0, k_len)]).unwrap();
    AttentionSpec::causal(H, D, segments)
}

fn assert_close(got: &[f64], want: &[f64], what: &str) {
    let error = relative_error(got, want);
    assert!(error < 1e-12, "{what}: {error:e}");
}

/// The definition with products of gates instead of sums of logarithms.
#[test]
fn decay_is_the_product_of_gates() {
    let (t, x) = (9, Operands::random(1, 9, 9, 2.0));
    for mask in [Mask::Causal, Mask::Bidirectional] {
        let got = x.run(&AttentionSpec { mask, ..one(t, t) });
        for (i, h) in (0..t).flat_map(|i| (0..H).map(move |h| (i, h))) {
            let weight = |j: usize| {
                let logit: f64 =
                    (0..D).map(|c| x.q[i * C + h * D + c] * x.k[j * C + h * D + c]).sum();
                let gates = (i.min(j) + 1..=i.max(j)).map(|l| x.gates[l * H + h].exp());
                (logit * f64::from(1.0 / (D as f32).sqrt())).exp() * gates.product::<f64>()
            };
            let keys = 0..if mask == Mask::Causal { i + 1 } else { t };
            let total: f64 = keys.clone().map(weight).sum();
            assert_close(&[got.lse[i * H + h]], &[total.ln()], "lse");
            for c in 0..D {
                let o =
                    keys.clone().map(|j| weight(j) * x.v[j * C + h * D + c]).sum::<f64>() / total;
                assert_close(&[got.o[i * C + h * D + c]], &[o], "o");
            }
        }
    }
}

#[test]
fn padding_does_not_change_a_sequence() {
    let (time, pad) = (75, 9);
    let x = Operands::random(2, time, time, 1.0);
    let spec = AttentionSpec::causal(H, D, Segments::left_padded(time, &[pad]).unwrap());
    let (padded, alone) = (x.run(&spec), x.part(pad..time, pad..time).run(&one(66, 66)));
    assert_close(&padded.o[pad * C..], &alone.o, "o");
    assert!(padded.o[..pad * C].iter().all(|&o| o == 0.0));
    assert!(padded.lse[..pad * H].iter().all(|&lse| lse == f64::NEG_INFINITY));
    for (n, (padded, alone)) in padded.grads.iter().zip(&alone.grads).enumerate() {
        let first = pad * if n == 3 { H } else { C };
        assert!(padded[..first].iter().all(|&g| g == 0.0));
        assert_close(&padded[first..], alone, "gradient");
    }
}

#[test]
fn packed_documents_match_separate_documents() {
    let cu = [0, 70, 70, 71, 140];
    let x = Operands::random(3, 140, 140, 1.0);
    for mask in [Mask::Causal, Mask::Bidirectional] {
        let segments = Segments::packed(&cu).unwrap();
        let together = x.run(&AttentionSpec { mask, ..AttentionSpec::causal(H, D, segments) });
        let mut tiles = vec![0; 2 * H];
        for w in cu.windows(2) {
            let (rows, len) = (w[0]..w[1], w[1] - w[0]);
            let alone =
                x.part(rows.clone(), rows.clone()).run(&AttentionSpec { mask, ..one(len, len) });
            assert_close(&together.o[w[0] * C..w[1] * C], &alone.o, "o");
            for (n, (together, alone)) in together.grads.iter().zip(&alone.grads).enumerate() {
                let width = if n == 3 { H } else { C };
                assert_close(&together[w[0] * width..w[1] * width], alone, "gradient");
            }
            tiles.iter_mut().zip(&alone.tiles).for_each(|(sum, b)| *sum += b);
        }
        assert_eq!(together.tiles, tiles);
    }
}

#[test]
fn chunked_prefill_matches_one_call() {
    let t = 133;
    let x = Operands::random(4, t, t, 0.5);
    for window in [None, Some(50)] {
        let whole = x.run(&AttentionSpec { window, ..one(t, t) });
        let mut sums: Vec<Vec<f64>> = whole.grads.iter().map(|g| vec![0.0; g.len()]).collect();
        for w in [0, 1, 64, 70, 133].windows(2) {
            // The chunk sees the keys up to its own end, as with a cache.
            let spec = AttentionSpec { window, ..one(w[1] - w[0], w[1]) };
            let chunk = x.part(w[0]..w[1], 0..w[1]).run(&spec);
            assert_close(&chunk.o, &whole.o[w[0] * C..w[1] * C], "o");
            assert_close(&chunk.grads[0], &whole.grads[0][w[0] * C..w[1] * C], "dq");
            for n in 1..4 {
                sums[n].iter_mut().zip(&chunk.grads[n]).for_each(|(sum, g)| *sum += g);
            }
        }
        for n in 1..4 {
            assert_close(&sums[n], &whole.grads[n], "sum over chunks");
        }
    }
}

#[test]
fn windows_of_one_and_of_all_keys() {
    let (t, x) = (70, Operands::random(5, 70, 70, 1.0));
    for mask in [Mask::Causal, Mask::Bidirectional] {
        let spec = AttentionSpec { mask, ..one(t, t) };
        let narrow = x.run(&AttentionSpec { window: Some(1), ..spec.clone() });
        assert_close(&narrow.o, &x.v, "o");
        let wide = x.run(&AttentionSpec { window: Some(t), ..spec.clone() });
        assert_eq!(wide.o, x.run(&spec).o);
    }
}

/// Four query heads on two key heads: heads 0 and 1 read the first, 2 and 3 the second.
#[test]
fn gqa_matches_repeated_key_heads() {
    let (t, device) = (20, Device::naive());
    let mut rng = Rng::new(6);
    let mut real = |cols: usize| device.from_f64(&rng.normals(t * cols), [t, cols]).unwrap();
    let (q, k, v) = (real(4 * D), real(2 * D), real(2 * D));
    let gates = device.from_f64(&vec![-0.5; t * 4], [t, 4]).unwrap();
    let run = |k: &Tensor, v: &Tensor, kv_heads: usize| {
        let spec = AttentionSpec { heads: 4, kv_heads, ..one(t, t) };
        let inputs = AttentionInputs { q: &q, k, v, log_gates: Some(&gates) };
        device.backend().attention_fwd(&inputs, &spec).unwrap().o.to_f64().unwrap()
    };
    let repeat = |x: &Tensor| {
        let x = x.to_f64().unwrap();
        let twice: Vec<f64> = x.chunks(D).flat_map(|head| head.repeat(2)).collect();
        device.from_f64(&twice, [t, 4 * D]).unwrap()
    };
    assert_close(&run(&k, &v, 2), &run(&repeat(&k), &repeat(&v), 4), "o");
}

/// Read backwards, a bidirectional sequence gives the same, backwards: the gate between two
/// neighbours belongs to the later one, so the gates move over by one.
#[test]
fn bidirectional_attention_is_symmetric_in_time() {
    let (t, x) = (70, Operands::random(7, 70, 70, 1.0));
    let reverse = |x: &[f64], width: usize| -> Vec<f64> {
        x.chunks(width).rev().flatten().copied().collect()
    };
    let mut gates = reverse(&x.gates, H);
    gates.rotate_right(H);
    let mirrored = Operands {
        q: reverse(&x.q, C),
        k: reverse(&x.k, C),
        v: reverse(&x.v, C),
        d_out: reverse(&x.d_out, C),
        gates,
    };
    let spec = AttentionSpec { mask: Mask::Bidirectional, ..one(t, t) };
    let (forwards, backwards) = (x.run(&spec), mirrored.run(&spec));
    assert_close(&reverse(&backwards.o, C), &forwards.o, "o");
    assert_close(&reverse(&backwards.grads[1], C), &forwards.grads[1], "dk");
}

#[test]
fn first_gate_of_a_sequence_has_no_effect() {
    let x = Operands::random(8, 40, 80, 1.0);
    let outcome = x.run(&one(40, 80));
    assert!(outcome.grads[3][..H].iter().all(|g| g.abs() < 1e-12));
    assert!(outcome.grads[3].iter().any(|g| g.abs() > 1e-3));
}

fn pruned(log_tolerance: f32, mask: Mask, q_len: usize, k_len: usize) -> AttentionSpec {
    let acp = Acp::On { log_tolerance, bound: LogitBound::Norms };
    AttentionSpec { acp, mask, ..one(q_len, k_len) }
}

#[test]
fn dropped_mass_is_bounded() {
    for seed in 0..12 {
        for mask in [Mask::Causal, Mask::Bidirectional] {
            let x = Operands::random(100 + seed, 200, 330, 1.0 + 0.2 * seed as f64);
            let tolerance = [-10.0, -3.0, -0.5][seed as usize % 3];
            let with = x.run(&pruned(tolerance, mask, 200, 330));
            let without = x.run(&AttentionSpec { mask, ..one(200, 330) });
            assert!(with.tiles[0] < with.tiles[1], "nothing was pruned: {:?}", with.tiles);
            assert_eq!(without.tiles[0], without.tiles[1]);
            let bound = f64::from(tolerance).exp();
            for (with, without) in with.lse.iter().zip(&without.lse) {
                let dropped = -(with - without).exp_m1();
                assert!((-1e-12..=bound).contains(&dropped), "{dropped} over {bound}");
            }
            let largest = x.v.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
            for (with, without) in with.o.iter().zip(&without.o) {
                assert!((with - without).abs() <= 2.0 * bound * largest);
            }
        }
    }
}

/// `c` of one head.
fn prefix(x: &Operands, h: usize) -> Vec<f64> {
    let gates = x.gates.iter().skip(h).step_by(H);
    gates
        .scan(0.0, |sum, gate| {
            *sum += gate;
            Some(*sum)
        })
        .collect()
}

/// The threshold of one head with the bound from norms.
fn delta(x: &Operands, h: usize, tolerance: f64) -> f64 {
    let largest = |x: &[f64]| {
        let norm = |row: &[f64]| row[h * D..][..D].iter().map(|x| x * x).sum::<f64>().sqrt();
        x.chunks(C).map(norm).fold(0.0, f64::max)
    };
    let bound = largest(&x.q) * largest(&x.k) * f64::from(1.0 / (D as f32).sqrt());
    let keys = x.k.len() / C;
    -(2.0 * bound + (keys as f64).ln()) + tolerance
}

/// Lengths of queries and keys, and gates from weak (the border lies many blocks away) to strong.
fn pruning_problems() -> impl Iterator<Item = (Operands, usize, usize)> {
    let lengths = [(257, 257), (130, 321), (64, 640), (1, 700), (70, 70), (577, 577)];
    let all = lengths
        .into_iter()
        .zip(0..)
        .flat_map(|(lengths, n)| [0.2, 0.35, 0.5, 2.0].map(|strength| (lengths, strength, n)));
    all.map(|((q_len, k_len), strength, seed)| {
        (Operands::random(seed, q_len, k_len, strength), q_len, k_len)
    })
}

/// A block falls away when every pair in it has decayed below the threshold: pair by pair.
#[test]
fn pruning_skips_only_negligible_blocks() {
    for (x, q_len, k_len) in pruning_problems().filter(|problem| problem.1 < 500) {
        for mask in [Mask::Causal, Mask::Bidirectional] {
            let spec = pruned(-10.0, mask, q_len, k_len);
            let tiles = x.run(&spec).tiles;
            for h in 0..H {
                let (c, delta) = (prefix(&x, h), delta(&x, h, -10.0));
                let matters =
                    |i: usize, j: usize| spec.sees(i, j) && c[i.max(j)] - c[i.min(j)] >= delta;
                let mut visited = std::collections::HashSet::new();
                for (t, j) in (0..q_len).flat_map(|t| (0..k_len).map(move |j| (t, j))) {
                    if matters(k_len - q_len + t, j) {
                        visited.insert((t / BM, j / BN));
                    }
                }
                assert_eq!(tiles[2 * h], visited.len() as u64);
            }
        }
    }
}

/// The two-pointer passes of the specification find the same blocks as the rule per block.
#[test]
fn pruning_matches_the_two_pointer_scan() {
    for (x, q_len, k_len) in pruning_problems() {
        let tiles = x.run(&pruned(-10.0, Mask::Causal, q_len, k_len)).tiles;
        for h in 0..H {
            let (offset, c, delta) = (k_len - q_len, prefix(&x, h), delta(&x, h, -10.0));
            let (mut s, mut visited) = (0, 0);
            for m0 in (0..q_len).step_by(BM) {
                while c[offset + m0] - c[(s + BN - 1).min(k_len - 1)] < delta {
                    s += BN;
                }
                let diagonal = offset + (m0 + BM).min(q_len);
                visited += diagonal.div_ceil(BN) - s / BN;
            }
            assert_eq!(tiles[2 * h], visited as u64, "forward, {q_len} x {k_len}");

            let (mut e, mut visited) = (0, 0);
            for n0 in (0..k_len).step_by(BN) {
                let last = (n0 + BN - 1).min(k_len - 1);
                while e < q_len && c[offset + e] - c[last] >= delta {
                    e = (e + BM).min(q_len);
                }
                let diagonal = n0.saturating_sub(offset) / BM;
                visited += e.div_ceil(BM).saturating_sub(diagonal);
            }
            assert_eq!(tiles[2 * h], visited as u64, "backward, {q_len} x {k_len}");
        }
    }
}

/// Weights of a norm in which the largest magnitude of every head is that of a negative weight.
fn norm_weights(device: &Device, heads: &[f64]) -> Tensor {
    let w: Vec<f64> =
        heads.iter().flat_map(|&w| [vec![0.5 * w; D - 1], vec![-w]].concat()).collect();
    device.from_f64(&w, [w.len()]).unwrap()
}

/// Blocks of 640 tokens that a head with this `max|w_q| max|w_k|` visits where every token forgets by 1/8 and the
/// tolerance is e^-4.
fn visited(largest: f64) -> u64 {
    let u = largest * D as f64 * f64::from(1.0 / (D as f32).sqrt());
    let delta = -(2.0 * u + 640f64.ln()) - 4.0;
    // Block `n` back has its nearest pair at distance `64 n - 63`.
    let near = |back: usize| back == 0 || -0.125 * (64.0 * back as f64 - 63.0) >= delta;
    let count = (0..10).map(|m| (0..=m).filter(|&back| near(back)).count()).sum::<usize>();
    assert!(count < 55, "nothing is pruned");
    count as u64
}

/// The bound from norm weights: `max|w_q| max|w_k| d scale`, of the head or of the shared weights.
#[test]
fn norm_weights_bound_the_logits() {
    let (t, device) = (640, Device::naive());
    let x = Operands { gates: vec![-0.125; t * H], ..Operands::random(1, t, t, 0.0) };
    let weights = |heads: &[f64]| norm_weights(&device, heads);
    for (q, k, bounds) in [
        (weights(&[1.0, 3.0]), weights(&[2.0, 1.5]), [2.0, 4.5]),
        (weights(&[2.0]), weights(&[2.0, 3.0]), [4.0, 6.0]),
        (weights(&[2.0]), weights(&[1.0]), [2.0, 2.0]),
    ] {
        let acp = Acp::On { log_tolerance: -4.0, bound: LogitBound::QkNorm { q, k } };
        let tiles = x.run_on(&device, &AttentionSpec { acp, ..one(t, t) }).tiles;
        assert_eq!(tiles, bounds.map(|bound| [visited(bound), 55]).concat());
    }
}

/// Grouped queries have the bound of the key head that they read.
#[test]
fn logit_bound_uses_the_shared_key_head() {
    let (t, device) = (640, Device::naive());
    let mut rng = Rng::new(3);
    let mut real = |cols: usize| device.from_f64(&rng.normals(t * cols), [t, cols]).unwrap();
    let (q, k, v) = (real(4 * D), real(2 * D), real(2 * D));
    let gates = device.from_f64(&vec![-0.125; t * 4], [t, 4]).unwrap();
    let weights = |heads: &[f64]| norm_weights(&device, heads);
    let bound = LogitBound::QkNorm { q: weights(&[1.0, 2.0, 3.0, 1.5]), k: weights(&[1.0, 2.0]) };
    let acp = Acp::On { log_tolerance: -4.0, bound };
    let spec = AttentionSpec { heads: 4, kv_heads: 2, acp, ..one(t, t) };
    let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: Some(&gates) };
    let tiles = device.backend().attention_fwd(&inputs, &spec).unwrap().tiles;
    let bounds = [1.0, 2.0, 6.0, 3.0];
    assert_eq!(tile_counts(&tiles).unwrap().concat(), bounds.map(|b| [visited(b), 55]).concat());
}

#[test]
fn counts_visible_blocks() {
    let count = |spec: AttentionSpec, q: usize, k: usize| x_blocks(&spec, q, k);
    assert_eq!(count(one(129, 129), 129, 129), [6, 6]);
    let window = Some(1);
    assert_eq!(count(AttentionSpec { window, ..one(129, 129) }, 129, 129), [3, 3]);
    let window = Some(66);
    assert_eq!(count(AttentionSpec { window, ..one(192, 192) }, 192, 192), [6, 6]);
    let mask = Mask::Bidirectional;
    assert_eq!(count(AttentionSpec { mask, ..one(129, 129) }, 129, 129), [9, 9]);
    assert_eq!(count(AttentionSpec { mask, window, ..one(256, 256) }, 256, 256), [14, 14]);
    assert_eq!(count(one(1, 300), 1, 300), [5, 5]);
    // Without forgetting nothing is pruned, whatever the tolerance.
    let acp = Acp::On { log_tolerance: 0.0, bound: LogitBound::Norms };
    assert_eq!(count(AttentionSpec { acp, ..one(129, 129) }, 129, 129), [6, 6]);
}

/// A sequence of 10 million tokens has more tiles than 32 bits count.
#[test]
fn tiles_are_counted_in_64_bits() {
    let device = Device::naive();
    let counts = [[7, 12_207_109_375], [u64::from(u32::MAX), 1 << 40]];
    let tiles = device.from_i32(&tile_words(&counts), [2, 4]).unwrap();
    assert_eq!(tile_counts(&tiles).unwrap(), counts);
}

/// Blocks of the first head without forgetting.
fn x_blocks(spec: &AttentionSpec, q_rows: usize, k_rows: usize) -> [u64; 2] {
    let tiles = Operands::random(9, q_rows, k_rows, 0.0).run(spec).tiles;
    [tiles[0], tiles[1]]
}
