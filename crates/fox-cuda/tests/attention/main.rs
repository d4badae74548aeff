//! Attention kernels against an f64 reference: Hopper and portable kernels, features and odd shapes. Skipped without a
//! GPU. `FOX_CASES=packed` runs the cases whose name contains `packed`, e.g. under compute-sanitizer. For timings see
//! `fox bench attention`.

#![allow(clippy::unwrap_used)] // test code

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod reference;

use fox_cuda::Gpu;

#[test]
fn all_cases_match_reference() {
    let filter = std::env::var("FOX_CASES").unwrap_or_default();
    match Gpu::new(0) {
        Ok(gpu) => assert!(cases::check_all(&gpu, &filter).unwrap()),
        Err(e) => common::skipped(&e.to_string()),
    }
}
