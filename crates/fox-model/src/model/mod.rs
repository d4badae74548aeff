//! The language model: embedding, blocks, final norm, output projection.

mod decode;
mod distill;
mod embed;
mod forward;
mod slots;
mod structure;
mod token_decoder;

use std::path::Path;

use fox_tensor::{Device, ParamId, WeightFormat};

use crate::block::Block;
use crate::checkpoint::{CheckpointReader, WriteOptions, write_checkpoint};
use crate::config::ModelConfig;
use crate::mixers::Mixer;
use crate::mixers::forgetting::{DecayTime, ForgettingLayer};
use crate::params::{ParamGroup, ParamSpec, Parameters, Residency};
use crate::{Error, Result};
pub use embed::Pooling;
pub use forward::{ForwardOptions, ForwardOutput, Pruning, TokenLoss};
pub(crate) use structure::{Structure, declare};
pub use token_decoder::TokenDecoder;

/// A model with its parameters on a device.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    params: Parameters,
    structure: Structure,
    device: Device,
    teacher: Option<distill::Teacher>,
}

impl Model {
    /// A fresh model; the same seed gives the same weights.
    pub fn init(config: &ModelConfig, seed: u64, device: &Device) -> Result<Model> {
        Self::init_where(config, seed, device, &|_| true)
    }

    /// [`Model::init`] of one of several ranks, which keeps only some parameters.
    pub fn init_where(
        config: &ModelConfig,
        seed: u64,
        device: &Device,
        keeps: &Residency<'_>,
    ) -> Result<Model> {
        config.validate("model configuration")?;
        let (specs, structure) = declare(config);
        let params = Parameters::init(specs, seed, device, keeps)?;
        Ok(Model {
            config: config.clone(),
            params,
            structure,
            device: device.clone(),
            teacher: None,
        })
    }

    /// Initializes the biases of data-dependent forget gates such that heads start with these memory lengths, instead
    /// of forgetting half at every token. Returns false when the model has no such gates.
    pub fn init_decay_times(&mut self, time: DecayTime) -> Result<bool> {
        let biases: Vec<(ParamId, Vec<f32>)> =
            self.structure.blocks.iter().flat_map(|block| block.gate_biases(time)).collect();
        for (id, values) in &biases {
            self.params.set(*id, self.device.from_f32(values, [values.len()])?)?;
        }
        Ok(!biases.is_empty())
    }

    /// Reads a checkpoint folder in any supported format.
    pub fn from_checkpoint(dir: &Path, device: &Device) -> Result<Model> {
        Self::from_reader(&mut CheckpointReader::open(dir)?, device)
    }

    /// Reads a checkpoint that is open already.
    pub fn from_reader(reader: &mut CheckpointReader, device: &Device) -> Result<Model> {
        Self::from_reader_where(reader, device, &|_| true)
    }

    /// [`Model::from_reader`] of one of several ranks, which keeps only some parameters.
    pub fn from_reader_where(
        reader: &mut CheckpointReader,
        device: &Device,
        keeps: &Residency<'_>,
    ) -> Result<Model> {
        let config = reader.config().clone();
        let (specs, structure) = declare(&config);
        let params = Parameters::build(specs, device, keeps, |id, _| reader.read(id))?;
        Ok(Model { config, params, structure, device: device.clone(), teacher: None })
    }

    /// Reads a checkpoint that is open already into a model of other options that has the same parameters, e.g. another
    /// base of RoPE; of several ranks, each keeps only some parameters.
    ///
    /// # Errors
    /// A parameter that only one of them has, or that has another shape.
    pub fn from_reader_as(
        reader: &mut CheckpointReader,
        config: &ModelConfig,
        device: &Device,
        keeps: &Residency<'_>,
    ) -> Result<Model> {
        config.validate("model configuration")?;
        reader.check_fits(config)?;
        let (specs, structure) = declare(config);
        let stored: Vec<String> = reader.specs().iter().map(|spec| spec.name.clone()).collect();
        let params = Parameters::build(specs, device, keeps, |_, spec| {
            let at = stored.iter().position(|name| *name == spec.name);
            reader.read(ParamId(at.unwrap_or_default()))
        })?;
        Ok(Model {
            config: config.clone(),
            params,
            structure,
            device: device.clone(),
            teacher: None,
        })
    }

    /// Replaces options that do not change the parameters.
    ///
    /// # Errors
    /// Options that change the parameters.
    pub fn reconfigure(&mut self, config: &ModelConfig) -> Result<()> {
        config.validate("model configuration")?;
        let (specs, structure) = declare(config);
        let same = |(spec, (_, own, _)): (&ParamSpec, (ParamId, &ParamSpec, _))| {
            spec.name == own.name && spec.dims == own.dims
        };
        if specs.len() != self.params.len() || !specs.iter().zip(self.params.iter()).all(same) {
            let detail = "a model cannot be given options that ask for other parameters";
            return Err(Error::Argument(detail.into()));
        }
        (self.config, self.structure) = (config.clone(), structure);
        Ok(())
    }

    /// Writes a checkpoint folder, which appears when it is complete.
    pub fn save(&self, dir: &Path, options: &WriteOptions) -> Result<()> {
        self.save_from(dir, options, |id| Ok(self.params.value(id).to_f32()?))
    }

    /// [`Model::save`] with the values of `source`, which is called for one parameter at a time.
    pub fn save_from(
        &self,
        dir: &Path,
        options: &WriteOptions,
        source: impl FnMut(ParamId) -> Result<Vec<f32>>,
    ) -> Result<()> {
        write_checkpoint(dir, &self.config, options, source)
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its parameters.
    pub fn params(&self) -> &Parameters {
        &self.params
    }

    /// Its parameters, for an optimizer.
    pub fn params_mut(&mut self) -> &mut Parameters {
        &mut self.params
    }

    /// Keeps the large matrices of linear layers in another format, for inference, or in F32 as the device
    /// likes them best, which is for training as well. Per-head scalars (gates, shifts), norms, convolutions
    /// and the embedding stay as they are.
    pub fn pack_weights(&mut self, format: WeightFormat) -> Result<()> {
        let here = self.params.iter().filter(|(_, _, value)| !value.is_absent());
        let params = here.filter(|(_, spec, _)| self.is_packed(spec));
        let ids: Vec<ParamId> = params.map(|(id, _, _)| id).collect();
        for id in ids {
            let packed = self.params.value(id).packed(format)?;
            self.params.set(id, packed)?;
        }
        Ok(())
    }

    /// Whether [`Model::pack_weights`] packs a parameter.
    pub fn is_packed(&self, spec: &ParamSpec) -> bool {
        let linear = matches!(spec.group, ParamGroup::Mixer | ParamGroup::Mlp | ParamGroup::Head);
        let matrix = spec.dims.len() == 2 && spec.dims[0] > self.config.heads().0 && spec.decay;
        linear && matrix && !spec.name.contains("conv1d")
    }

    /// Bytes of weights that one decode step has to read, in the format given: all of them, except that
    /// only a row of the embedding is read, unless it is also the output projection.
    pub fn weight_bytes_per_step(&self, format: WeightFormat) -> f64 {
        let read = |spec: &&ParamSpec| {
            spec.group != ParamGroup::Embedding || self.config.tie_word_embeddings
        };
        let bytes = |spec: &ParamSpec| {
            let each = if self.is_packed(spec) { format.bytes_per_value() } else { 4.0 };
            each * spec.count() as f64
        };
        self.params.iter().map(|(_, spec, _)| spec).filter(read).map(bytes).sum()
    }

    /// The device of its parameters.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// For every layer, its mixer and the weights of the norm in front of it.
    pub(crate) fn mixers(&self) -> impl Iterator<Item = (&dyn Mixer, ParamId)> {
        self.structure.blocks.iter().map(Block::mixer)
    }

    /// For every layer, the attention layer and the weights of the norm in front of it, if it is one.
    pub(crate) fn attention_layers(
        &self,
    ) -> impl Iterator<Item = Option<(&ForgettingLayer, ParamId)>> {
        self.structure.blocks.iter().map(Block::attention)
    }
}
