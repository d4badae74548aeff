//! Files of attention models: FoX and the Transformer of both references, Transformers of Hugging Face's
//! library, and the native format, which has every option.

mod encoder;
mod fla;
mod huggingface;
pub(crate) mod native;
mod official;

use fox_tensor::{AttentionWeights, Mask};
use serde_json::{Map, Value, json};

use super::{ForgetGate, ForgettingConfig, QK_NORM_EPS};
use crate::mixers::FileFormat;
pub(crate) use native::NATIVE;

pub(super) static FORMATS: [&dyn FileFormat; 10] = [
    &official::TRANSFORMER,
    &official::FOX,
    &NATIVE,
    &encoder::ENCODER,
    &fla::TRANSFORMER,
    &fla::FOX,
    &huggingface::QWEN3,
    &huggingface::QWEN2,
    &huggingface::MISTRAL,
    &huggingface::LLAMA,
];

/// The heads, which all formats write.
fn write_heads(mixer: &ForgettingConfig, map: &mut Map<String, Value>) {
    let kv_heads = (mixer.kv_heads != mixer.heads).then_some(mixer.kv_heads);
    map.insert("num_heads".into(), json!(mixer.heads));
    map.insert("num_kv_heads".into(), json!(kv_heads));
    map.insert("window_size".into(), json!(mixer.window));
}

/// Options that no reference format can express.
fn native_only(mixer: &ForgettingConfig) -> [(bool, &'static str); 7] {
    let stick = mixer.weights == AttentionWeights::StickBreaking;
    let eps = mixer.qk_norm.is_some() && mixer.qk_norm_eps != QK_NORM_EPS;
    [
        both_ways(mixer),
        (stick, "attention_weights \"stick_breaking\""),
        (mixer.head_dim.is_some(), "head_dim"),
        (eps, "qk_norm_eps"),
        (mixer.rope.is_some_and(|rope| rope.scaling.is_some()), "rope_scaling"),
        (faded(mixer), "rope_strength"),
        (mixer.sink, "use_sink"),
    ]
}

/// Only the format of encoders can express it.
fn both_ways(mixer: &ForgettingConfig) -> (bool, &'static str) {
    (mixer.mask == Mask::Bidirectional, "bidirectional attention")
}

/// Whether the angles of RoPE are scaled.
fn faded(mixer: &ForgettingConfig) -> bool {
    mixer.rope.is_some_and(|rope| rope.strength != 1.0)
}

/// Options that only the official FoX format and the native one can express.
fn fox_only(mixer: &ForgettingConfig) -> [(bool, &'static str); 4] {
    let prunes = mixer.log_pruning_tolerance.is_some() && mixer.gate != ForgetGate::None;
    [
        (mixer.k_shift, "use_k_shift"),
        (mixer.v_shift, "use_v_shift"),
        (mixer.output_norm, "use_output_norm"),
        (prunes, "log_pruning_tolerance"),
    ]
}

fn gate_name(gate: ForgetGate) -> &'static str {
    match gate {
        ForgetGate::None => "fgate_type \"none\"",
        ForgetGate::Full => "fgate_type \"full\"",
        ForgetGate::Shared => "fgate_type \"shared\"",
        ForgetGate::BiasOnly { .. } => "fgate_type \"bias_only\"",
        ForgetGate::Fixed { .. } => "fgate_type \"fixed\"",
        ForgetGate::KeyScale => "fgate_type \"key_scale\"",
    }
}
