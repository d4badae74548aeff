//! Every FoX and Transformer dump of the references, on the f64 oracle, at the float32 tolerances.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::PathBuf;

use fox_model::{Error, Model, Tolerances, verify_dump};
use fox_tensor::Device;

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn proves(name: &str) {
    let report = verify_dump(&dump(name), &Device::naive(), &Tolerances::default()).unwrap();
    let failed: Vec<_> = report.checks.iter().filter(|check| !check.passed()).collect();
    assert!(failed.is_empty(), "{name}: {failed:#?}");
    assert!(report.checks.len() > 20, "{name}: only {} checks", report.checks.len());
}

macro_rules! dumps {
    ($($name:ident)*) => { $(#[test] fn $name() { proves(stringify!($name)); })* };
}

dumps! {
    fla_fox
    fox_llama
    fox_llama_qknorm
    fox_llama_qknorm_ogate
    fox_llama_rope
    fox_llama_silu_ogate
    fox_pro
    fox_pro_bias_only
    fox_pro_fixed_alibi
    fox_pro_left_padded
    fox_pro_no_fgate
    fox_pro_no_kvshift
    fox_pro_no_ogate
    fox_pro_no_onorm
    fox_pro_no_qknorm
    fox_pro_rope
    fox_pro_shared_qknorm
    transformer_llama_as_fox
    transformer_pro
}

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
