//! The oracle's gradients against central differences, for every case.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::Device;
use fox_tensor::cases::{self, Case, Data, Rng};

const STEP: f64 = 1e-5;
/// Truncation is of order `STEP^2`, rounding of order `1e-16 / STEP` times the objective.
const TOLERANCE: f64 = 1e-7;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `d objective / d input` along `direction`.
fn derivative(case: &mut Case, input: usize, direction: &[f64], device: &Device) -> f64 {
    let Data::Real(original) = case.inputs[input].data.clone() else { panic!("not real") };
    let mut at = |step: f64| {
        let moved = original.iter().zip(direction).map(|(x, d)| x + step * d).collect();
        case.inputs[input].data = Data::Real(moved);
        cases::run_forward(case, device).unwrap().objective
    };
    let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
    case.inputs[input].data = Data::Real(original);
    slope
}

fn check(mut case: Case) {
    let device = Device::naive();
    let result = cases::run(&case, &device).unwrap();
    let wanted: Vec<usize> = (0..case.inputs.len()).filter(|&i| case.inputs[i].grad).collect();
    for (&input, (name, gradient)) in wanted.iter().zip(&result.gradients) {
        // Half along the gradient, so that its length is tested; half at random, so that its
        // direction is.
        let length = dot(gradient, gradient).sqrt();
        let mut direction = Rng::new(case.seed).normals(gradient.len());
        let random = dot(&direction, &direction).sqrt().max(1e-300);
        for (d, g) in direction.iter_mut().zip(gradient) {
            *d = *d / random + if length > 0.0 { g / length } else { 0.0 };
            // A pad row has no gradient by decree, which differences would not find.
            if case.name.starts_with("embedding/pad") && *g == 0.0 {
                *d = 0.0;
            }
        }
        let expected = derivative(&mut case, input, &direction, &device);
        let error = (dot(gradient, &direction) - expected).abs() / (length + 1e-2);
        assert!(error < TOLERANCE, "{}: d {name} is off by {error:e} of {length}", case.name);
    }
}

fn check_all(of: &str) {
    let cases: Vec<Case> =
        cases::all().into_iter().filter(|case| case.name.starts_with(of)).collect();
    assert!(!cases.is_empty());
    cases.into_iter().for_each(check);
}

#[test]
fn linear() {
    check_all("linear/");
}

#[test]
fn embedding() {
    check_all("embedding/");
}

#[test]
fn linear_cross_entropy() {
    check_all("linear_cross_entropy/");
}

#[test]
fn norms_gates_and_units() {
    for of in ["add_rms_norm/", "gated_norm/", "glu/", "log_gate/"] {
        check_all(of);
    }
}

#[test]
fn prepare_heads() {
    check_all("prepare_heads/");
}

#[test]
fn attention_causal() {
    check_all("attention/causal");
}

#[test]
fn attention_bidirectional() {
    check_all("attention/bidirectional");
}

#[test]
fn attention_random() {
    (0..25).map(|seed| cases::random_attention(seed).unwrap()).for_each(check);
}

#[test]
fn stick_breaking() {
    check_all("stick_breaking/");
}

#[test]
fn stick_breaking_random() {
    (0..25).map(|seed| cases::random_stick_breaking(seed).unwrap()).for_each(check);
}

#[test]
fn composed() {
    check_all("composed/");
}

#[test]
fn scans() {
    check_all("scan/");
}

#[test]
fn random_scans() {
    (0..25).map(|seed| cases::random_scan(seed).unwrap()).for_each(check);
}

#[test]
fn short_convolutions() {
    check_all("short_conv/");
}

#[test]
fn recurrent_gates() {
    for of in ["columns/", "time_step/", "hgrn_gates/", "lower_bound/"] {
        check_all(of);
    }
}
