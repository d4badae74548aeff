//! The list of cases: what it covers, and that comparing finds differences.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::HashSet;

use fox_tensor::Device;
use fox_tensor::cases::{self, Data};

#[test]
fn names_are_unique_and_inputs_fit_f32() {
    let all = cases::all();
    let names: HashSet<&str> = all.iter().map(|case| case.name.as_str()).collect();
    assert_eq!(names.len(), all.len());
    for case in &all {
        for input in &case.inputs {
            if let Data::Real(data) = &input.data {
                assert!(data.iter().all(|&x| x == cases::round(x)), "{}", case.name);
            }
        }
    }
}

#[test]
fn cases_cover_every_op_and_feature() {
    let names: Vec<String> = cases::all().into_iter().map(|case| case.name).collect();
    #[rustfmt::skip]
    let wanted = [
        "stick_breaking/causal+packed", "stick_breaking/causal+gqa+None gates+acp auto", "linear/",
        "linear/bias", "linear/twice", "embedding/pad", "add_rms_norm/delta",
        "gated_norm/norm+gate", "gated_norm/identity", "glu/Silu", "glu/Sigmoid", "log_gate/bias",
        "log_gate/z+bias", "linear_cross_entropy/", "linear_cross_entropy/taught",
        "sink_attention/", "v1000", "adamw/plain/decay 0.1", "adamw/packed/decay 0.1",
        "sum_squares/", "blend/several", "orthogonalize/square", "orthogonalize/wide",
        "orthogonalize/tall", "orthogonalize/stacked", "orthogonalize/several", "rows/",
        "shift Prev+norm Shared+rope", "attention/causal+packed", "causal+padded", "causal+cached",
        "bidirectional+gqa", "window 1", "VeryStrong gates", "None gates",
        "attention/causal+Closed gates", "attention/causal+gqa+Closed gates+acp", "log_gate/far",
        "frozen/", "linear_group/shared", "acp auto", "acp -3", "acp qk-norm",
        "acp shared qk-norm", "113x203", "799x3", "3x799", "d8", "d24", "d40", "d96", "d256",
        "composed/", "wall/5 nats+gates", "wall/closed blocks",
    ];
    for words in wanted {
        assert!(names.iter().any(|name| name.contains(words)), "no case {words}");
    }
}

#[test]
fn results_are_reproducible_and_finite() {
    let (first, second) = (Device::naive(), Device::naive());
    for case in cases::all() {
        let (a, b) = (cases::run(&case, &first).unwrap(), cases::run(&case, &second).unwrap());
        assert_eq!(cases::worst(&cases::compare(&a, &b)), 0.0, "{}", case.name);
        for (name, values) in a.outputs.iter().chain(&a.gradients) {
            // Only the lse of padding is not finite.
            let fine = |x: &f64| x.is_finite() || (name == "lse" && *x == f64::NEG_INFINITY);
            assert!(values.iter().all(fine), "{}: {name}", case.name);
        }
    }
}

/// Cases that are meant to prune do prune, and never everything.
#[test]
fn strong_gates_prune() {
    let (mut prunes, device) = (0, Device::naive());
    for case in cases::all().iter().filter(|case| case.name.contains("acp")) {
        let result = cases::run_forward(case, &device).unwrap();
        let stick = case.name.starts_with("stick_breaking/");
        let tiles = &result.outputs.iter().find(|(name, _)| name == "tiles").unwrap().1;
        let sum = |which: usize| tiles.iter().skip(which).step_by(2).sum::<f64>();
        let (visited, visible) = (sum(0), sum(1));
        assert!(visited > 0.0 && visited <= visible);
        // A stick is used up without any gate.
        let forgets =
            stick || ["Weak", "Strong", "Closed"].iter().any(|gates| case.name.contains(gates));
        assert_eq!(visited < visible, forgets, "{}: {visited} of {visible}", case.name);
        prunes += usize::from(forgets);
    }
    assert!(prunes >= 20);
}

#[test]
fn compare_reports_differing_outputs() {
    let device = Device::naive();
    let case = cases::random_attention(3).unwrap();
    let want = cases::run(&case, &device).unwrap();
    let names: Vec<String> = cases::compare(&want, &want).into_iter().map(|(n, _)| n).collect();
    assert!(names.starts_with(&["o".into(), "lse".into(), "tiles".into(), "d q".into()]));
    let mut got = want.clone();
    got.gradients[1].1[5] += 10.0;
    let errors = cases::compare(&got, &want);
    assert!(errors.iter().all(|(name, error)| (*error > 1e-3) == (name == "d k")));
    got.gradients[1].1[5] = f64::NAN;
    assert_eq!(cases::worst(&cases::compare(&got, &want)), f64::INFINITY);
    got.gradients.pop();
    assert_eq!(cases::compare(&got, &want).last().unwrap().1, f64::INFINITY);
}

#[test]
fn relative_error_of_infinities_and_small_results() {
    let inf = f64::NEG_INFINITY;
    assert_eq!(cases::relative_error(&[inf, 1.0], &[inf, 1.0]), 0.0);
    assert_eq!(cases::relative_error(&[0.0, 1.0], &[inf, 1.0]), f64::INFINITY);
    assert_eq!(cases::relative_error(&[inf, 1.0], &[0.0, 1.0]), f64::INFINITY);
    assert_eq!(cases::relative_error(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    assert!((cases::relative_error(&[2.0, 2.0], &[1.0, 1.0]) - 1.0).abs() < 1e-15);
    // A result of size 1e-9 that should be 0 is noise, not an infinite error.
    assert!(cases::relative_error(&[1e-9], &[0.0]) <= 1e-8);
    assert_eq!(cases::relative_error(&[], &[]), 0.0);
}

#[test]
fn largest_error_finds_one_wrong_element() {
    let want = vec![1.0; 1_000_000];
    let mut got = want.clone();
    got[123_456] = 1.01;
    assert!(cases::relative_error(&got, &want) < 2e-5);
    assert!((cases::largest_error(&got, &want) - 0.01).abs() < 1e-12);
    got[123_456] = f64::NAN;
    assert_eq!(cases::largest_error(&got, &want), f64::INFINITY);
    assert_eq!(cases::largest_error(&got[1..], &want), f64::INFINITY);
    // Relative to the largest element, and at least `FLOOR`.
    assert_eq!(cases::largest_error(&[3.0, 0.0], &[4.0, 0.0]), 0.25);
    assert_eq!(cases::largest_error(&[0.01], &[0.0]), 0.01 / cases::FLOOR);
    let inf = f64::NEG_INFINITY;
    assert_eq!(cases::largest_error(&[inf, 1.0], &[inf, 2.0]), 0.5);
    assert_eq!(cases::largest_error(&[inf, 1.0], &[0.0, 1.0]), f64::INFINITY);
}

/// The point of the large cases: more tiles of any size up to 128 rows than processors, several times over.
#[test]
fn large_cases_exceed_one_wave_of_thread_blocks() {
    let cases = cases::large_attention();
    assert!(cases.len() >= 2);
    for case in &cases {
        let tiles: usize = case.segments.iter().map(|s| s.q_len.div_ceil(128) * case.heads).sum();
        assert!(tiles > 4 * 132, "{}: {tiles}", case.name());
    }
    let has = |words: &[&str]| cases.iter().any(|c| words.iter().all(|w| c.name().contains(w)));
    assert!(has(&["h16:16"]) && has(&["gqa", "acp"]) && has(&["stick_breaking", "acp"]));
}

#[test]
fn recomputation_is_bit_exact() {
    let (plain, optional_ops) =
        (Device::naive(), Device::new(fox_tensor::naive::Naive::with_optional_ops()));
    for case in cases::all().iter().filter(|case| !case.name.starts_with("scan")) {
        let (want, got) =
            (cases::run(case, &plain).unwrap(), cases::run(case, &optional_ops).unwrap());
        for (what, error) in cases::compare(&got, &want) {
            assert!(error < 1e-12, "{} {what}: {error}", case.name);
        }
    }
}
