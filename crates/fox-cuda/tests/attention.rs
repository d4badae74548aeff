//! Attention on the GPU against the f64 reference, where there is a GPU; the cases are those of the
//! `attention` example.

#![allow(clippy::unwrap_used)] // the cases are test code, whatever folder they lie in

#[path = "../benches/attention/cases.rs"]
#[allow(dead_code)] // the driver uses more of it
mod cases;
mod common;
#[path = "../benches/attention/reference.rs"]
mod reference;

use fox_cuda::Gpu;

#[test]
fn every_case_is_right() {
    match Gpu::new(0) {
        Ok(gpu) => assert!(cases::check_all(&gpu, "").unwrap()),
        Err(e) => common::skipped(&e.to_string()),
    }
}
