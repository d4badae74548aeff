//! The reference dumps, to be proven on every device.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::PathBuf;

use fox_model::{Tolerances, verify_dump};
use fox_tensor::Device;

pub fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

pub fn proves(name: &str, device: &Device) {
    let report = verify_dump(&dump(name), device, &Tolerances::default()).unwrap();
    let failed: Vec<_> = report.checks.iter().filter(|check| !check.passed()).collect();
    assert!(failed.is_empty(), "{name}: {failed:#?}");
    assert!(report.checks.len() > 20, "{name}: only {} checks", report.checks.len());
}

/// One test per dump, on the device that the expression makes.
#[macro_export]
macro_rules! prove_dumps {
    ($device:expr) => { $crate::prove_dumps! { $device;
    delta_net
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
    gated_deltanet
    gated_deltanet_gva_neg
    gated_deltanet_no_gate
    hf_llama
    hf_llama_bf16
    hf_llama_gqa_tied
    hf_llama_head_dim
    hf_llama_rope_llama3
    hf_llama_sharded
    hf_mistral_window
    hf_qwen2
    hf_qwen3
    hgrn2
    kda
    kda_bounded
    kda_gva_neg
    mamba2
    path_attn
    path_fox_gqa
    path_fox_no_conv
    path_fox_qknorm
    samba
    stick_breaking_gates
    transformer_llama_as_fox
    transformer_pro
    wall
    wall_scalar_gqa
    wall_window
    } };
    ($device:expr; $($name:ident)*) => {
        $(#[test] fn $name() { bodies::proves(stringify!($name), &$device); })*
    };
}
