//! [`ModelConfig`] to config.json, with every field that the reference code reads.

use fox_tensor::{Activation, AttentionWeights};
use serde_json::{Map, Value, json};

use super::{
    DecayTime, ForgetGate, ForgettingConfig, Layout, MixerConfig, ModelConfig, ModelType, QkNorm,
};
use crate::{Error, Result};

impl ModelConfig {
    /// The format of a layout that suits this model best. It may still lack an option;
    /// [`ModelConfig::to_json`] then says which.
    pub fn natural_type(&self, layout: Layout) -> ModelType {
        let fla = layout == Layout::Fla;
        let mixer = match &self.mixer {
            MixerConfig::Forgetting(mixer) => mixer,
            // There is no other.
            MixerConfig::Delta(mixer) if mixer.decay => return ModelType::FlaGatedDeltaNet,
            MixerConfig::Delta(_) if fla => return ModelType::FlaDeltaNet,
            MixerConfig::Delta(_) => return ModelType::OfficialDeltaNet,
            MixerConfig::Hgrn2(_) if fla => return ModelType::FlaHgrn2,
            MixerConfig::Hgrn2(_) => return ModelType::OfficialHgrn2,
            MixerConfig::Mamba2(_) if fla => return ModelType::FlaMamba2,
            MixerConfig::Mamba2(_) => return ModelType::OfficialMamba2,
        };
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
        let fits = |model_type: &ModelType| self.obstacles(*model_type).is_empty();
        let natural = [Layout::Official, Layout::Fla].map(|layout| self.natural_type(layout));
        let official = Some(natural[0]).filter(fits);
        // Only attention has a native format.
        let other = if self.mixer.forgetting().is_some() { ModelType::Native } else { natural[1] };
        official.unwrap_or(other)
    }

    /// The config.json of a format; an error that names every option it cannot express.
    pub fn to_json(&self, model_type: ModelType) -> Result<Value> {
        let options = self.obstacles(model_type);
        if !options.is_empty() {
            return Err(Error::NotExpressible { target: model_type.as_str(), options });
        }
        let mut map = self.common_fields(model_type);
        let Some(mixer) = self.mixer.forgetting() else {
            if !self.has_mlp() {
                let foreign = ["hidden_ratio", "intermediate_size", "norm_eps"];
                foreign.iter().for_each(|field| drop(map.remove(*field)));
            }
            map.extend(self.recurrent_fields(model_type));
            return Ok(Value::Object(map));
        };
        let kv_heads = (mixer.kv_heads != mixer.heads).then_some(mixer.kv_heads);
        map.insert("num_heads".into(), json!(mixer.heads));
        map.insert("num_kv_heads".into(), json!(kv_heads));
        map.insert("window_size".into(), json!(mixer.window));
        match model_type {
            ModelType::OfficialFox => map.extend(fox_fields(mixer)),
            ModelType::Native => {
                map.extend(fox_fields(mixer));
                map.insert("qkv_bias".into(), json!(mixer.qkv_bias));
                let weights = match mixer.weights {
                    AttentionWeights::Softmax => "softmax",
                    AttentionWeights::StickBreaking => "stick_breaking",
                };
                map.insert("attention_weights".into(), json!(weights));
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
            // Refused above: they cannot express attention.
            ModelType::OfficialDeltaNet
            | ModelType::OfficialHgrn2
            | ModelType::OfficialMamba2
            | ModelType::FlaDeltaNet
            | ModelType::FlaGatedDeltaNet
            | ModelType::FlaHgrn2
            | ModelType::FlaMamba2 => {}
        }
        Ok(Value::Object(map))
    }

    fn common_fields(&self, model_type: ModelType) -> Map<String, Value> {
        let architecture = match model_type {
            ModelType::OfficialFox | ModelType::FlaFox => "ForgettingTransformerForCausalLM",
            ModelType::OfficialTransformer | ModelType::FlaTransformer => "TransformerForCausalLM",
            ModelType::OfficialDeltaNet | ModelType::FlaDeltaNet => "DeltaNetForCausalLM",
            ModelType::FlaGatedDeltaNet => "GatedDeltaNetForCausalLM",
            ModelType::OfficialHgrn2 | ModelType::FlaHgrn2 => "HGRN2ForCausalLM",
            ModelType::OfficialMamba2 | ModelType::FlaMamba2 => "Mamba2ForCausalLM",
            ModelType::Native => "FoxForCausalLM",
        };
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
        let named = |found: Vec<(bool, &str)>| {
            let present = found.into_iter().filter(|(has, _)| *has);
            present.map(|(_, name)| name.to_string()).collect()
        };
        let sigmoid_mlp = self.mlp.activation == Activation::Sigmoid;
        let Some(m) = self.mixer.forgetting() else {
            let mut found = self.recurrent_obstacles(model_type);
            found.push((sigmoid_mlp, "hidden_act \"sigmoid\""));
            return named(found);
        };
        let gate = gate_name(m.gate);
        let grouped = m.kv_heads != m.heads;
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
        let stick = m.weights == AttentionWeights::StickBreaking;
        let mut found: Vec<(bool, &str)> = Vec::new();
        if model_type != ModelType::Native {
            found.push((stick, "attention_weights \"stick_breaking\""));
        }
        match model_type {
            ModelType::Native => {}
            ModelType::OfficialFox => found.extend([
                (grouped, "num_kv_heads below num_heads"),
                (m.window.is_some(), "window_size"),
                (m.qkv_bias, "qkv_bias"),
                (m.gate == ForgetGate::Shared, gate),
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
            recurrent => found.extend(self.recurrent_obstacles(recurrent)),
        }
        named(found)
    }
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

fn fox_fields(mixer: &ForgettingConfig) -> Map<String, Value> {
    let (gate, decay_time) = match mixer.gate {
        ForgetGate::None => ("none", None),
        ForgetGate::Full => ("full", None),
        ForgetGate::Shared => ("shared", None),
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

pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
