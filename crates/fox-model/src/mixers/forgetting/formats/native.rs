//! The native format: the official fields and names, every one with effect, and more. For combinations that
//! no reference has, such as FoX with grouped heads; the references refuse it.

use fox_tensor::{AttentionWeights, Rope};
use serde_json::{Map, Value, json};

use super::{both_ways, huggingface, official, write_heads};
use crate::Result;
use crate::config::{Fields, ModelConfig};
use crate::mixers::forgetting::ForgettingConfig;
use crate::mixers::{CheckpointLayout, CommonFields, Format, enabled};

/// `fox`.
pub(crate) static NATIVE: Format<ForgettingConfig> = Format {
    common: CommonFields { sigmoid_mlp: true, ..CommonFields::DEFAULT },
    lacks: |mixer, _| enabled(&[both_ways(mixer)]),
    ..Format::new("fox", CheckpointLayout::NATIVE, "FoxForCausalLM", read, write)
};

/// The official fields, and grouped heads, window, biases, other weights and more of RoPE besides.
pub(crate) fn read(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let layer = official::read_layer(fields)?;
    let rope = match layer.rope {
        None => None,
        Some(rope) => Some(Rope {
            scaling: huggingface::read_scaling(fields)?,
            strength: fields.real("rope_strength", 1.0)?,
            ..rope
        }),
    };
    let (hidden, head_dim) =
        (fields.size("hidden_size", 2048)?, fields.optional_size("head_dim", None)?);
    let layer = ForgettingConfig {
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(layer.heads),
        weights: fields.choice(
            "attention_weights",
            AttentionWeights::Softmax,
            &[
                ("softmax", AttentionWeights::Softmax),
                ("stick_breaking", AttentionWeights::StickBreaking),
            ],
        )?,
        window: fields.optional_size("window_size", None)?,
        qkv_bias: fields.flag("qkv_bias", false)?,
        sink: fields.flag("use_sink", false)?,
        qk_norm_eps: fields.real("qk_norm_eps", layer.qk_norm_eps)?,
        rope,
        ..layer
    };
    Ok(layer.with_head_dim(hidden, head_dim))
}

pub(crate) fn write(mixer: &ForgettingConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_heads(mixer, map);
    official::write_layer(mixer, map);
    map.insert("qkv_bias".into(), json!(mixer.qkv_bias));
    map.insert("use_sink".into(), json!(mixer.sink));
    let weights = match mixer.weights {
        AttentionWeights::Softmax => "softmax",
        AttentionWeights::StickBreaking => "stick_breaking",
    };
    map.insert("attention_weights".into(), json!(weights));
    map.insert("head_dim".into(), json!(mixer.head_dim));
    map.insert("qk_norm_eps".into(), json!(mixer.qk_norm_eps));
    let scaling = mixer.rope.and_then(|rope| rope.scaling);
    map.insert("rope_scaling".into(), scaling.map_or(Value::Null, huggingface::write_scaling));
    map.insert("rope_strength".into(), json!(mixer.rope.map_or(1.0, |rope| rope.strength)));
}
