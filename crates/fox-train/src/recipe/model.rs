//! The model of a recipe: its configuration, and its weights before the first step.

use std::path::Path;

use fox_model::{Model, ModelConfig, ModelType, Residency};
use fox_tensor::Device;

use super::{Recipe, nearest};
use crate::{Error, Result};

/// Sequences from this length on have the larger base of RoPE, as in the published recipes.
const LONG: usize = 4096;
/// The `model_type` of encoders.
const ENCODER: &str = "fox_encoder";

impl Recipe {
    /// The model, for data with this many token ids.
    pub fn model_config(&self, data_vocab: usize) -> Result<ModelConfig> {
        self.require_size(&["hidden_size"])?;
        self.require_size(&["num_hidden_layers"])?;
        // A mixer from another crate may have no heads.
        let model_type = self.model.get("model_type").and_then(toml::Value::as_str);
        if model_type.and_then(ModelType::by_name).is_none_or(ModelType::is_built_in) {
            // Some families derive the number of heads from their width, or call it otherwise.
            let names = ["num_heads", "head_dim", "expand_ratio", "attn", "num_attention_heads"];
            self.require_size(&names)?;
        }
        let fields = self.model.iter().map(|(key, value)| (key.clone(), json(value)));
        let mut fields: serde_json::Map<_, _> = fields.collect();
        let mut default = |key: &str, value: serde_json::Value| {
            fields.entry(key).or_insert(value);
        };
        default("model_type", "forgetting_transformer-project_fox".into());
        if model_type == Some(ENCODER) && !self.model.contains_key("mask_token_id") {
            // One more than the data have, so that no text contains it.
            default("mask_token_id", data_vocab.into());
            default("vocab_size", (data_vocab + 1).into());
        }
        default("vocab_size", data_vocab.into());
        default("max_position_embeddings", self.data.sequence_length.into());
        // TOML has no null; the published recipes leave these unset.
        for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            default(token, serde_json::Value::Null);
        }
        let text = serde_json::Value::Object(fields.clone()).to_string();
        let origin = format!("{}, [model]", self.name);
        let (mut config, model_type) = ModelConfig::from_json(&text, Path::new(&origin))?;
        if self.training.init.is_some() {
            // It is meant for the length it is tuned to.
            let length = self.data.sequence_length;
            config.max_position_embeddings = config.max_position_embeddings.max(length);
        }
        let known = config.to_json(model_type)?;
        if let Some(unknown) = fields.keys().find(|key| known.get(key.as_str()).is_none()) {
            let keys = known.as_object().into_iter().flat_map(|map| map.keys());
            return Err(Error::UnknownKey {
                origin: self.name.clone(),
                key: format!("model.{unknown}"),
                nearest: nearest(unknown, keys.map(String::as_str)).map(|k| format!("model.{k}")),
            });
        }
        if config.vocab_size < data_vocab {
            return Err(Error::value(
                &self.name,
                "model.vocab_size",
                format!("is {}, but the data have {data_vocab} token ids", config.vocab_size),
            ));
        }
        Ok(config)
    }

    /// A config.json without sizes means those of the reference, which are not to be trained by mistake: one
    /// of these fields must be given.
    fn require_size(&self, names: &[&str]) -> Result<()> {
        if names.iter().any(|name| self.model.contains_key(*name)) {
            return Ok(());
        }
        let detail = "is missing; give the model's sizes (hidden_size, num_hidden_layers, num_heads), extend a recipe that has them, or start from a checkpoint (training.init)";
        Err(Error::value(&self.name, &format!("model.{}", names[0]), detail))
    }

    /// The same recipe with the matching Transformer: RoPE in place of the forget gates.
    ///
    /// # Errors
    /// A model without data-dependent forget gates, or one that begins with a checkpoint.
    pub fn transformer_baseline(&self) -> Result<Recipe> {
        let gates = self.model.get("fgate_type").and_then(toml::Value::as_str).unwrap_or("none");
        if gates != "full" || self.training.init.is_some() {
            let detail = "has no Transformer to compare with; name a recipe of FoX that starts from random weights";
            return Err(Error::value(&self.name, "model", detail));
        }
        let mut recipe = self.clone();
        recipe.name = format!("{} as a Transformer", self.name);
        recipe.training.gate_init = super::GateInit::Published;
        recipe.model.retain(|key, _| !key.starts_with("fgate_") && !key.starts_with("decay_time_"));
        recipe.model.insert("fgate_type".into(), "none".into());
        recipe.model.insert("use_rope".into(), true.into());
        if self.data.sequence_length >= LONG && !recipe.model.contains_key("rope_base") {
            recipe.model.insert("rope_base".into(), 500_000.0.into());
        }
        Ok(recipe)
    }

    /// The model before the first step.
    pub fn initial_model(&self, config: &ModelConfig, device: &Device) -> Result<Model> {
        self.initial_model_where(config, device, &|_| true)
    }

    /// [`Recipe::initial_model`] of one of several processes, which keeps only some parameters.
    pub(crate) fn initial_model_where(
        &self,
        config: &ModelConfig,
        device: &Device,
        keeps: &Residency<'_>,
    ) -> Result<Model> {
        let mut model = match self.init_folder()? {
            Some(folder) => self.tuned_model(&folder, config, device, keeps)?,
            None => Model::init_where(config, self.training.seed, device, keeps)?,
        };
        self.training.freeze(model.params_mut());
        if let Some(times) = self.training.gate_init.decay_time(self.data.sequence_length)
            && !model.init_decay_times(times)?
        {
            return Err(self.without_gates());
        }
        Ok(model)
    }
}

/// A value of the table `model` as config.json has it. JSON has no numbers that are not finite; like in the
/// files of the references they are words, so that nothing takes them for a field that is not set.
fn json(value: &toml::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        toml::Value::String(text) => Value::from(text.as_str()),
        toml::Value::Integer(x) => Value::from(*x),
        toml::Value::Float(x) if x.is_nan() => Value::from("NaN"),
        toml::Value::Float(x) if x.is_infinite() && *x > 0.0 => Value::from("Infinity"),
        toml::Value::Float(x) if x.is_infinite() => Value::from("-Infinity"),
        toml::Value::Float(x) => Value::from(*x),
        toml::Value::Boolean(x) => Value::from(*x),
        toml::Value::Datetime(time) => Value::from(time.to_string()),
        toml::Value::Array(values) => Value::Array(values.iter().map(json).collect()),
        toml::Value::Table(table) => {
            Value::Object(table.iter().map(|(key, value)| (key.clone(), json(value))).collect())
        }
    }
}
