//! Memory stays linear in the sequence: attention never holds a `T x T` matrix.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use fox_tensor::cases::Rng;
use fox_tensor::{Acp, AttentionInputs, AttentionSpec, LogitBound, Segments, tile_counts};

/// 65,536 tokens: a matrix of scores would take 16 GiB. Gates forget fast and pruning is on, so that
/// the test is quick; scratch memory does not depend on what is pruned.
#[test]
fn attention_over_65536_tokens_fits_one_gibibyte() {
    let (seq, head_dim) = (65_536, 64);
    let device = fox_cpu::device();
    let mut rng = Rng::new(3);
    let mut random = |scale: f64, width: usize| {
        let values: Vec<f32> = (0..seq * width).map(|_| (scale * rng.normal()) as f32).collect();
        device.from_f32(&values, [seq, width]).unwrap()
    };
    let (q, k, v) = (random(0.1, head_dim), random(0.1, head_dim), random(1.0, head_dim));
    let d_out = random(1.0, head_dim);
    let gates = device.full([seq, 1], -0.2).unwrap();
    let mut spec = AttentionSpec::causal(1, head_dim, Segments::uniform(1, seq));
    spec.acp = Acp::On { log_tolerance: -10.0, bound: LogitBound::Norms };
    let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: Some(&gates) };

    device.reset_peak();
    let out = device.backend().attention_fwd(&inputs, &spec).unwrap();
    let grads = device.backend().attention_bwd(&d_out, &inputs, &out, &spec).unwrap();
    let owned = [&q, &k, &v, &d_out, &gates, &out.o, &out.lse, &grads.dq, &grads.dk, &grads.dv];
    let owned: usize = owned.iter().map(|x| 4 * x.len()).sum();
    let scratch = device.memory().peak - owned;
    assert!(scratch < 1 << 30, "{scratch} bytes beyond inputs and outputs");

    let counts = tile_counts(&out.tiles).unwrap();
    assert!(counts[0][0] < counts[0][1] / 100, "{counts:?}: fast gates leave few tiles");
    assert!(grads.dq.to_f32().unwrap().iter().all(|x| x.is_finite()));
}
