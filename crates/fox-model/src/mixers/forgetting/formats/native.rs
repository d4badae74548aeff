//! The native format: the official fields and names, every one with effect, and more. For combinations that
//! no reference has, such as FoX with grouped heads; the references refuse it.

use fox_tensor::AttentionWeights;
use serde_json::{Map, Value, json};

use super::{official, write_heads};
use crate::Result;
use crate::config::{Fields, ModelConfig};
use crate::mixers::forgetting::ForgettingConfig;
use crate::mixers::{CheckpointLayout, CommonFields, Format};

/// `fox`.
pub(crate) static NATIVE: Format<ForgettingConfig> = Format {
    common: CommonFields { sigmoid_mlp: true, ..CommonFields::USUAL },
    ..Format::new("fox", CheckpointLayout::NATIVE, "FoxForCausalLM", read, write)
};

/// The official fields, and grouped heads, window, biases and other weights besides.
fn read(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let layer = official::read_layer(fields)?;
    Ok(ForgettingConfig {
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(layer.heads),
        weights: fields.word(
            "attention_weights",
            AttentionWeights::Softmax,
            &[
                ("softmax", AttentionWeights::Softmax),
                ("stick_breaking", AttentionWeights::StickBreaking),
            ],
        )?,
        window: fields.optional_size("window_size", None)?,
        qkv_bias: fields.flag("qkv_bias", false)?,
        ..layer
    })
}

fn write(mixer: &ForgettingConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_heads(mixer, map);
    official::write_layer(mixer, map);
    map.insert("qkv_bias".into(), json!(mixer.qkv_bias));
    let weights = match mixer.weights {
        AttentionWeights::Softmax => "softmax",
        AttentionWeights::StickBreaking => "stick_breaking",
    };
    map.insert("attention_weights".into(), json!(weights));
}
