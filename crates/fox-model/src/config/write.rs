//! [`ModelConfig`] to config.json, with every field that the reference code reads.

use fox_tensor::Activation;
use serde_json::{Map, Value, json};

use super::{
    DecayTime, ForgetGate, ForgettingConfig, Layout, MixerConfig, ModelConfig, ModelType, QkNorm,
};
use crate::{Error, Result};

impl ModelConfig {
    /// The format of a layout that suits this model best. It may still lack an option;
    /// [`ModelConfig::to_json`] then says which.
    pub fn natural_type(&self, layout: Layout) -> ModelType {
        let MixerConfig::Forgetting(mixer) = &self.mixer;
        match layout {
            Layout::Fla if mixer.gate == ForgetGate::None => ModelType::FlaTransformer,
            Layout::Fla => ModelType::FlaFox,
            Layout::Official if self.obstacles(ModelType::OfficialTransformer).is_empty() => {
                ModelType::OfficialTransformer
            }
            Layout::Official => ModelType::OfficialFox,
        }
    }

    /// The format to keep this model in: an official one where that can express it, so that the
    /// reference code can load it, else [`ModelType::Native`].
    pub fn storage_type(&self) -> ModelType {
        let official = self.natural_type(Layout::Official);
        if self.obstacles(official).is_empty() { official } else { ModelType::Native }
    }

    /// The config.json of a format; an error that names every option it cannot express.
    pub fn to_json(&self, model_type: ModelType) -> Result<Value> {
        let options = self.obstacles(model_type);
        if !options.is_empty() {
            return Err(Error::NotExpressible { target: model_type.as_str(), options });
        }
        let MixerConfig::Forgetting(mixer) = &self.mixer;
        let mut map = self.common_fields(model_type, mixer);
        match model_type {
            ModelType::OfficialFox => map.extend(fox_fields(mixer)),
            ModelType::Native => {
                map.extend(fox_fields(mixer));
                map.insert("qkv_bias".into(), json!(mixer.qkv_bias));
            }
            ModelType::OfficialTransformer => {
                map.insert("attention_bias".into(), json!(false));
                map.insert("use_rope".into(), json!(mixer.rope_base.is_some()));
                map.insert("rope_base".into(), json!(mixer.rope_base.unwrap_or(500_000.0)));
                map.insert("qk_norm".into(), json!(false));
            }
            ModelType::FlaFox => {
                map.extend(fla_fields(mixer));
                map.insert("use_output_gate".into(), json!(mixer.output_gate.is_some()));
            }
            ModelType::FlaTransformer => {
                map.extend(fla_fields(mixer));
                map.insert("rope_theta".into(), json!(mixer.rope_base));
            }
        }
        Ok(Value::Object(map))
    }

    fn common_fields(&self, model_type: ModelType, mixer: &ForgettingConfig) -> Map<String, Value> {
        let architecture = match model_type {
            ModelType::OfficialFox | ModelType::FlaFox => "ForgettingTransformerForCausalLM",
            ModelType::OfficialTransformer | ModelType::FlaTransformer => "TransformerForCausalLM",
            ModelType::Native => "FoxForCausalLM",
        };
        let kv_heads = (mixer.kv_heads != mixer.heads).then_some(mixer.kv_heads);
        let activation = match self.mlp.activation {
            Activation::Silu => "swish",
            Activation::Sigmoid => "sigmoid",
        };
        object(json!({
            "architectures": [architecture],
            "model_type": model_type.as_str(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_heads": mixer.heads,
            "num_kv_heads": kv_heads,
            "window_size": mixer.window,
            "hidden_ratio": ratio(self.mlp.hidden_ratio),
            "intermediate_size": self.mlp.intermediate_size,
            "hidden_act": activation,
            "norm_eps": self.norm_eps,
            "elementwise_affine": true,
            "initializer_range": self.initializer_range,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.tokens.bos,
            "eos_token_id": self.tokens.eos,
            "pad_token_id": self.tokens.pad,
            "use_cache": true,
            "fuse_norm": true,
            "fuse_cross_entropy": true,
        }))
    }

    /// The options of this model that a format lacks, by the names a user knows.
    fn obstacles(&self, model_type: ModelType) -> Vec<String> {
        let MixerConfig::Forgetting(m) = &self.mixer;
        let gate = gate_name(m.gate);
        let grouped = m.kv_heads != m.heads;
        let sigmoid_mlp = self.mlp.activation == Activation::Sigmoid;
        let silu_gate = m.output_gate == Some(Activation::Silu);
        let prunes = m.log_pruning_tolerance.is_some() && m.gate != ForgetGate::None;
        let shared_norm = m.qk_norm == Some(QkNorm::Shared);
        let fox_only = [
            (m.k_shift, "use_k_shift"),
            (m.v_shift, "use_v_shift"),
            (m.output_norm, "use_output_norm"),
            (sigmoid_mlp, "hidden_act \"sigmoid\""),
            (prunes, "log_pruning_tolerance"),
        ];
        let mut found: Vec<(bool, &str)> = Vec::new();
        match model_type {
            ModelType::Native => {}
            ModelType::OfficialFox => found.extend([
                (grouped, "num_kv_heads below num_heads"),
                (m.window.is_some(), "window_size"),
                (m.qkv_bias, "qkv_bias"),
            ]),
            ModelType::OfficialTransformer => {
                found.extend(fox_only);
                found.extend([
                    (m.gate != ForgetGate::None, gate),
                    (m.qk_norm.is_some(), "qk_norm"),
                    (m.output_gate.is_some(), "use_output_gate"),
                    (m.qkv_bias, "qkv_bias"),
                ]);
            }
            ModelType::FlaFox => {
                found.extend(fox_only);
                found.extend([
                    (m.gate != ForgetGate::Full, gate),
                    (m.rope_base.is_some(), "use_rope"),
                    (shared_norm, "qk_norm_share_param_across_head"),
                    (silu_gate, "ogate_act \"silu\""),
                    (m.window.is_some(), "window_size"),
                ]);
            }
            ModelType::FlaTransformer => {
                found.extend(fox_only);
                found.extend([
                    (m.gate != ForgetGate::None, gate),
                    (m.rope_base.is_none(), "use_rope false"),
                    (m.qk_norm == Some(QkNorm::PerHead), "qk_norm with weights per head"),
                    (m.output_gate.is_some(), "use_output_gate"),
                ]);
            }
        }
        found.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.to_string()).collect()
    }
}

fn gate_name(gate: ForgetGate) -> &'static str {
    match gate {
        ForgetGate::None => "fgate_type \"none\"",
        ForgetGate::Full => "fgate_type \"full\"",
        ForgetGate::BiasOnly { .. } => "fgate_type \"bias_only\"",
        ForgetGate::Fixed { .. } => "fgate_type \"fixed\"",
    }
}

fn fox_fields(mixer: &ForgettingConfig) -> Map<String, Value> {
    let (gate, decay_time) = match mixer.gate {
        ForgetGate::None => ("none", None),
        ForgetGate::Full => ("full", None),
        ForgetGate::BiasOnly { decay_time } => ("bias_only", decay_time),
        ForgetGate::Fixed { decay_time } => ("fixed", decay_time),
    };
    let ogate_act = match mixer.output_gate {
        Some(Activation::Silu) => "silu",
        Some(Activation::Sigmoid) | None => "sigmoid",
    };
    object(json!({
        "attention_bias": false,
        "use_rope": mixer.rope_base.is_some(),
        "rope_base": mixer.rope_base.unwrap_or(500_000.0),
        "fgate_type": gate,
        "fgate_bias_init": decay_time.is_some(),
        "decay_time_min": decay_time.map(|time: DecayTime| time.min),
        "decay_time_max": decay_time.map(|time: DecayTime| time.max),
        "use_output_gate": mixer.output_gate.is_some(),
        "ogate_act": ogate_act,
        "use_output_norm": mixer.output_norm,
        "qk_norm": mixer.qk_norm.is_some(),
        "qk_norm_share_param_across_head": mixer.qk_norm == Some(QkNorm::Shared),
        "use_k_shift": mixer.k_shift,
        "use_v_shift": mixer.v_shift,
        "log_pruning_tolerance": mixer.log_pruning_tolerance,
    }))
}

fn fla_fields(mixer: &ForgettingConfig) -> Map<String, Value> {
    object(json!({
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm.is_some(),
        "fuse_swiglu": true,
        "fuse_linear_cross_entropy": false,
        "use_l2warp": false,
        "attnres_block_size": null,
    }))
}

/// The references write a whole ratio as an integer.
fn ratio(value: f64) -> Value {
    if value.fract() == 0.0 { json!(value as u64) } else { json!(value) }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
