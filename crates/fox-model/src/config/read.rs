//! config.json to [`ModelConfig`]: one function per format, defaults as the references have them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use fox_tensor::{Activation, AttentionWeights};
use serde_json::Value;

use super::fields::Fields;
use super::read_recurrent::{delta_net, gated_delta_net, hgrn2, mamba2};
use super::relaxed_json::quote_literals;
use super::{
    DecayTime, ForgetGate, ForgettingConfig, MixerConfig, MlpConfig, ModelConfig, ModelType,
    QkNorm, SpecialTokens,
};
use crate::{Error, Result};

/// No honest config.json comes near this; a hostile one must not fill the memory.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

const SWISH: [(&str, Activation); 2] = [("swish", Activation::Silu), ("silu", Activation::Silu)];

impl ModelConfig {
    /// Reads `config.json` of a Hugging Face folder.
    pub fn from_file(file: &Path) -> Result<(ModelConfig, ModelType)> {
        let mut text = String::new();
        let opened = File::open(file).map_err(Error::io("open", file))?;
        let mut limited = opened.take(MAX_CONFIG_BYTES + 1);
        limited.read_to_string(&mut text).map_err(Error::io("read", file))?;
        if text.len() as u64 > MAX_CONFIG_BYTES {
            let detail = format!("it is larger than {MAX_CONFIG_BYTES} bytes");
            return Err(Error::Json { file: file.to_path_buf(), detail });
        }
        Self::from_json(&text, file)
    }

    /// Reads the text of a config.json; `file` is only for messages. The bare literals `Infinity`,
    /// `-Infinity` and `NaN` are accepted.
    pub fn from_json(text: &str, file: &Path) -> Result<(ModelConfig, ModelType)> {
        let value: Value = serde_json::from_str(&quote_literals(text))
            .map_err(|e| Error::Json { file: file.to_path_buf(), detail: e.to_string() })?;
        let Value::Object(map) = &value else {
            let detail = "a configuration is an object { ... }".to_string();
            return Err(Error::Json { file: file.to_path_buf(), detail });
        };
        let origin = file.display().to_string();
        let fields = Fields { origin: &origin, map };
        let model_type = read_model_type(&fields)?;
        if model_type != ModelType::Native {
            no_other_weights(&fields)?;
        }
        let mixer = match model_type {
            ModelType::OfficialFox => MixerConfig::Forgetting(official_fox(&fields)?),
            ModelType::OfficialTransformer => {
                MixerConfig::Forgetting(official_transformer(&fields)?)
            }
            ModelType::FlaFox => MixerConfig::Forgetting(fla_fox(&fields)?),
            ModelType::FlaTransformer => MixerConfig::Forgetting(fla_transformer(&fields)?),
            ModelType::OfficialDeltaNet | ModelType::FlaDeltaNet => {
                MixerConfig::Delta(delta_net(&fields)?)
            }
            ModelType::FlaGatedDeltaNet => MixerConfig::Delta(gated_delta_net(&fields)?),
            ModelType::OfficialHgrn2 | ModelType::FlaHgrn2 => {
                MixerConfig::Hgrn2(hgrn2(&fields, model_type)?)
            }
            ModelType::OfficialMamba2 | ModelType::FlaMamba2 => {
                MixerConfig::Mamba2(mamba2(&fields, model_type)?)
            }
            ModelType::Native => MixerConfig::Forgetting(native(&fields)?),
        };
        let config = read_common(&fields, model_type, mixer)?;
        config.validate(&origin)?;
        Ok((config, model_type))
    }
}

fn read_model_type(fields: &Fields<'_>) -> Result<ModelType> {
    let supported = ModelType::ALL.map(ModelType::as_str).join(", ");
    let unsupported =
        |detail: String| Error::UnsupportedModel { origin: fields.origin.to_string(), detail };
    let found = match fields.map.get("model_type") {
        Some(Value::String(text)) => text.as_str(),
        _ => {
            return Err(unsupported(format!(
                "the field `model_type` is missing; it must be one of {supported}"
            )));
        }
    };
    if let Some(model_type) = ModelType::ALL.into_iter().find(|t| t.as_str() == found) {
        return Ok(model_type);
    }
    let shown: String = found.chars().take(60).collect();
    Err(unsupported(format!("unknown model_type `{shown}`; supported are {supported}")))
}

fn read_common(
    fields: &Fields<'_>,
    model_type: ModelType,
    mixer: MixerConfig,
) -> Result<ModelConfig> {
    let activation = match model_type {
        ModelType::OfficialFox | ModelType::Native => fields.word(
            "hidden_act",
            Activation::Silu,
            &[SWISH[0], SWISH[1], ("sigmoid", Activation::Sigmoid)],
        )?,
        _ => fields.word("hidden_act", Activation::Silu, &SWISH)?,
    };
    let (layers, eps_field, eps, range) = match model_type {
        ModelType::OfficialMamba2 => (48, "layer_norm_epsilon", 1e-5, 0.1),
        ModelType::FlaMamba2 => (48, "norm_eps", 1e-5, 0.02),
        ModelType::FlaGatedDeltaNet => (21, "norm_eps", 1e-6, 0.02),
        _ => (24, "norm_eps", 1e-6, 0.02),
    };
    Ok(ModelConfig {
        vocab_size: fields.size("vocab_size", 32000)?,
        hidden_size: fields.size("hidden_size", 2048)?,
        num_layers: fields.size("num_hidden_layers", layers)?,
        mlp: MlpConfig {
            hidden_ratio: fields.optional_real("hidden_ratio")?.unwrap_or(4.0),
            intermediate_size: fields.optional_size("intermediate_size", None)?,
            activation,
        },
        mixer,
        norm_eps: fields.real(eps_field, eps)?,
        initializer_range: fields.real("initializer_range", range)?,
        tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
        tokens: SpecialTokens {
            bos: fields.optional_size("bos_token_id", Some(1))?,
            eos: fields.optional_size("eos_token_id", Some(2))?,
            pad: fields.optional_size("pad_token_id", None)?,
        },
        max_position_embeddings: fields
            .optional_size("max_position_embeddings", Some(2048))?
            .unwrap_or(2048),
    })
}

/// The fields of the official FoX layer. `num_kv_heads` and `window_size` are left to the caller.
fn fox_layer(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    #[derive(Clone, Copy)]
    enum Gate {
        Full,
        Shared,
        BiasOnly,
        Fixed,
        None,
    }
    let gate = fields.word(
        "fgate_type",
        Gate::Full,
        &[
            ("full", Gate::Full),
            ("shared", Gate::Shared),
            ("bias_only", Gate::BiasOnly),
            ("fixed", Gate::Fixed),
            ("none", Gate::None),
        ],
    )?;
    let decay_time = decay_time(fields)?;
    if decay_time.is_some() && matches!(gate, Gate::Full | Gate::Shared | Gate::None) {
        return Err(fields.error(
            "fgate_bias_init",
            "needs `fgate_type` \"bias_only\" or \"fixed\": other gates have no bias to set",
        ));
    }
    let heads = fields.size("num_heads", 32)?;
    let shared = fields.flag("qk_norm_share_param_across_head", false)?;
    let qk_norm = match (fields.flag("qk_norm", false)?, shared) {
        (false, _) => None,
        (true, false) => Some(QkNorm::PerHead),
        (true, true) => Some(QkNorm::Shared),
    };
    let ogate_act = fields.word(
        "ogate_act",
        Activation::Sigmoid,
        &[
            ("sigmoid", Activation::Sigmoid),
            ("silu", Activation::Silu),
            ("swish", Activation::Silu),
        ],
    )?;
    let rope_base = fields.real("rope_base", 500_000.0)?;
    Ok(ForgettingConfig {
        heads,
        kv_heads: heads,
        weights: AttentionWeights::Softmax,
        gate: match gate {
            Gate::Full => ForgetGate::Full,
            Gate::Shared => ForgetGate::Shared,
            Gate::BiasOnly => ForgetGate::BiasOnly { decay_time },
            Gate::Fixed => ForgetGate::Fixed { decay_time },
            Gate::None => ForgetGate::None,
        },
        qkv_bias: false,
        k_shift: fields.flag("use_k_shift", false)?,
        v_shift: fields.flag("use_v_shift", false)?,
        qk_norm,
        rope_base: fields.flag("use_rope", false)?.then_some(rope_base),
        window: None,
        output_norm: fields.flag("use_output_norm", false)?,
        output_gate: fields.flag("use_output_gate", false)?.then_some(ogate_act),
        log_pruning_tolerance: fields.optional_real("log_pruning_tolerance")?,
    })
}

/// Only the native format knows other weights than the softmax.
fn no_other_weights(fields: &Fields<'_>) -> Result<()> {
    match fields.map.get("attention_weights").map(Value::as_str) {
        None | Some(Some("softmax")) => Ok(()),
        Some(_) => Err(fields.error("attention_weights", "needs `model_type` \"fox\"")),
    }
}

fn decay_time(fields: &Fields<'_>) -> Result<Option<DecayTime>> {
    let bounds = (fields.optional_real("decay_time_min")?, fields.optional_real("decay_time_max")?);
    if !fields.flag("fgate_bias_init", false)? {
        return Ok(None);
    }
    match bounds {
        (Some(min), Some(max)) => Ok(Some(DecayTime { min, max })),
        _ => Err(fields.error("fgate_bias_init", "needs `decay_time_min` and `decay_time_max`")),
    }
}

/// `forgetting_transformer-project_fox`; the reference ignores `window_size`.
fn official_fox(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let layer = fox_layer(fields)?;
    if layer.gate == ForgetGate::Shared {
        return Err(fields.error("fgate_type", "\"shared\" needs `model_type` \"fox\""));
    }
    match fields.optional_size("num_kv_heads", None)? {
        Some(n) if n != layer.heads => Err(fields.error(
            "num_kv_heads",
            format!("must be null or equal to `num_heads` ({}) for this model_type", layer.heads),
        )),
        _ => Ok(layer),
    }
}

/// `fox`: the official fields, and grouped heads, window, biases and other weights besides.
fn native(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let layer = fox_layer(fields)?;
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

/// `transformer-project_fox`.
fn official_transformer(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    fields.require_false("qk_norm", "the layer of this model_type has no QK-norm")?;
    let heads = fields.size("num_heads", 32)?;
    let rope_base = fields.real("rope_base", 500_000.0)?;
    Ok(ForgettingConfig {
        gate: ForgetGate::None,
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        window: fields.optional_size("window_size", None)?,
        rope_base: fields.flag("use_rope", true)?.then_some(rope_base),
        ..ForgettingConfig::fox_llama(heads)
    })
}

/// `forgetting_transformer`. Its `window_size` only trims the reference's decoding cache, against
/// the full context of training, and has no effect here.
fn fla_fox(fields: &Fields<'_>) -> Result<ForgettingConfig> {
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

/// `transformer`; its QK-norm has one weight vector for all heads.
fn fla_transformer(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    fields.require_null("attnres_block_size", "the residual variant is not supported")?;
    let heads = fields.size("num_heads", 32)?;
    Ok(ForgettingConfig {
        gate: ForgetGate::None,
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        qkv_bias: fields.flag("qkv_bias", false)?,
        qk_norm: fields.flag("qk_norm", false)?.then_some(QkNorm::Shared),
        rope_base: Some(fields.real("rope_theta", 10_000.0)?),
        window: fields.optional_size("window_size", None)?,
        ..ForgettingConfig::fox_llama(heads)
    })
}
