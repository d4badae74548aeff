//! The language model: embedding, blocks, final norm, output projection.

use std::path::Path;

use fox_tensor::{
    DType, DecodeStep, Device, ParamId, Result as TensorResult, Segment, Segments, Tape, Tensor,
    Var, WeightFormat,
};

use crate::block::{Block, BlockOutput};
use crate::cache::Cache;
use crate::checkpoint::{CheckpointReader, WriteOptions, write_checkpoint};
use crate::config::{DecayTime, LowerBounds, MixerConfig, ModelConfig};
use crate::mixers::{Forgetting, LayerPlace, MixerContext};
use crate::observe::Observer;
use crate::paged::PagePolicy;
use crate::params::{Init, ParamGroup, ParamList, ParamSpec, Parameters};
use crate::{Error, Result};

/// Which attention blocks may be skipped (adaptive computation pruning).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Pruning {
    /// As the configuration says.
    #[default]
    Config,
    /// None.
    Off,
    /// Those whose share of a row's softmax is provably below `e^tolerance`.
    Tolerance(f32),
    /// With a tolerance of -10 and a bound from the norms of queries and keys.
    Auto,
}

/// How a forward pass is run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ForwardOptions {
    /// Which attention blocks may be skipped.
    pub pruning: Pruning,
    /// Drop the activations of each block and compute them again in the backward pass.
    pub recompute: bool,
}

/// The result of the blocks.
#[derive(Debug)]
pub struct Hidden {
    /// The normalised stream `[R, D]`, ready for the output projection.
    pub states: Var,
    /// Per attention layer, blocks visited and in all `[H, 2]` i32; empty in recurrent models.
    pub blocks: Vec<Tensor>,
}

/// The result of a loss.
#[derive(Debug)]
pub struct TokenLoss {
    /// Cross-entropy of every row `[R]`; 0 where the label is ignored.
    pub per_token: Tensor,
    /// Per attention layer, blocks visited and in all `[H, 2]` i32; empty in recurrent models.
    pub blocks: Vec<Tensor>,
}

/// Where the parameters of the parts are.
#[derive(Debug)]
pub(crate) struct Structure {
    embeddings: ParamId,
    pub(crate) blocks: Vec<Block>,
    norm: ParamId,
    lm_head: ParamId,
}

/// The parameters that a configuration asks for, and the parts that use them.
pub(crate) fn declare(config: &ModelConfig) -> (Vec<ParamSpec>, Structure) {
    let mut list = ParamList::default();
    let (vocab, width, std) = (config.vocab_size, config.hidden_size, config.initializer_range);
    let embeddings = list.push(
        ParamGroup::Embedding,
        if config.has_mlp() { "model.embeddings.weight" } else { "backbone.embeddings.weight" },
        vec![vocab, width],
        true,
        Init::Normal { std, zero_row: config.untrained_token() },
    );
    let lower_bounds = declare_lower_bounds(config, &mut list);
    let place = |index: usize| LayerPlace { index, lower_bounds };
    let blocks =
        (0..config.num_layers).map(|l| Block::declare(config, place(l), &mut list)).collect();
    let norm = if config.has_mlp() { "model.norm.weight" } else { "backbone.norm_f.weight" };
    let norm = list.vector(ParamGroup::Norm, norm, width, 1.0);
    let name = "lm_head.weight";
    let lm_head = match &config.mixer {
        _ if config.tie_word_embeddings => embeddings,
        MixerConfig::Mamba2(_) => {
            let bound = 1.0 / (width as f64).sqrt();
            list.uniform_matrix(ParamGroup::Head, name, (vocab, width), bound)
        }
        _ => list.matrix(ParamGroup::Head, name, vocab, width, std),
    };
    (list.specs, Structure { embeddings, blocks, norm, lm_head })
}

/// HGRN2's table `[L, D]`, which all layers share.
fn declare_lower_bounds(config: &ModelConfig, list: &mut ParamList) -> Option<ParamId> {
    let MixerConfig::Hgrn2(mixer) = &config.mixer else { return None };
    let dims = vec![config.num_layers, config.hidden_size];
    let (name, start) = ("model.lower_bounds", Init::Constant(0.0));
    match mixer.lower_bounds {
        LowerBounds::None => None,
        LowerBounds::Stored => Some(list.buffer(ParamGroup::Mixer, name, dims, start)),
        LowerBounds::Used => Some(list.push(ParamGroup::Mixer, name, dims, false, start)),
    }
}

impl ModelConfig {
    /// The parameters of this model, in order. The configuration must be valid.
    pub fn param_specs(&self) -> Vec<ParamSpec> {
        declare(self).0
    }
}

/// A model with its parameters on a device.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    params: Parameters,
    structure: Structure,
    device: Device,
}

impl Model {
    /// A fresh model; the same seed gives the same weights.
    pub fn init(config: &ModelConfig, seed: u64, device: &Device) -> Result<Model> {
        config.validate("model configuration")?;
        let (specs, structure) = declare(config);
        let params = Parameters::init(specs, seed, device)?;
        Ok(Model { config: config.clone(), params, structure, device: device.clone() })
    }

    /// Lets the gates that depend on the input begin with these memory lengths, instead of forgetting
    /// half at every token. False when the model has no such gates.
    pub fn begin_with_memory(&mut self, time: DecayTime) -> Result<bool> {
        let is_bias = |spec: &ParamSpec| spec.name.ends_with(".fgate_proj.bias");
        let biases: Vec<ParamId> =
            self.params.iter().filter(|(_, spec, _)| is_bias(spec)).map(|(id, ..)| id).collect();
        for &id in &biases {
            let heads = self.params.spec(id).count();
            let start = self.device.from_f32(&time.gate_biases(heads), [heads])?;
            self.params.set(id, start)?;
        }
        Ok(!biases.is_empty())
    }

    /// Reads a checkpoint folder in any supported format.
    pub fn from_checkpoint(dir: &Path, device: &Device) -> Result<Model> {
        Self::from_reader(&mut CheckpointReader::open(dir)?, device)
    }

    /// Reads a checkpoint that is open already.
    pub fn from_reader(reader: &mut CheckpointReader, device: &Device) -> Result<Model> {
        let config = reader.config().clone();
        let (specs, structure) = declare(&config);
        let params = Parameters::build(specs, device, |id, _| reader.read(id))?;
        Ok(Model { config, params, structure, device: device.clone() })
    }

    /// Writes a checkpoint folder, aside first, so that it is there in full or not at all.
    pub fn save(&self, dir: &Path, options: &WriteOptions) -> Result<()> {
        write_checkpoint(dir, &self.config, options, |id| Ok(self.params.value(id).to_f32()?))
    }

    /// What the model is.
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
        let params = self.params.iter().filter(|(_, spec, _)| self.is_packed(spec));
        let ids: Vec<ParamId> = params.map(|(id, _, _)| id).collect();
        for id in ids {
            let packed = self.device.backend().pack_weight(self.params.value(id), format)?;
            self.params.set(id, packed)?;
        }
        Ok(())
    }

    fn is_packed(&self, spec: &ParamSpec) -> bool {
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

    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// An empty decode state for `batch` sequences with room for `capacity` tokens each.
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<Cache> {
        Cache::new(&self.config, batch, capacity, &self.device)
    }

    /// An empty decode state of one sequence in pages; see [`Model::page_policy`].
    pub fn new_paged_cache(&self, policy: &PagePolicy) -> Result<Cache> {
        Cache::paged(&self.config, policy, &self.device)
    }

    /// The attention layers, each with the weights of the norm in front of it.
    pub(crate) fn attention_layers(&self) -> impl Iterator<Item = (&Forgetting, ParamId)> {
        self.structure.blocks.iter().filter_map(Block::attention)
    }

    /// Embedding, blocks and final norm of `tokens: [R]`.
    ///
    /// `segments` says which rows form a sequence. With a cache, segment `b` holds the new tokens of
    /// sequence `b`, which see all earlier ones; the tape must not record then.
    pub fn forward<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        tokens: &Tensor,
        segments: &Segments,
        cache: Option<&mut Cache>,
        options: &ForwardOptions,
    ) -> Result<Hidden> {
        self.run(tape, tokens, segments, cache, options, None)
    }

    /// A forward pass for its inner life: `observer` is shown what every attention layer works on, one
    /// layer at a time, so that only one has to be in memory.
    pub fn observe(
        &self,
        tokens: &Tensor,
        segments: &Segments,
        options: &ForwardOptions,
        observer: &dyn Observer,
    ) -> Result<Hidden> {
        let mut tape = Tape::inference(&self.device);
        self.run(&mut tape, tokens, segments, None, options, Some(observer))
    }

    fn run<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        tokens: &Tensor,
        segments: &Segments,
        mut cache: Option<&mut Cache>,
        options: &ForwardOptions,
        observer: Option<&dyn Observer>,
    ) -> Result<Hidden> {
        if cache.is_some() && tape.is_recording() {
            return Err(Error::Argument("gradients do not pass through a cache".into()));
        }
        let placed = match cache.as_deref_mut() {
            Some(cache) => cache.begin(segments)?,
            None => segments.clone(),
        };
        let table = self.params.var(self.structure.embeddings);
        let mut h = tape.embedding(&table, tokens, self.config.untrained_token())?;
        let mut delta: Option<Var> = None;
        let mut blocks = Vec::with_capacity(self.config.num_layers);
        for (l, block) in self.structure.blocks.iter().enumerate() {
            let out = if options.recompute && tape.is_recording() {
                self.forward_again(tape, block, &h, delta.as_ref(), &placed, options.pruning)?
            } else {
                let mut context = self.context(&placed, options.pruning);
                context.observer = observer.map(|observer| (observer, l));
                let state = cache.as_deref_mut().map(|cache| &mut cache.layers[l]);
                block.forward(tape, &h, delta.as_ref(), &context, state)?
            };
            blocks.extend(out.blocks);
            (h, delta) = (out.h, Some(out.delta));
        }
        let norm = self.params.var(self.structure.norm);
        let eps = self.config.norm_eps as f32;
        let (_, states) = tape.add_rms_norm(&h, delta.as_ref(), &norm, eps)?;
        if let Some(cache) = cache {
            cache.commit(segments);
        }
        Ok(Hidden { states, blocks })
    }

    /// A block whose activations are dropped now and computed again in the backward pass.
    fn forward_again<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        block: &'m Block,
        h: &Var,
        delta: Option<&Var>,
        segments: &Segments,
        pruning: Pruning,
    ) -> Result<BlockOutput> {
        let inputs: Vec<Var> = std::iter::once(h).chain(delta).cloned().collect();
        let segments = segments.clone();
        let outputs = tape.checkpoint(&inputs, move |tape, inputs| {
            let context = self.context(&segments, pruning);
            let out = block.forward(tape, &inputs[0], inputs.get(1), &context, None)?;
            let blocks = out.blocks.map(Var::constant);
            Ok([out.h, out.delta].into_iter().chain(blocks).collect())
        })?;
        let mut outputs = outputs.into_iter();
        match (outputs.next(), outputs.next(), outputs.next()) {
            (Some(h), Some(delta), blocks) => {
                Ok(BlockOutput { h, delta, blocks: blocks.map(|b| b.value().clone()) })
            }
            _ => Err(Error::Argument("a recomputed block gave fewer than two values".into())),
        }
    }

    fn context<'a>(&'a self, segments: &'a Segments, pruning: Pruning) -> MixerContext<'a> {
        MixerContext { params: &self.params, segments, pruning, observer: None }
    }

    /// Logits `[R, V]` of normalised states `[R, D]`.
    pub fn logits(&self, tape: &mut Tape<'_>, states: &Var) -> TensorResult<Var> {
        tape.linear(states, &self.params.var(self.structure.lm_head), None)
    }

    /// Loss of every token; a backward pass starts from `sum_r weights[r] * loss[r]`.
    ///
    /// `tokens`, `labels` (already shifted) and `weights` are `[R]`; a mean over all rows has weights
    /// `1 / R`.
    pub fn loss<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        tokens: &Tensor,
        labels: &Tensor,
        weights: &Tensor,
        segments: &Segments,
        options: &ForwardOptions,
    ) -> Result<TokenLoss> {
        let hidden = self.forward(tape, tokens, segments, None, options)?;
        let head = self.params.var(self.structure.lm_head);
        let per_token = tape.linear_cross_entropy(&hidden.states, &head, labels, weights)?;
        Ok(TokenLoss { per_token, blocks: hidden.blocks })
    }

    /// Feeds each sequence its new tokens and returns the logits after the last of them
    /// `[batch, V]`. The row of a sequence without new tokens is 0.
    pub fn decode(
        &self,
        tokens: &[&[i32]],
        cache: &mut Cache,
        options: &ForwardOptions,
    ) -> Result<Tensor> {
        let mut segments = Vec::with_capacity(tokens.len());
        let mut start = 0;
        for new in tokens {
            let len = new.len();
            segments.push(Segment { q_start: start, q_len: len, k_start: start, k_len: len });
            start += len;
        }
        if start == 0 {
            return Err(Error::Argument("a decode step without tokens".into()));
        }
        let segments = Segments::new(segments)?;
        let ids = self.device.from_i32(&tokens.concat(), [start])?;
        let mut tape = Tape::inference(&self.device);
        if let Some(logits) = self.decode_step(&mut tape, &ids, &segments, cache)? {
            return Ok(logits);
        }
        let hidden = self.forward(&mut tape, &ids, &segments, Some(cache), options)?;
        let states = hidden.states.value();
        let mut last = self.device.zeros([tokens.len(), states.cols()], DType::F32)?;
        for (b, s) in segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
            self.device.backend().copy_rows(states, s.q_start + s.q_len - 1, &mut last, b, 1)?;
        }
        Ok(self.logits(&mut tape, &Var::constant(last))?.value().clone())
    }

    /// [`Model::decode`] of one token for each sequence, where the device does that as a whole.
    fn decode_step(
        &self,
        tape: &mut Tape<'_>,
        ids: &Tensor,
        segments: &Segments,
        cache: &mut Cache,
    ) -> Result<Option<Tensor>> {
        let single = segments.as_slice().iter().all(|s| s.q_len == 1);
        let shape = self.structure.blocks.first().and_then(Block::decode_shape);
        let Some(shape) = shape.filter(|_| single) else { return Ok(None) };
        let placed = cache.begin(segments)?;
        cache.reserve_one()?;
        let layers = self.structure.blocks.iter().zip(&mut cache.layers);
        let blocks = layers.map(|(block, state)| block.decode(&self.params, state));
        let Some(blocks) = blocks.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let table = self.params.var(self.structure.embeddings);
        let h = tape.embedding(&table, ids, self.config.untrained_token())?;
        let step = DecodeStep {
            h: h.value(),
            segments: &placed,
            shape,
            blocks,
            norm: self.params.value(self.structure.norm),
            head: self.params.value(self.structure.lm_head),
        };
        let Some(out) = self.device.backend().decode_step(step)? else { return Ok(None) };
        let gates = out.log_gates.as_ref().map(Tensor::to_f32).transpose()?.unwrap_or_default();
        let each = gates.len() / self.structure.blocks.len();
        for (l, (state, last)) in cache.layers.iter_mut().zip(out.last).enumerate() {
            state.stage(last, &gates[l * each..][..each]);
        }
        cache.commit(segments);
        Ok(Some(out.logits))
    }
}
