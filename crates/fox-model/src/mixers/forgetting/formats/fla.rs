//! Formats of flash-linear-attention.

use fox_tensor::{Activation, ParamId, Rope};
use serde_json::{Map, Value, json};

use super::{fox_only, gate_name, native_only, write_heads};
use crate::Result;
use crate::checkpoint::{FileTensor, split_mlp};
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::forgetting::{ForgetGate, ForgettingConfig, QkNorm};
use crate::mixers::{CheckpointLayout, Format, enabled};
use crate::params::ParamSpec;

/// FoX.
pub(super) static FOX: Format<ForgettingConfig> = Format {
    suits: |mixer, _| mixer.gate != ForgetGate::None,
    lacks: |mixer, _| {
        let mut found = native_only(mixer).to_vec();
        found.extend(fox_only(mixer));
        found.extend([
            (mixer.gate != ForgetGate::Full, gate_name(mixer.gate)),
            (mixer.rope.is_some(), "use_rope"),
            (mixer.qk_norm == Some(QkNorm::Shared), "qk_norm_share_param_across_head"),
            (mixer.output_gate == Some(Activation::Silu), "ogate_act \"silu\""),
            (mixer.window.is_some(), "window_size"),
        ]);
        enabled(&found)
    },
    tensors,
    ..Format::new(
        "forgetting_transformer",
        CheckpointLayout::FLA,
        "ForgettingTransformerForCausalLM",
        read_fox,
        write_fox,
    )
};

/// The Transformer.
pub(super) static TRANSFORMER: Format<ForgettingConfig> = Format {
    suits: |mixer, _| mixer.gate == ForgetGate::None,
    lacks: |mixer, _| {
        let mut found = native_only(mixer).to_vec();
        found.extend(fox_only(mixer));
        found.extend([
            (mixer.gate != ForgetGate::None, gate_name(mixer.gate)),
            (mixer.rope.is_none(), "use_rope false"),
            (mixer.qk_norm == Some(QkNorm::PerHead), "qk_norm with weights per head"),
            (mixer.output_gate.is_some(), "use_output_gate"),
        ]);
        enabled(&found)
    },
    tensors,
    ..Format::new(
        "transformer",
        CheckpointLayout::FLA,
        "TransformerForCausalLM",
        read_transformer,
        write_transformer,
    )
};

/// Gates have other names here.
fn tensors(id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
    let mut tensors = split_mlp(id, spec);
    for tensor in &mut tensors {
        tensor.name = tensor
            .name
            .replace(".attn.fgate_proj.", ".attn.f_proj.")
            .replace(".attn.ogate_proj.", ".attn.g_proj.");
    }
    tensors
}

/// `window_size` only trims the reference's decoding cache, against the full context of training, and has
/// no effect here.
fn read_fox(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    fields.require_null("attnres_block_size", "the residual variant is not supported")?;
    let heads = fields.size("num_heads", 32)?;
    Ok(ForgettingConfig {
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        qkv_bias: fields.flag("qkv_bias", false)?,
        qk_norm: fields.flag("qk_norm", false)?.then_some(QkNorm::PerHead),
        output_gate: fields.flag("use_output_gate", false)?.then_some(Activation::Sigmoid),
        ..ForgettingConfig::fox_llama(heads)
    })
}

/// The QK-norm has one weight vector for all heads.
fn read_transformer(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    fields.require_null("attnres_block_size", "the residual variant is not supported")?;
    let heads = fields.size("num_heads", 32)?;
    Ok(ForgettingConfig {
        gate: ForgetGate::None,
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        qkv_bias: fields.flag("qkv_bias", false)?,
        qk_norm: fields.flag("qk_norm", false)?.then_some(QkNorm::Shared),
        rope: Some(Rope::new(fields.real("rope_theta", 10_000.0)?)),
        window: fields.optional_size("window_size", None)?,
        ..ForgettingConfig::fox_llama(heads)
    })
}

fn write_fox(mixer: &ForgettingConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, map);
    map.insert("use_output_gate".into(), json!(mixer.output_gate.is_some()));
}

fn write_transformer(mixer: &ForgettingConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, map);
    map.insert("rope_theta".into(), json!(mixer.rope.map(|rope| rope.base)));
}

fn write_layer(mixer: &ForgettingConfig, map: &mut Map<String, Value>) {
    write_heads(mixer, map);
    map.extend(object(json!({
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm.is_some(),
        "fuse_swiglu": true,
        "fuse_linear_cross_entropy": false,
        "use_l2warp": false,
        "attnres_block_size": null,
    })));
}
