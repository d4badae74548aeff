//! Every dump of the references, on the f64 oracle, at the float32 tolerances.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[path = "bodies/dumps.rs"]
mod bodies;

use bodies::dump;
use fox_model::{Tolerances, verify_dump};
use fox_tensor::Device;

prove_dumps!(Device::naive());

#[test]
fn a_tolerance_below_the_error_fails() {
    let strict = Tolerances { logits: 1e-12, loss: 1e-12, grad: 1e-12 };
    let report = verify_dump(&dump("fox_llama"), &Device::naive(), &strict).unwrap();
    assert!(!report.passed());
}
