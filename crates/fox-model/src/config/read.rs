//! config.json to [`ModelConfig`]: the fields that all formats have.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use fox_tensor::Activation;
use serde_json::Value;

use super::fields::Fields;
use super::relaxed_json::quote_literals;
use super::{MlpConfig, ModelConfig, SpecialTokens};
use crate::checkpoint::missing;
use crate::mixers::{CheckpointLayout, CommonFields, MixerConfig, MlpWidthFields, ModelType};
use crate::{Error, Result};

/// Far above every real config.json; a hostile one must not fill the memory.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

impl ModelConfig {
    /// Reads `config.json` of a Hugging Face folder.
    pub fn from_file(file: &Path) -> Result<(ModelConfig, ModelType)> {
        let mut text = String::new();
        let opened = File::open(file).map_err(|source| match source.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Error::NoCheckpoint(missing(file)),
            _ => Error::io("open", file)(source),
        })?;
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
        if model_type.layout() != CheckpointLayout::NATIVE {
            no_other_weights(&fields)?;
        }
        let format = model_type.format();
        let config = read_common(&fields, format.common(), format.read(&fields)?)?;
        config.validate(&origin)?;
        Ok((config, model_type))
    }
}

fn read_model_type(fields: &Fields<'_>) -> Result<ModelType> {
    let unsupported = |detail: &str, known: &str| {
        let names: Vec<&str> = ModelType::all().into_iter().map(ModelType::as_str).collect();
        let detail = format!("{detail}; {known} {}", names.join(", "));
        Error::UnsupportedModel { origin: fields.origin.to_string(), detail }
    };
    let Some(Value::String(found)) = fields.map.get("model_type") else {
        return Err(unsupported("the field `model_type` is missing", "it must be one of"));
    };
    ModelType::by_name(found).ok_or_else(|| {
        let shown: String = found.chars().take(60).collect();
        unsupported(&format!("unknown model_type `{shown}`"), "supported are")
    })
}

fn read_common(
    fields: &Fields<'_>,
    common: &CommonFields,
    mixer: Box<dyn MixerConfig>,
) -> Result<ModelConfig> {
    const ACTIVATIONS: [(&str, Activation); 3] =
        [("swish", Activation::Silu), ("silu", Activation::Silu), ("sigmoid", Activation::Sigmoid)];
    let activations = if common.sigmoid_mlp { &ACTIVATIONS[..] } else { &ACTIVATIONS[..2] };
    let activation = fields.choice("hidden_act", Activation::Silu, activations)?;
    let width = fields.optional_size("intermediate_size", None)?;
    if common.mlp_width == MlpWidthFields::Width && width.is_none() {
        return Err(fields.error("intermediate_size", "must be there: the width of the MLP"));
    }
    let ratio = match common.mlp_width {
        MlpWidthFields::WidthOrRatio => fields.optional_real("hidden_ratio")?,
        // These formats ignore the field.
        MlpWidthFields::Width | MlpWidthFields::PerLayer => None,
    };
    let mlp = match mixer.has_mlp() {
        true => {
            MlpConfig { hidden_ratio: ratio.unwrap_or(4.0), intermediate_size: width, activation }
        }
        // Without an MLP its sizes are ignored.
        false => MlpConfig { hidden_ratio: 4.0, intermediate_size: None, activation },
    };
    Ok(ModelConfig {
        vocab_size: fields.size("vocab_size", 32000)?,
        hidden_size: fields.size("hidden_size", common.hidden_size)?,
        num_layers: fields.size("num_hidden_layers", common.layers)?,
        mlp,
        mixer,
        norm_eps: fields.real(common.norm_eps_field, common.norm_eps)?,
        initializer_range: fields.real("initializer_range", common.initializer_range)?,
        tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
        tokens: SpecialTokens {
            bos: fields.optional_size("bos_token_id", Some(1))?,
            eos: fields.sizes("eos_token_id", 2)?,
            pad: fields.optional_size("pad_token_id", None)?,
            mask: fields.optional_size("mask_token_id", None)?,
        },
        max_position_embeddings: fields
            .optional_size("max_position_embeddings", Some(2048))?
            .unwrap_or(2048),
    })
}

/// Only the native format knows other weights than the softmax.
fn no_other_weights(fields: &Fields<'_>) -> Result<()> {
    match fields.map.get("attention_weights").map(Value::as_str) {
        None | Some(Some("softmax")) => Ok(()),
        Some(_) => Err(fields.error("attention_weights", "needs `model_type` \"fox\"")),
    }
}
