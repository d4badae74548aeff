//! Values of the oracle's ops, worked out by hand.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::f64::consts::LN_2;

use fox_tensor::{
    Activation, AdamW, DType, Device, HeadSpec, IGNORE_LABEL, Rope, Segment, Segments, Tape, Var,
};

fn var(device: &Device, data: &[f64], dims: &[usize]) -> Var {
    Var::constant(device.from_f64(data, dims).unwrap())
}

fn assert_close(got: &Var, want: &[f64]) {
    let got = got.value().to_f64().unwrap();
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() < 1e-7, "{got} instead of {want}");
    }
}

#[test]
fn linear_and_embedding() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let x = var(&device, &[1.0, 2.0, 3.0, 4.0], &[2, 2]);
    let w = var(&device, &[1.0, 0.0, 0.0, 1.0, 1.0, -1.0], &[3, 2]);
    let bias = var(&device, &[10.0, 20.0, 30.0], &[3]);
    let y = tape.linear(&x, &w, Some(&bias)).unwrap();
    assert_close(&y, &[11.0, 22.0, 29.0, 13.0, 24.0, 29.0]);
    let ids = device.from_i32(&[2, 0, 2], [3]).unwrap();
    let y = tape.embedding(&w, &ids, None).unwrap();
    assert_close(&y, &[1.0, -1.0, 1.0, 0.0, 1.0, -1.0]);
}

#[test]
fn embedding_gradient_sums_repeated_ids_and_skips_padding() {
    let device = Device::naive();
    let ids = device.from_i32(&[2, 0, 2, 1], [4]).unwrap();
    let dy = device.from_f64(&[1.0, 2.0, 4.0, 8.0], [4, 1]).unwrap();
    let run = |pad| device.backend().embedding_bwd(&dy, &ids, 4, pad, None).unwrap();
    assert_eq!(run(None).to_f64().unwrap(), [2.0, 8.0, 5.0, 0.0]);
    assert_eq!(run(Some(2)).to_f64().unwrap(), [2.0, 8.0, 0.0, 0.0]);
}

#[test]
fn gates_and_units() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let z = var(&device, &[0.0, 800.0, -800.0, 3f64.ln()], &[2, 2]);
    let bias = var(&device, &[0.0, 0.0], &[2]);
    let y = tape.log_gate(Some(&z), Some(&bias), 2).unwrap();
    assert_close(&y, &[-LN_2, 0.0, -800.0, 0.75f64.ln()]);
    let y = tape.log_gate(None, Some(&bias), 2).unwrap();
    assert_close(&y, &[-LN_2; 4]);
    let x = var(&device, &[3f64.ln(), 0.0, 2.0, 5.0], &[1, 4]);
    assert_close(&tape.glu(&x, Activation::Sigmoid).unwrap(), &[1.5, 2.5]);
    assert_close(&tape.glu(&x, Activation::Silu).unwrap(), &[1.5 * 3f64.ln(), 0.0]);
}

#[test]
fn norms() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let (h, delta) = (var(&device, &[1.0, 3.0], &[1, 2]), var(&device, &[2.0, 1.0], &[1, 2]));
    let w = var(&device, &[1.0, 2.0], &[2]);
    // mean(3^2, 4^2) = 12.5; eps makes it 16.
    let (sum, y) = tape.add_rms_norm(&h, Some(&delta), &w, 3.5).unwrap();
    assert_close(&sum, &[3.0, 4.0]);
    assert_close(&y, &[0.75, 2.0]);
    // Groups of one channel each: 3^2 + 7 = 16, 4^2 + 7 = 23.
    let gate = var(&device, &[0.0, 3f64.ln()], &[1, 2]);
    let y = tape.gated_norm(&sum, Some(&w), Some(&gate), 2, 7.0, Activation::Sigmoid).unwrap();
    assert_close(&y, &[0.375, 0.75 * 8.0 / 23f64.sqrt()]);
}

#[test]
fn shift_norm_and_rotation() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    // Row 0 is padding; the other two are positions 1 and 2 of a sequence whose row 0 is `prev`.
    let segments =
        Segments::new(vec![Segment { q_start: 1, q_len: 2, k_start: 0, k_len: 3 }]).unwrap();
    let mut spec = HeadSpec { heads: 1, head_dim: 2, norm_eps: 0.0, rope: None, segments };
    let u = var(&device, &[9.0, 9.0, 4.0, 8.0, 12.0, 16.0], &[3, 2]);
    let shift = var(&device, &[0.0, 0.0, 3f64.ln()], &[3, 1]);
    let prev = var(&device, &[2.0, 4.0], &[1, 2]);
    let y = tape.prepare_heads(&u, Some(&shift), None, None, &spec).unwrap();
    assert_close(&y, &[0.0, 0.0, 2.0, 4.0, 6.0, 10.0]);
    let y = tape.prepare_heads(&u, Some(&shift), Some(&prev), None, &spec).unwrap();
    assert_close(&y, &[0.0, 0.0, 3.0, 6.0, 6.0, 10.0]);
    let norm = var(&device, &[1.0, 2.0], &[2]);
    let y = tape.prepare_heads(&u, None, None, Some(&norm), &spec).unwrap();
    let (a, b) = (1.0 / 40f64.sqrt(), 1.0 / 200f64.sqrt());
    assert_close(&y, &[0.0, 0.0, 4.0 * a, 16.0 * a, 12.0 * b, 32.0 * b]);
    // The only pair of a head of width 2 turns by its position.
    spec.rope = Some(Rope::new(500_000.0));
    let y = tape.prepare_heads(&u, None, None, None, &spec).unwrap();
    let turn = |t: f64, x: f64, y: f64| [x * t.cos() - y * t.sin(), x * t.sin() + y * t.cos()];
    assert_close(&y, &[&[0.0; 2][..], &turn(1.0, 4.0, 8.0), &turn(2.0, 12.0, 16.0)].concat());
}

/// Pairs are the two halves of the head, and the second pair turns by `base^(-2/d)`.
#[test]
fn rotation_pairs_halves() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let segments =
        Segments::new(vec![Segment { q_start: 0, q_len: 1, k_start: 0, k_len: 4 }]).unwrap();
    let rope = Some(Rope::new(100.0));
    let spec = HeadSpec { heads: 1, head_dim: 4, norm_eps: 0.0, rope, segments };
    let u = var(&device, &[1.0, 1.0, 0.0, 0.0], &[1, 4]);
    let y = tape.prepare_heads(&u, None, None, None, &spec).unwrap();
    // Position 3; frequencies 1 and 100^(-1/2) = 0.1.
    assert_close(&y, &[3f64.cos(), 0.3f64.cos(), 3f64.sin(), 0.3f64.sin()]);
}

#[test]
fn loss() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let x = var(&device, &[1.0, 1.0, 1.0], &[3, 1]);
    let w = var(&device, &[0.0, 3f64.ln()], &[2, 1]);
    let labels = device.from_i32(&[0, 1, IGNORE_LABEL], [3]).unwrap();
    let weights = device.zeros([3], DType::F32).unwrap();
    let loss = tape.linear_cross_entropy(&x, &w, &labels, &weights).unwrap();
    assert_close(&Var::constant(loss), &[4f64.ln(), (4.0 / 3.0f64).ln(), 0.0]);
}

#[test]
fn adamw() {
    let device = Device::naive();
    let of = |x: f64| device.from_f64(&[x], [1]).unwrap();
    let (mut p, mut m, mut v) = (of(2.0), of(0.0), of(0.0));
    let step = AdamW {
        lr: 0.5,
        beta1: 0.75,
        beta2: 0.5,
        eps: 0.0,
        weight_decay: 0.25,
        step: 1,
        grad_scale: 2.0,
    };
    // Bias correction makes the first direction the sign of the gradient.
    device.backend().adamw(&mut p, &of(-3.0), &mut m, &mut v, &step).unwrap();
    assert_eq!(p.to_f64().unwrap(), [2.0 + 0.5 - 0.5 * 0.25 * 2.0]);
    assert_eq!((m.to_f64().unwrap(), v.to_f64().unwrap()), (vec![-1.5], vec![18.0]));
    // m = 0.75 * -1.5 + 0.25 * 2, corrected by 1 - 0.75^2; v = 9 + 0.5 * 4, by 1 - 0.5^2.
    let second = AdamW { step: 2, weight_decay: 0.0, ..step };
    device.backend().adamw(&mut p, &of(1.0), &mut m, &mut v, &second).unwrap();
    let direction = (-0.625 / 0.4375) / (11.0f64 / 0.75).sqrt();
    assert!((p.to_f64().unwrap()[0] - (2.25 - 0.5 * direction)).abs() < 1e-12);
    assert_eq!(device.backend().sum_squares(&[&of(3.0), &of(-4.0)]).unwrap(), 25.0);
}
