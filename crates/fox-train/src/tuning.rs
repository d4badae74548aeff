//! Fine-tuning: where a model begins, which of its parameters are trained, and at what rates.
//!
//! Parameters are named by a word for a part of the model, or by a pattern on their names in which `*` stands for
//! any text, e.g. `model.layers.3.*`.

use std::path::{Path, PathBuf};

use fox_data::Tokenizer;
use fox_model::{
    CheckpointReader, Model, ModelConfig, ParamGroup, ParamSpec, Parameters, Residency,
};
use fox_tensor::{Device, Rope, WeightFormat};
use toml::{Table, Value};

use crate::data::RunData;
use crate::recipe::TrainingRecipe;
use crate::run_folder::{EXPORT, RunFolder};
use crate::{Error, Recipe, Result};

/// A word for a part of a model, and what belongs to it.
type ParamSelector = (&'static str, fn(&ParamSpec) -> bool);

const WORDS: [ParamSelector; 8] = [
    ("all", |_| true),
    ("gates", |spec| spec.name.contains(".fgate_")),
    ("attention", |spec| spec.group == ParamGroup::Mixer),
    ("mixers", |spec| spec.group == ParamGroup::Mixer),
    ("mlp", |spec| spec.group == ParamGroup::Mlp),
    ("norms", |spec| spec.group == ParamGroup::Norm),
    ("embedding", |spec| spec.group == ParamGroup::Embedding),
    ("head", |spec| spec.group == ParamGroup::Head),
];

/// Whether a word or pattern names a parameter.
fn names(pattern: &str, spec: &ParamSpec) -> bool {
    match WORDS.iter().find(|(word, _)| *word == pattern) {
        Some((_, holds)) => holds(spec),
        None => matches(pattern, &spec.name),
    }
}

/// Whether a pattern with `*` covers all of a name.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(middle) = last.replace(part) {
            let Some(at) = rest.find(middle) else { return false };
            rest = &rest[at + middle.len()..];
        }
    }
    last.map_or(rest.is_empty(), |last| rest.ends_with(last))
}

impl TrainingRecipe {
    /// Whether a parameter is trained, as far as the recipe decides it.
    pub(crate) fn trains(&self, spec: &ParamSpec) -> bool {
        self.train.as_ref().is_none_or(|list| list.iter().any(|pattern| names(pattern, spec)))
    }

    /// Leaves everything that is not to be trained as it is: no gradient, no state of the optimizer.
    pub(crate) fn freeze(&self, params: &mut Parameters) {
        if self.train.is_some() {
            params.train_only(|spec| self.trains(spec));
        }
    }

    /// Factors on the learning rate, in the order of the parameters. One that several patterns name has the product
    /// of theirs.
    pub(crate) fn rate_factors(&self, params: &Parameters) -> Vec<f64> {
        let factor = |spec: &ParamSpec| {
            let named = self.rates.iter().filter(|(pattern, _)| names(pattern, spec));
            named.map(|(_, factor)| factor).product()
        };
        params.iter().map(|(_, spec, _)| factor(spec)).collect()
    }

    /// Factor on the angles of RoPE for a step that so many tokens came before; `None` where it does not fade.
    pub(crate) fn rope_strength(&self, tokens: u64) -> Option<f64> {
        let [from, to] = self.rope_fade?;
        let done = tokens.saturating_sub(from) as f64 / to.saturating_sub(from).max(1) as f64;
        Some(1.0 - done.min(1.0))
    }
}

impl Recipe {
    /// The error for a `gate_init` without data-dependent gates.
    pub(crate) fn without_gates(&self) -> Error {
        let detail =
            "is set, but the model has no data-dependent forget gates; set it to \"published\"";
        Error::value(&self.name, "training.gate_init", detail)
    }

    /// Refuses patterns that name nothing that the model has, and a fading of what is not there.
    pub(crate) fn check_tuning(&self, config: &ModelConfig) -> Result<()> {
        let (t, specs) = (&self.training, config.param_specs());
        let listed = t.train.iter().flatten().map(|pattern| ("training.train", pattern));
        let rated = t.rates.keys().map(|pattern| ("training.rates", pattern));
        for (key, pattern) in listed.chain(rated) {
            if !specs.iter().any(|spec| spec.trainable && names(pattern, spec)) {
                let words: Vec<&str> = WORDS.iter().map(|(word, _)| *word).collect();
                let detail = format!(
                    "names `{pattern}`, which the model does not have; give {} or a pattern on names such as {}",
                    words.join(", "),
                    specs.last().map_or("lm_head.weight", |spec| &spec.name)
                );
                return Err(Error::value(&self.name, key, detail));
            }
        }
        let init = t.gate_init.decay_time(self.data.sequence_length);
        let gates = ["*fgate_proj.bias", "*.g_proj.bias", "*.gs_proj.bias"];
        let gated = |spec: &ParamSpec| gates.iter().any(|pattern| names(pattern, spec));
        if init.is_some() && !specs.iter().any(gated) {
            return Err(self.without_gates());
        }
        let rope = config.mixer.forgetting().and_then(|mixer| mixer.rope);
        if t.rope_fade.is_some() && (rope.is_none() || config.mixer.at(0).is_some()) {
            let detail = "is set, but the model has no attention with RoPE; remove it";
            return Err(Error::value(&self.name, "training.rope_fade", detail));
        }
        Ok(())
    }

    /// The checkpoint folder that the model begins with.
    pub(crate) fn init_folder(&self) -> Result<Option<PathBuf>> {
        self.training.init.as_deref().map(checkpoint_folder).transpose()
    }

    /// The model of `training.init` with the options of this recipe.
    pub(crate) fn tuned_model(
        &self,
        folder: &Path,
        config: &ModelConfig,
        device: &Device,
        keeps: &Residency<'_>,
    ) -> Result<Model> {
        let mut reader = CheckpointReader::open(folder)?;
        Ok(Model::from_reader_as(&mut reader, config, device, keeps)?)
    }

    /// Gives a model in training the teacher that the recipe asks for: what it began with.
    pub(crate) fn give_teacher(&self, model: &mut Model) -> Result<()> {
        let (Some(weight), Some(folder)) = (self.training.distill, self.init_folder()?) else {
            return Ok(());
        };
        let mut teacher = Model::from_checkpoint(&folder, model.device())?;
        teacher.pack_weights(WeightFormat::F32)?;
        Ok(model.distil_from(teacher, weight)?)
    }

    /// Refuses a checkpoint to begin with whose parameters or, where it is known, whose tokenizer are others.
    pub(crate) fn check_init(&self, config: &ModelConfig, data: &RunData) -> Result<()> {
        let Some(folder) = self.init_folder()? else { return Ok(()) };
        CheckpointReader::open(&folder)?.check_fits(config)?;
        let Ok(tokenizer) = Tokenizer::load(&folder) else { return Ok(()) };
        let (own, found) = (tokenizer.identity().to_string(), data.train.tokenizer_identity());
        if own == found {
            return Ok(());
        }
        let detail = format!(
            "is {}, whose tokenizer is {own}, but the data were made with {found}; prepare them with the tokenizer of the checkpoint",
            folder.display()
        );
        Err(Error::value(&self.name, "training.init", detail))
    }
}

/// The checkpoint that a path names: a Hugging Face folder, or a run, whose export or newest checkpoint it is.
fn checkpoint_folder(path: &Path) -> Result<PathBuf> {
    if !RunFolder::is_run(path) {
        return Ok(path.to_path_buf());
    }
    let export = path.join(EXPORT);
    if export.join("config.json").is_file() { Ok(export) } else { RunFolder::newest_folder(path) }
}

/// The table `[model]` of a checkpoint, for a recipe that begins with it.
pub(crate) fn model_table(path: &Path) -> Result<Table> {
    let (config, model_type) =
        ModelConfig::from_file(&checkpoint_folder(path)?.join("config.json"))?;
    let json = config.to_json(model_type)?;
    let fields = json.as_object().into_iter().flatten();
    Ok(fields.filter_map(|(key, value)| Some((key.clone(), toml(value)?))).collect())
}

/// A JSON value as TOML, which has no null.
fn toml(value: &serde_json::Value) -> Option<Value> {
    use serde_json::Value as Json;
    Some(match value {
        Json::Null => return None,
        Json::Bool(x) => Value::Boolean(*x),
        Json::Number(x) => match x.as_i64() {
            Some(whole) => Value::Integer(whole),
            None => Value::Float(x.as_f64()?),
        },
        Json::String(x) => Value::String(x.clone()),
        Json::Array(list) => Value::Array(list.iter().filter_map(toml).collect()),
        Json::Object(map) => Value::Table(
            map.iter().filter_map(|(key, value)| Some((key.clone(), toml(value)?))).collect(),
        ),
    })
}

/// Lets a model have the angles that a fading left it with, for good.
pub(crate) fn settle_rope(model: &mut Model, strength: Option<f64>) -> Result<()> {
    let Some(strength) = strength else { return Ok(()) };
    let mut config = model.config().clone();
    if let Some(mixer) = config.mixer.forgetting_mut() {
        let faded = |rope: Rope| (strength > 0.0).then_some(Rope { strength, ..rope });
        mixer.rope = mixer.rope.and_then(faded);
    }
    Ok(model.reconfigure(&config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_cover_whole_names() {
        for (pattern, name, want) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("a.*", "a.bc", true),
            ("*.bias", "a.b.bias", true),
            ("*.bias", "a.bias.b", false),
            ("model.*.q_proj.*", "model.layers.3.attn.q_proj.weight", true),
            ("model.*.q_proj.*", "model.layers.3.attn.k_proj.weight", false),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }

    #[test]
    fn rope_fades_linearly() {
        let recipe = TrainingRecipe { rope_fade: Some([100, 300]), ..Default::default() };
        let at = |tokens: u64| recipe.rope_strength(tokens).unwrap();
        assert_eq!([0, 100, 200, 300, 999].map(at), [1.0, 1.0, 0.5, 0.0, 0.0]);
        assert_eq!(TrainingRecipe::default().rope_strength(5), None);
    }
}
