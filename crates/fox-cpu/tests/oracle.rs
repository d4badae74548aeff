//! Every op of the case list, at every instruction set of this CPU, against the f64 oracle.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_cpu::Level;
use fox_cpu::{Options, device_with};
use fox_tensor::{Device, cases};

/// Relative error that f32 arithmetic may have, norm-wise and of the largest element: the bound for gradients of the reference dumps.
const TOLERANCE: f64 = 2e-5;

fn check(cases: &[cases::Case], level: Level) {
    let naive = Device::naive();
    let cpu =
        device_with(Options { level: Some(level), poison: true, ..Options::default() }).unwrap();
    let mut failures = Vec::new();
    for case in cases {
        let want = cases::run(case, &naive).unwrap();
        let got = match cases::run(case, &cpu) {
            Ok(got) => got,
            Err(error) => {
                failures.push(format!("{}: {error}", case.name));
                continue;
            }
        };
        for measure in [cases::relative_error, cases::largest_error] {
            for (output, error) in cases::compare_by(measure, &got, &want) {
                if error.is_nan() || error > TOLERANCE {
                    failures.push(format!("{}: {output} is off by {error:.1e}", case.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", level.name(), failures.join("\n"));
}

#[test]
fn every_case_at_every_level() {
    let cases = cases::all();
    for level in Level::available() {
        check(&cases, level);
    }
}

#[test]
fn random_attention() {
    let cases: Vec<_> = (0..200).map(|seed| cases::random_attention(seed).unwrap()).collect();
    check(&cases, Level::detect());
}

#[test]
fn random_stick_breaking() {
    let cases: Vec<_> = (0..200).map(|seed| cases::random_stick_breaking(seed).unwrap()).collect();
    check(&cases, Level::detect());
}

#[test]
fn random_path_attention() {
    let cases: Vec<_> = (0..100).map(|seed| cases::random_path_attention(seed).unwrap()).collect();
    check(&cases, Level::detect());
}

#[test]
fn random_scans() {
    let cases: Vec<_> = (0..200).map(|seed| cases::random_scan(seed).unwrap()).collect();
    check(&cases, Level::detect());
}

/// The reference of the GPU's large cases is this backend, so here it is against the oracle.
#[test]
#[ignore = "minutes even in a release build; fox selftest --device cpu --large does the same"]
fn large_attention() {
    for description in cases::large_attention() {
        check(&[description.build().unwrap()], Level::detect());
    }
    for description in cases::large_path_attention() {
        check(&[cases::path_attention_case(&description).unwrap()], Level::detect());
    }
}
