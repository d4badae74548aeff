//! File formats: a `model_type`, the fields of its config.json, and the names of its tensors.
//!
//! A family lists its formats as data, a [`Format`] each: a handful of strings and functions over the
//! family's own configuration. [`ModelType`] is how the rest of the crate holds one of them.

use std::fmt;

use fox_tensor::ParamId;
use serde_json::{Map, Value};

use super::{BUILT_IN, MixerConfig, families};
use crate::checkpoint::{FileTensor, single_tensor};
use crate::config::{Fields, ModelConfig};
use crate::params::ParamSpec;
use crate::{Result, mixers::forgetting};

/// The project whose names and fields a format follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointLayout {
    /// A short name, e.g. `fla`.
    pub name: &'static str,
    /// The project, for help texts.
    pub owner: &'static str,
}

impl CheckpointLayout {
    /// The official FoX repository's.
    pub const OFFICIAL: CheckpointLayout = CheckpointLayout {
        name: "official",
        owner: "The official FoX repository's (`...-project_fox`)",
    };
    /// flash-linear-attention's.
    pub const FLA: CheckpointLayout =
        CheckpointLayout { name: "fla", owner: "flash-linear-attention's" };
    /// Hugging Face's.
    pub const HUGGING_FACE: CheckpointLayout = CheckpointLayout {
        name: "hf",
        owner: "Hugging Face transformers' (`llama`, `mistral`, `qwen2`, `qwen3`)",
    };
    /// fox's native layout, for options that no reference can express.
    pub const NATIVE: CheckpointLayout =
        CheckpointLayout { name: "native", owner: "fox's own, which no reference reads" };

    /// The layouts that other software reads: those of all formats but the native one.
    pub fn foreign() -> Vec<CheckpointLayout> {
        let mut layouts = Vec::new();
        for layout in ModelType::all().into_iter().map(ModelType::layout) {
            if layout != Self::NATIVE && !layouts.contains(&layout) {
                layouts.push(layout);
            }
        }
        layouts
    }
}

/// A file format of models whose mixer is a `C`.
#[derive(Clone, Copy, Debug)]
pub struct Format<C> {
    /// The value of the field `model_type`.
    pub model_type: &'static str,
    /// Whose names and fields it follows.
    pub layout: CheckpointLayout,
    /// The value of the field `architectures`, e.g. `MambaForCausalLM`.
    pub architecture: &'static str,
    /// The fields that all formats have.
    pub common: CommonFields,
    /// The mixer from the fields of a config.json.
    pub read: fn(&Fields<'_>) -> Result<C>,
    /// Adds the mixer's fields to those that all formats have.
    pub write: fn(&C, &ModelConfig, &mut Map<String, Value>),
    /// Whether the format is meant for such a model. The first such format of a layout is written.
    pub suits: fn(&C, &ModelConfig) -> bool,
    /// The options of the model that the format cannot express, by the names a user knows.
    pub lacks: fn(&C, &ModelConfig) -> Vec<&'static str>,
    /// The tensors that a parameter is stored as.
    pub tensors: fn(ParamId, &ParamSpec) -> Vec<FileTensor>,
    /// The name of a tensor in files of older versions.
    pub old_name: fn(&str) -> Option<String>,
    /// Whether files may have this tensor although no parameter uses it.
    pub may_hold: fn(&str) -> bool,
}

impl<C> Format<C> {
    /// A format that suits every model of its family and lacks nothing, whose tensors are the parameters.
    pub const fn new(
        model_type: &'static str,
        layout: CheckpointLayout,
        architecture: &'static str,
        read: fn(&Fields<'_>) -> Result<C>,
        write: fn(&C, &ModelConfig, &mut Map<String, Value>),
    ) -> Self {
        Format {
            model_type,
            layout,
            architecture,
            common: CommonFields::DEFAULT,
            read,
            write,
            suits: |_, _| true,
            lacks: |_, _| Vec::new(),
            tensors: single_tensor,
            old_name: |_| None,
            may_hold: |_| false,
        }
    }
}

/// The fields of a config.json that all formats have: defaults, and names that differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CommonFields {
    /// Default of `num_hidden_layers`.
    pub layers: usize,
    /// The field of the norms' epsilon.
    pub norm_eps_field: &'static str,
    /// Its default.
    pub norm_eps: f64,
    /// Default of `initializer_range`.
    pub initializer_range: f64,
    /// Whether `hidden_act` may be `sigmoid`.
    pub sigmoid_mlp: bool,
    /// Default of `hidden_size`.
    pub hidden_size: usize,
    /// The fields that give the width of the MLPs.
    pub mlp_width: MlpWidthFields,
}

/// The fields of a config.json that give the width of the MLPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpWidthFields {
    /// `intermediate_size`, or `hidden_ratio` where that is null or missing.
    WidthOrRatio,
    /// `intermediate_size`, which is required.
    Width,
    /// Fields of the mixer, which depend on the layer.
    PerLayer,
}

impl CommonFields {
    /// Those of most formats.
    pub const DEFAULT: CommonFields = CommonFields {
        layers: 24,
        norm_eps_field: "norm_eps",
        norm_eps: 1e-6,
        initializer_range: 0.02,
        sigmoid_mlp: false,
        hidden_size: 2048,
        mlp_width: MlpWidthFields::WidthOrRatio,
    };
}

/// A [`Format`] of any family.
pub trait FileFormat: Sync {
    /// See [`Format::model_type`].
    fn model_type(&self) -> &'static str;
    /// See [`Format::layout`].
    fn layout(&self) -> CheckpointLayout;
    /// See [`Format::architecture`].
    fn architecture(&self) -> &'static str;
    /// See [`Format::common`].
    fn common(&self) -> &CommonFields;
    /// See [`Format::read`].
    fn read(&self, fields: &Fields<'_>) -> Result<Box<dyn MixerConfig>>;
    /// See [`Format::write`]; nothing for a model of another family.
    fn write(&self, model: &ModelConfig, map: &mut Map<String, Value>);
    /// See [`Format::suits`]; false for a model of another family.
    fn suits(&self, model: &ModelConfig) -> bool;
    /// See [`Format::lacks`]; the mixer itself for a model of another family.
    fn lacks(&self, model: &ModelConfig) -> Vec<&'static str>;
    /// See [`Format::tensors`].
    fn tensors(&self, id: ParamId, spec: &ParamSpec) -> Vec<FileTensor>;
    /// See [`Format::old_name`].
    fn old_name(&self, name: &str) -> Option<String>;
    /// See [`Format::may_hold`].
    fn may_hold(&self, name: &str) -> bool;
}

impl<C: MixerConfig> FileFormat for Format<C> {
    fn model_type(&self) -> &'static str {
        self.model_type
    }

    fn layout(&self) -> CheckpointLayout {
        self.layout
    }

    fn architecture(&self) -> &'static str {
        self.architecture
    }

    fn common(&self) -> &CommonFields {
        &self.common
    }

    fn read(&self, fields: &Fields<'_>) -> Result<Box<dyn MixerConfig>> {
        Ok(Box::new((self.read)(fields)?))
    }

    fn write(&self, model: &ModelConfig, map: &mut Map<String, Value>) {
        if let Some(mixer) = model.mixer.downcast_ref() {
            (self.write)(mixer, model, map);
        }
    }

    fn suits(&self, model: &ModelConfig) -> bool {
        model.mixer.downcast_ref().is_some_and(|mixer| (self.suits)(mixer, model))
    }

    fn lacks(&self, model: &ModelConfig) -> Vec<&'static str> {
        match model.mixer.downcast_ref() {
            Some(mixer) => (self.lacks)(mixer, model),
            None => vec![model.mixer.kind()],
        }
    }

    fn tensors(&self, id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
        (self.tensors)(id, spec)
    }

    fn old_name(&self, name: &str) -> Option<String> {
        (self.old_name)(name)
    }

    fn may_hold(&self, name: &str) -> bool {
        (self.may_hold)(name)
    }
}

/// The names of the options that are set.
pub fn enabled(options: &[(bool, &'static str)]) -> Vec<&'static str> {
    options.iter().filter(|(there, _)| *there).map(|(_, name)| *name).collect()
}

/// One of the file formats of all families; equal when the `model_type` is.
#[derive(Clone, Copy)]
pub struct ModelType(&'static dyn FileFormat);

impl ModelType {
    /// `fox`: attention with every option there is.
    pub(crate) const NATIVE_FOX: ModelType = ModelType(&forgetting::NATIVE);

    /// Every format of every family.
    pub fn all() -> Vec<ModelType> {
        families().iter().flat_map(|family| family.formats).map(|format| Self(*format)).collect()
    }

    /// The format with this `model_type`.
    pub fn by_name(name: &str) -> Option<ModelType> {
        Self::all().into_iter().find(|model_type| model_type.as_str() == name)
    }

    /// Whether it belongs to a family of this crate, not to one that was registered.
    pub fn is_built_in(self) -> bool {
        let mut formats = BUILT_IN.iter().flat_map(|family| family.formats);
        formats.any(|format| format.model_type() == self.as_str())
    }

    /// The value of the field `model_type`.
    pub fn as_str(self) -> &'static str {
        self.0.model_type()
    }

    /// Whose names and fields it follows.
    pub fn layout(self) -> CheckpointLayout {
        self.0.layout()
    }

    /// The tensors that a parameter is stored as, in order; together they are the parameter.
    pub(crate) fn file_tensors(self, id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
        self.0.tensors(id, spec)
    }

    pub(crate) fn format(self) -> &'static dyn FileFormat {
        self.0
    }
}

impl PartialEq for ModelType {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for ModelType {}

impl fmt::Debug for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ModelType").field(&self.as_str()).finish()
    }
}
