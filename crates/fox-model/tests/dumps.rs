//! Every FoX and Transformer dump of the references, on the f64 oracle, at the float32 tolerances.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[path = "bodies/dumps.rs"]
mod bodies;

use bodies::dump;
use fox_model::{Error, Model, Tolerances, verify_dump};
use fox_tensor::Device;

prove_dumps!(Device::naive());

#[test]
fn a_tolerance_below_the_error_fails() {
    let strict = Tolerances { logits: 1e-12, loss: 1e-12, grad: 1e-12 };
    let report = verify_dump(&dump("fox_llama"), &Device::naive(), &strict).unwrap();
    assert!(!report.passed());
}

#[test]
fn recurrent_families_are_refused_by_name() {
    for name in ["delta_net", "hgrn2", "mamba2"] {
        let error = Model::from_checkpoint(&dump(name), &Device::naive()).unwrap_err();
        assert!(matches!(error, Error::UnsupportedModel { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.to_string().contains("not supported yet"), "{error}");
    }
}
