//! Stick-breaking over long sequences, at the edges of what numbers can do, and its memory.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_cpu::{Options, device, device_with};
use fox_tensor::cases::{Rng, relative_error};
use fox_tensor::{AttentionInputs, AttentionSpec, Device, Segments};

const D: usize = 8;

/// One head whose scores are `score` give or take `spread`, and log gates of `gate` if that is below 0.
fn run(device: &Device, len: usize, score: f64, spread: f64, gate: f32) -> Vec<Vec<f64>> {
    let mut rng = Rng::new(11);
    let mut draw = |mean: f64, spread: f64| -> Vec<f32> {
        (0..len * D).map(|_| (mean + spread * rng.normal()) as f32).collect()
    };
    let (q, k) = (draw(1.0, 0.0), draw(score / (D as f64).sqrt(), spread / (D as f64).sqrt()));
    let (v, d_out) = (draw(0.0, 1.0), draw(0.3, 1.0));
    let [q, k, v, d_out] = [q, k, v, d_out].map(|x| device.from_f32(&x, [len, D]).unwrap());
    let gates = device.full([len, 1], gate).unwrap();
    let log_gates = (gate < 0.0).then_some(&gates);
    let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates };
    let spec = AttentionSpec::causal(1, D, Segments::uniform(1, len));
    let out = device.backend().stick_breaking_fwd(&inputs, &spec).unwrap();
    let grads = device.backend().stick_breaking_bwd(&d_out, &inputs, &out, &spec).unwrap();
    let mut results = vec![out.o, out.lse, grads.dq, grads.dk, grads.dv];
    results.extend(grads.dlog_gates);
    results.iter().map(|x| x.to_f64().unwrap()).collect()
}

/// Fractions of 1 in 60,000 (most of the stick is left at the end), of 1 in 400 (a memory of some hundred
/// tokens), around a half, and all but 1 in 10,000.
#[test]
fn attention_over_8192_tokens_is_accurate() {
    let (cpu, naive) = (device(), Device::naive());
    for (score, gate) in [(-11.0, -1e-4), (-6.0, 0.0), (0.0, 0.0), (9.0, -1e-4)] {
        let (got, want) = (run(&cpu, 8192, score, 1.0, gate), run(&naive, 8192, score, 1.0, gate));
        for (n, (got, want)) in got.iter().zip(&want).enumerate() {
            let error = relative_error(got, want);
            assert!(error < 2e-5, "scores around {score}, result {n}: off by {error:.1e}");
        }
    }
}

#[test]
fn extreme_scores_and_gates_stay_finite() {
    for score in [-1e30, -1e4, -88.0, 0.0, 88.0, 1e4, 1e30] {
        for gate in [0.0, -1e-8, -1e4] {
            for (n, result) in run(&device(), 300, score, 0.0, gate).iter().enumerate() {
                let bad = result.iter().find(|x| !x.is_finite());
                // Nothing may be left of a stick, but then it is exactly nothing.
                let fine = bad.is_none_or(|x| n == 1 && *x == f64::NEG_INFINITY);
                assert!(fine, "score {score}, gate {gate}, result {n}: {bad:?}");
            }
        }
    }
}

#[test]
fn long_rows_do_not_depend_on_thread_count() {
    let on = |threads: usize| {
        let options = Options { threads: Some(threads), ..Options::default() };
        run(&device_with(options).unwrap(), 1500, -5.0, 1.0, -0.001)
    };
    let one = on(1);
    for threads in [2, 3, 8] {
        assert_eq!(on(threads), one, "{threads} threads");
    }
}

/// A matrix of scores of 32,768 tokens would take 4 GiB.
#[test]
fn attention_memory_is_linear() {
    let (device, len) = (device(), 32_768);
    device.reset_peak();
    run(&device, len, 0.0, 1.0, -0.1);
    let peak = device.memory().peak;
    assert!(peak < 256 << 20, "{peak} bytes");
}
