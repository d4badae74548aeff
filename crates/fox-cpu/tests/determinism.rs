//! The same bits from run to run and for any number of threads.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use fox_cpu::{Options, device_with};
use fox_tensor::cases::{self, Case, Rng};
use fox_tensor::{
    Activation, AttentionInputs, AttentionSpec, Device, GatedNormInputs, Segments, Tensor,
};

fn with_threads(threads: usize) -> Device {
    device_with(Options { threads: Some(threads), ..Options::default() }).unwrap()
}

fn bits(case: &Case, device: &Device) -> Vec<(String, Vec<u64>)> {
    let result = cases::run(case, device).unwrap();
    let all = result.outputs.into_iter().chain(result.gradients);
    all.map(|(name, x)| (name, x.iter().map(|x| x.to_bits()).collect())).collect()
}

#[test]
fn cases_do_not_depend_on_thread_count() {
    let devices = [with_threads(1), with_threads(2), with_threads(7)];
    for case in cases::all() {
        let one = bits(&case, &devices[0]);
        for device in &devices {
            assert_eq!(bits(&case, device), one, "{}", case.name);
        }
    }
}

fn random(device: &Device, seed: u64, dims: [usize; 2]) -> Tensor {
    let mut rng = Rng::new(seed);
    let values: Vec<f32> = (0..dims[0] * dims[1]).map(|_| rng.normal() as f32).collect();
    device.from_f32(&values, dims).unwrap()
}

/// Sizes at which the work is divided into many tasks: matrix products of several panels,
/// attention of few long units (cut over blocks) and of many short ones (cut over units).
fn large(device: &Device) -> Vec<Vec<f32>> {
    let backend = device.backend();
    let mut results = Vec::new();
    let (x, w) = (random(device, 1, [700, 300]), random(device, 2, [500, 300]));
    let y = backend.linear_fwd(&x, &w, None).unwrap();
    results.push(backend.linear_bwd_input(&y, &w, Some(x.clone())).unwrap());
    results.push(backend.linear_bwd_weight(&y, &x, None).unwrap());
    for (batch, heads, seq) in [(1, 2, 1500), (6, 4, 130)] {
        let spec = AttentionSpec::causal(heads, 32, Segments::uniform(batch, seq));
        let dims = [batch * seq, heads * 32];
        let [q, k, v, d] = [3, 4, 5, 6].map(|seed| random(device, seed, dims));
        let mut rng = Rng::new(9);
        let gates: Vec<f32> =
            (0..batch * seq * heads).map(|_| -0.02 * rng.normal().abs() as f32).collect();
        let gates = device.from_f32(&gates, [batch * seq, heads]).unwrap();
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: Some(&gates) };
        let out = backend.attention_fwd(&inputs, &spec).unwrap();
        let grads = backend.attention_bwd(&d, &inputs, &out, &spec).unwrap();
        results.extend([out.o, out.lse, grads.dq, grads.dk, grads.dv]);
        results.extend(grads.dlog_gates);
    }
    let (x, gate) = (random(device, 7, [999, 128]), random(device, 8, [999, 128]));
    let norm = device.full([128], 1.5).unwrap();
    let inputs = GatedNormInputs {
        x: &x,
        norm: Some(&norm),
        gate: Some(&gate),
        groups: 4,
        eps: 1e-6,
        act: Activation::Sigmoid,
        gate_first: false,
    };
    results.extend(backend.gated_norm_bwd(&gate, &inputs).unwrap().dnorm);
    results.iter().map(|x| x.to_f32().unwrap()).collect()
}

#[test]
fn large_shapes_do_not_depend_on_thread_count() {
    let one = large(&with_threads(1));
    for threads in [1, 2, 3, 8] {
        let other = large(&with_threads(threads));
        for (n, (a, b)) in one.iter().zip(&other).enumerate() {
            assert!(
                a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()),
                "result {n} differs on {threads} threads"
            );
        }
    }
}
