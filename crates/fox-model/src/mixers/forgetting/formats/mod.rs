//! Files of attention models: FoX and the Transformer of both references, and the native format, which has
//! every option.

mod fla;
mod native;
mod official;

use fox_tensor::AttentionWeights;
use serde_json::{Map, Value, json};

use super::{ForgetGate, ForgettingConfig};
use crate::mixers::FileFormat;
pub(crate) use native::NATIVE;

pub(super) static FORMATS: [&dyn FileFormat; 5] =
    [&official::TRANSFORMER, &official::FOX, &NATIVE, &fla::TRANSFORMER, &fla::FOX];

/// The heads, which all formats write.
fn write_heads(mixer: &ForgettingConfig, map: &mut Map<String, Value>) {
    let kv_heads = (mixer.kv_heads != mixer.heads).then_some(mixer.kv_heads);
    map.insert("num_heads".into(), json!(mixer.heads));
    map.insert("num_kv_heads".into(), json!(kv_heads));
    map.insert("window_size".into(), json!(mixer.window));
}

/// What only the native format can say about weights.
fn stick(mixer: &ForgettingConfig) -> (bool, &'static str) {
    let stick = mixer.weights == AttentionWeights::StickBreaking;
    (stick, "attention_weights \"stick_breaking\"")
}

/// What only FoX of the official repository and the native format can say.
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
    }
}
