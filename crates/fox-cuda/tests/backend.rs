//! Every op case in f32 on the GPU, if present. `fox selftest --device cuda` does more.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use fox_cuda::{Cuda, Gpu, Precision};
use fox_tensor::{Device, cases};

/// Relative error that f32 arithmetic may have, norm-wise and of the largest element.
const TOLERANCE: f64 = 2e-5;

#[test]
fn f32_cases_match_oracle() {
    if !Gpu::driver_is_present() {
        return common::skipped("no GPU was found");
    }
    let gpu = Gpu::new(0).unwrap();
    gpu.poison(true);
    let cuda = Device::new(Cuda::new(gpu, Precision::F32).unwrap());
    let mut failures = Vec::new();
    for case in cases::all() {
        let got = match cases::run(&case, &cuda) {
            Ok(got) => got,
            Err(error) => {
                failures.push(format!("{}: {error}", case.name));
                continue;
            }
        };
        let want = cases::run(&case, &Device::naive()).unwrap();
        for measure in [cases::relative_error, cases::largest_error] {
            for (output, error) in cases::compare_by(measure, &got, &want) {
                if error.is_nan() || error > TOLERANCE {
                    failures.push(format!("{}: {output} is off by {error:.1e}", case.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn missing_driver_is_reported() {
    if Gpu::driver_is_present() {
        return;
    }
    let error = fox_cuda::device(0, Precision::Bf16).err().map(|e| e.to_string());
    let expected = "libcuda was not found; install the NVIDIA driver, or run on the CPU";
    assert_eq!(error.as_deref(), Some(expected));
}
