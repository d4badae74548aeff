//! [`ModelConfig`] to config.json, with every field that the reference code reads.

use fox_tensor::Activation;
use serde_json::{Map, Value, json};

use super::ModelConfig;
use crate::mixers::{CheckpointLayout, ModelType};
use crate::{Error, Result};

impl ModelConfig {
    /// The format of a layout that suits this model best, or one of another layout where that is all there
    /// is. It may still lack an option, which [`ModelConfig::to_json`] then names.
    pub fn default_model_type(&self, layout: CheckpointLayout) -> ModelType {
        self.best(|model_type| model_type.layout() == layout).unwrap_or_else(|| self.storage_type())
    }

    /// The format for storing this model: the first that is meant for it and can express it. Official formats are
    /// listed first, so that the reference code can load it.
    pub fn storage_type(&self) -> ModelType {
        // For an unregistered family, writing reports that no format can express the mixer.
        self.best(|_| true).unwrap_or(ModelType::NATIVE_FOX)
    }

    /// Of the formats that suit this model, the first that lacks nothing, or else the last.
    fn best(&self, among: impl Fn(ModelType) -> bool) -> Option<ModelType> {
        let mut suiting = ModelType::all();
        suiting.retain(|model_type| among(*model_type) && model_type.format().suits(self));
        let whole = suiting.iter().find(|model_type| self.lacks(**model_type).is_empty());
        whole.or(suiting.last()).copied()
    }

    /// The options of this model that a format cannot express, by the names a user knows.
    fn lacks(&self, model_type: ModelType) -> Vec<&'static str> {
        let format = model_type.format();
        let mut options = format.lacks(self);
        if self.mlp.activation == Activation::Sigmoid && !format.common().sigmoid_mlp {
            options.push("hidden_act \"sigmoid\"");
        }
        options
    }

    /// The config.json of a format; an error that names every option it cannot express.
    pub fn to_json(&self, model_type: ModelType) -> Result<Value> {
        let options = self.lacks(model_type);
        if !options.is_empty() {
            let options = options.into_iter().map(String::from).collect();
            return Err(Error::NotExpressible { target: model_type.as_str(), options });
        }
        let mut map = self.common_fields(model_type);
        model_type.format().write(self, &mut map);
        Ok(Value::Object(map))
    }

    fn common_fields(&self, model_type: ModelType) -> Map<String, Value> {
        let activation = match self.mlp.activation {
            Activation::Silu => "swish",
            Activation::Sigmoid => "sigmoid",
        };
        let eos = match self.tokens.eos.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            several => json!(several),
        };
        let mut map = object(json!({
            "architectures": [model_type.format().architecture()],
            "model_type": model_type.as_str(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "hidden_ratio": whole_or_real(self.mlp.hidden_ratio),
            "intermediate_size": self.mlp.intermediate_size,
            "hidden_act": activation,
            "norm_eps": self.norm_eps,
            "elementwise_affine": true,
            "initializer_range": self.initializer_range,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.tokens.bos,
            "eos_token_id": eos,
            "pad_token_id": self.tokens.pad,
            "use_cache": true,
            "fuse_norm": true,
            "fuse_cross_entropy": true,
        }));
        // Encoders have one; the references know no such field.
        if let Some(mask) = self.tokens.mask {
            map.insert("mask_token_id".into(), json!(mask));
        }
        map
    }
}

/// The references write a whole ratio as an integer.
pub(crate) fn whole_or_real(value: f64) -> Value {
    if value.fract() == 0.0 { json!(value as u64) } else { json!(value) }
}

/// The fields of a JSON object.
pub(crate) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
