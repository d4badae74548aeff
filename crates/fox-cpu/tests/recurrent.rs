//! Scans at the edges of what numbers can do, and for any number of threads.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_cpu::{Options, device, device_with};
use fox_tensor::cases::{self, CaseResult, Decay, Rng, ScanCase, Strength};
use fox_tensor::{
    ConvSpec, Device, Gradients, L2Norm, ScanSpec, ScanVars, Segments, StateUpdate, Tape, Tensor,
    Var,
};

fn finite(x: &Tensor, what: &str) {
    let bad = x.to_f32().unwrap().into_iter().find(|x| !x.is_finite());
    assert!(bad.is_none(), "{what}: {bad:?}");
}

/// One head of width 8 over `len` tokens, whose log decays (per head or per channel) are `decay(t)`:
/// output and gradients must be finite. Returns the output.
fn run(
    update: StateUpdate,
    channels: bool,
    len: usize,
    scale_k: f32,
    decay: impl Fn(usize) -> f32,
) -> Vec<f32> {
    let (device, d) = (device(), 8);
    let mut rng = Rng::new(5);
    let mut draw = |scale: f32| -> Vec<f32> {
        (0..len * d).map(|_| scale * rng.normal() as f32 / (d as f32).sqrt()).collect()
    };
    let (q, k, v) = (draw(1.0), draw(scale_k), draw(1.0));
    let width = if channels { d } else { 1 };
    let decays: Vec<f32> = (0..len * width).map(|i| decay(i / width)).collect();
    let mut tape = Tape::recording(&device);
    let mut leaf = |x: &[f32], width: usize| tape.leaf(device.from_f32(x, [len, width]).unwrap());
    let leaves =
        [leaf(&q, d), leaf(&k, d), leaf(&v, d), leaf(&decays, width), leaf(&vec![0.7; len], 1)];
    let [q, k, v, log_decay, write] = &leaves;
    let spec = ScanSpec {
        heads: 1,
        key_heads: 1,
        key_dim: d,
        value_dim: d,
        scale: 1.0,
        update,
        segments: Segments::uniform(1, len),
    };
    let vars = ScanVars { q, k, v, log_decay: Some(log_decay), write: Some(write), skip: None };
    let (o, _) = tape.scan(&vars, None, false, &spec).unwrap();
    finite(o.value(), "output");
    let seed = device.full([len, d], 1.0).unwrap();
    let seeds = [(o.clone(), seed)];
    let grads = tape.backward_from(&seeds, &leaves, &mut Gradients::default()).unwrap();
    for grad in grads {
        finite(&grad.unwrap(), "gradient");
    }
    o.value().to_f32().unwrap()
}

fn kinds() -> [(StateUpdate, bool); 3] {
    [(StateUpdate::Add, false), (StateUpdate::Add, true), (StateUpdate::Delta, false)]
}

#[test]
fn extreme_gates_stay_finite() {
    for (update, channels) in kinds() {
        for decay in [0.0, -1e-8, -1e-3, -20.0, -88.0, -1e4, f32::MIN, f32::NEG_INFINITY] {
            run(update, channels, 200, 1.0, |_| decay);
        }
        // Decays of almost 0 and of almost 1 side by side.
        run(update, channels, 200, 1.0, |t| if t % 7 == 3 { -1e4 } else { -1e-6 });
    }
}

#[test]
fn scan_is_stable_over_100k_steps() {
    for (update, channels) in kinds() {
        for decay in [-1e-7, -1e-3, -0.5] {
            run(update, channels, 100_000, 0.5, |_| decay);
        }
    }
    // Written once and read at the end: e^-1 of it must be left.
    let (len, device) = (100_000, device());
    let mut first = vec![0.0; len];
    first[0] = 1.0;
    let var = |x: &[f32]| Var::constant(device.from_f32(x, [len, 1]).unwrap());
    let ones = var(&vec![1.0; len]);
    let decay = var(&vec![-1e-5; len]);
    for (update, _) in kinds() {
        let spec = ScanSpec {
            heads: 1,
            key_heads: 1,
            key_dim: 1,
            value_dim: 1,
            scale: 1.0,
            update,
            segments: Segments::uniform(1, len),
        };
        let vars = ScanVars {
            q: &ones,
            k: &var(&first),
            v: &ones,
            log_decay: Some(&decay),
            write: None,
            skip: None,
        };
        let mut tape = Tape::inference(&device);
        let (o, _) = tape.scan(&vars, None, false, &spec).unwrap();
        let last = o.value().to_f32().unwrap()[len - 1];
        let exact = (-1e-5f32 as f64 * (len - 1) as f64).exp();
        assert!((last as f64 / exact - 1.0).abs() < 2e-3, "{last} instead of {exact}");
    }
}

#[test]
fn zero_keys_write_nothing() {
    for (update, channels) in kinds() {
        let o = run(update, channels, 150, 0.0, |_| -0.1);
        assert!(o.iter().all(|&x| x == 0.0));
    }
    // The norm of a zero row is 0, and so is its gradient's direction.
    let device = device();
    let mut tape = Tape::recording(&device);
    let x = tape.leaf(device.full([5, 16], 0.0).unwrap());
    let w = tape.leaf(device.full([16, 4], 0.5).unwrap());
    let spec = ConvSpec {
        activation: None,
        l2_norm: Some(L2Norm { width: 8, eps: 1e-6 }),
        segments: Segments::uniform(1, 5),
    };
    let y = tape.short_conv(&x, &w, None, None, &spec).unwrap();
    assert!(y.value().to_f32().unwrap().iter().all(|&y| y == 0.0));
    let seeds = [(y, device.full([5, 16], 1.0).unwrap())];
    let grads = tape.backward_from(&seeds, &[x, w], &mut Gradients::default()).unwrap();
    grads.into_iter().for_each(|grad| finite(&grad.unwrap(), "gradient"));
}

#[test]
fn results_do_not_depend_on_thread_count() {
    let on = |threads: usize, case: &cases::Case| -> CaseResult {
        let device: Device =
            device_with(Options { threads: Some(threads), ..Options::default() }).unwrap();
        cases::run(case, &device).unwrap()
    };
    for (update, decay) in [
        (StateUpdate::Add, Decay::Head(Strength::Wild)),
        (StateUpdate::Add, Decay::Channel(Strength::Mild)),
        (StateUpdate::Delta, Decay::Head(Strength::Mild)),
    ] {
        let case = cases::scan(ScanCase {
            update,
            decay,
            write: true,
            skip: true,
            state: true,
            heads: if matches!(decay, Decay::Channel(_)) { (6, 6) } else { (6, 1) },
            dims: (16, 24),
            layout: ("packed", Segments::packed(&[0, 70, 211, 300]).unwrap()),
            rows: 300,
        });
        let one = on(1, &case);
        for threads in [2, 3, 7] {
            let errors = cases::compare(&on(threads, &case), &one);
            assert_eq!(cases::worst(&errors), 0.0, "{}: {threads} threads", case.name);
        }
    }
}
