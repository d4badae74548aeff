//! The oracle's gradients against central differences, for every case.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::Device;
use fox_tensor::cases::{self, Case, Data, Rng};
use fox_tensor::naive::Naive;

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

fn check(case: Case) {
    check_on(case, &Device::naive());
}

fn check_on(mut case: Case, device: &Device) {
    let result = cases::run(&case, device).unwrap();
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
        let expected = derivative(&mut case, input, &direction, device);
        let error = (dot(gradient, &direction) - expected).abs() / (length + 1e-2);
        assert!(error < TOLERANCE, "{}: d {name} is off by {error:e} of {length}", case.name);
    }
}

/// Ops with many or slow cases, each in a separate test; [`every_other_op`] has all the rest.
const APART: [&str; 6] = [
    "attention/causal",
    "attention/bidirectional",
    "stick_breaking/",
    "prepare_heads/",
    "scan/",
    "short_conv/",
];

fn check_all(chosen: impl Fn(&str) -> bool) {
    let cases: Vec<Case> = cases::all().into_iter().filter(|case| chosen(&case.name)).collect();
    assert!(!cases.is_empty());
    cases.into_iter().for_each(check);
}

#[test]
fn attention_causal() {
    check_all(|name| name.starts_with(APART[0]));
}

#[test]
fn attention_bidirectional() {
    check_all(|name| name.starts_with(APART[1]));
}

#[test]
fn attention_random() {
    (0..25).map(|seed| cases::random_attention(seed).unwrap()).for_each(check);
}

#[test]
fn stick_breaking() {
    check_all(|name| name.starts_with(APART[2]));
}

#[test]
fn stick_breaking_random() {
    (0..25).map(|seed| cases::random_stick_breaking(seed).unwrap()).for_each(check);
}

#[test]
fn path_attention_random() {
    (0..15).map(|seed| cases::random_path_attention(seed).unwrap()).for_each(check);
}

#[test]
fn prepare_heads() {
    check_all(|name| name.starts_with(APART[3]));
}

#[test]
fn scans() {
    check_all(|name| name.starts_with(APART[4]));
}

#[test]
fn random_scans() {
    (0..25).map(|seed| cases::random_scan(seed).unwrap()).for_each(check);
}

#[test]
fn short_convolutions() {
    check_all(|name| name.starts_with(APART[5]));
}

/// Whatever has a case is checked here: a new op needs no line in this file.
#[test]
fn every_other_op() {
    check_all(|name| !APART.iter().any(|apart| name.starts_with(apart)));
}

/// Where cheap results are computed again and linear layers go in groups: frozen ops below and between
/// trained layers, weights that serve twice.
#[test]
fn gradients_on_a_device_that_recomputes() {
    let device = Device::new(Naive::with_optional_ops());
    let kinds = ["frozen/", "linear_group/", "linear/twice", "composed/"];
    for kind in kinds {
        let cases = cases::all().into_iter().filter(|case| case.name.starts_with(kind));
        assert!(cases.map(|case| check_on(case, &device)).count() > 0, "{kind}");
    }
}
