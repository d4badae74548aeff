//! Recipes: everything that decides what a run computes, and how it is watched and kept.
//!
//! A recipe is a TOML file with the sections below, every key optional but `model`. It may extend
//! another (`extends = "fox-pro-125m"`), and a name may carry variants (`fox-pro-125m+rope`); see
//! [`load`]. `model` holds the fields of config.json, so every model that can be stored can be
//! trained.

mod builtin;
mod gate_init;
mod load;
mod model;
mod ranks;
mod schedule;
mod suggest;
mod typed;
mod validate;

use std::collections::BTreeMap;
use std::path::PathBuf;

use fox_data::task::TaskConfig;
use fox_data::{Layout, Order, SyntheticConfig};
use fox_model::{ForwardOptions, Pruning};
use serde::{Deserialize, Serialize};

pub use builtin::{
    BuiltinRecipe, Family, Variant, builtin_names, families, listed_names, variants,
};
pub(crate) use fox_base::nearest::nearest;
pub use gate_init::GateInit;
pub use load::{load, load_from, load_table, merge, parse_table};
pub use ranks::{Exchange, ParallelRecipe, Reduction, Shard};
pub use schedule::{ScheduleRecipe, Shape};
pub(crate) use typed::typed;

use crate::masking::MaskingRecipe;
use crate::messages::MessagesRecipe;
pub use crate::stages::StageRecipe;
use crate::{Error, OptimizerRecipe, Result};

/// A whole recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recipe {
    /// The file or name it came from, for messages and tables.
    #[serde(skip)]
    pub name: String,
    /// Sentences for the user about keys that were read under a former name.
    #[serde(skip)]
    pub notices: Vec<String>,
    /// One sentence about it.
    pub description: String,
    /// The fields of config.json. `vocab_size` comes from the data when it is not given.
    pub model: toml::Table,
    /// What is read.
    pub data: DataRecipe,
    /// How long, and in what portions.
    pub training: TrainingRecipe,
    /// How gradients change weights.
    pub optimizer: OptimizerRecipe,
    /// The learning rate over time.
    pub schedule: ScheduleRecipe,
    /// Held-out loss during training.
    pub evaluation: EvaluationRecipe,
    /// Checkpoints for resuming.
    pub checkpoints: CheckpointRecipe,
    /// Logging.
    pub metrics: MetricsRecipe,
    /// How several processes share the work.
    #[serde(skip_serializing_if = "ParallelRecipe::is_default")]
    pub parallel: ParallelRecipe,
}

/// What is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataRecipe {
    /// Prepared folder or Zarr array; a task or the embedded synthetic corpus without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Data to evaluate on; the held-out part of `path` without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heldout: Option<PathBuf>,
    /// Name or file of the tokenizer; data made by another one are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Tokens in a sequence.
    pub sequence_length: usize,
    /// Shorter sequences that come first, each length for so many tokens; a step has the same tokens throughout.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageRecipe>,
    /// How sequences are cut from documents.
    pub layout: Layout,
    /// `shuffled`, `sequential` or `longcrawl64`.
    pub order: OrderName,
    /// Seed of the shuffled order.
    pub shuffle_seed: u64,
    /// Passes over the data; repeated for ever without a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// The synthetic corpus, used when there is neither a path nor a task.
    pub synthetic: SyntheticConfig,
    /// A small task, whose answers alone have a loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskConfig>,
    /// Conversations, whose answers alone have a loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<MessagesRecipe>,
}

impl Default for DataRecipe {
    fn default() -> Self {
        DataRecipe {
            path: None,
            heldout: None,
            tokenizer: None,
            sequence_length: 512,
            stages: Vec::new(),
            layout: Layout::Windows,
            order: OrderName::Shuffled,
            shuffle_seed: 0,
            epochs: None,
            synthetic: SyntheticConfig::default(),
            task: None,
            messages: None,
        }
    }
}

impl DataRecipe {
    /// Whether the embedded synthetic corpus is read.
    pub fn is_synthetic(&self) -> bool {
        self.path.is_none() && self.task.is_none() && self.messages.is_none()
    }

    /// The loader's order.
    pub(crate) fn loader_order(&self) -> Order {
        match self.order {
            OrderName::Shuffled => Order::Shuffled { seed: self.shuffle_seed },
            OrderName::Sequential => Order::Sequential,
            OrderName::LongCrawl64 => Order::LongCrawl64,
        }
    }
}

/// In which order sequences come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OrderName {
    /// Every sequence once per pass, in a random order.
    Shuffled,
    /// As stored.
    Sequential,
    /// The published order: first windows of all documents first.
    LongCrawl64,
}

/// How long, and in what portions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingRecipe {
    /// Tokens in all; the last step may go beyond.
    pub tokens: u64,
    /// Sequences in a step.
    pub batch: usize,
    /// Sequences in memory at once; the whole batch without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Seed of the initial weights.
    pub seed: u64,
    /// Checkpoint to begin with instead of random weights: a Hugging Face folder, or a run folder. Its model is that of
    /// a recipe without a table `[model]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    /// What is trained: `gates`, `attention`, `mlp`, `norms`, `embedding`, `head`, `all`, or patterns on names such as
    /// `model.layers.3.*`. Everything without it; the rest has no gradient and no state of the optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<Vec<String>>,
    /// Factors on the learning rate by word or pattern, e.g. `{ gates = 10.0 }`; they multiply.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rates: BTreeMap<String, f64>,
    /// Weight, from 0 to 1, of the divergence from the model of `init` as it was, against the loss of the labels;
    /// nothing is distilled without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distill: Option<f64>,
    /// Tokens after which RoPE begins to fade and after which it is gone; its angles shrink linearly between.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_fade: Option<[u64; 2]>,
    /// Initial decay times of data-dependent forget gates: `"published"`, `"spread"` or `[shortest, longest]`.
    pub gate_init: GateInit,
    /// Probability with which elements of the embeddings and of what every mixer and MLP adds to the residual stream are
    /// set to 0 in training, for a text that is read several times.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropout: f32,
    /// Which tokens an encoder must predict; only for encoders, which have the defaults without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masking: Option<MaskingRecipe>,
    /// Drop activations and compute them again in the backward pass.
    pub recompute: bool,
    /// Attention blocks that may be skipped.
    pub pruning: PruningRecipe,
    /// Stop after this many steps in a row whose gradient is not finite.
    pub max_skips: u64,
    /// How the gradients of the parts of a batch are added: `running`, or `tree`, whose bits do not depend on the
    /// number of processes, as long as that is a power of two.
    #[serde(skip_serializing_if = "Reduction::is_default")]
    pub reduction: Reduction,
    /// Decay of an exponential moving average of the weights, e.g. 0.999; no average without it. Checkpoints
    /// keep it; `evaluation.weights` says whether it is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema: Option<f64>,
}

impl Default for TrainingRecipe {
    fn default() -> Self {
        TrainingRecipe {
            tokens: 1 << 20,
            batch: 8,
            micro_batch: None,
            seed: 0,
            init: None,
            train: None,
            rates: BTreeMap::new(),
            distill: None,
            rope_fade: None,
            gate_init: GateInit::Published,
            dropout: 0.0,
            masking: None,
            recompute: false,
            pruning: PruningRecipe::Word(PruningWord::Config),
            max_skips: 10,
            reduction: Reduction::default(),
            ema: None,
        }
    }
}

/// Whether a run computes the same without the key; recipes of older versions then stay as they were.
fn is_zero(rate: &f32) -> bool {
    *rate == 0.0
}

/// Adaptive computation pruning: a word, or the tolerance itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PruningRecipe {
    /// `config`, `off` or `auto`.
    Word(PruningWord),
    /// Natural log of the softmax mass that may be dropped.
    Tolerance(f32),
}

/// Named settings of the pruning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PruningWord {
    /// As `model.log_pruning_tolerance` says.
    Config,
    /// Never.
    Off,
    /// With a tolerance of -10 and a bound from norms.
    Auto,
}

/// Held-out loss during training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationRecipe {
    /// Steps between evaluations; 0 for only one, at the end.
    pub every: u64,
    /// Sequences to evaluate on; 0 for no evaluation at all.
    pub sequences: usize,
    /// Tokens in a sequence; as in training without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Which weights are evaluated and, at the end, exported.
    pub weights: Weights,
}

/// Weights of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// As the last step left them.
    #[default]
    Raw,
    /// Their average, which `training.ema` asks for.
    Ema,
}

impl Default for EvaluationRecipe {
    fn default() -> Self {
        EvaluationRecipe { every: 100, sequences: 16, length: None, weights: Weights::Raw }
    }
}

/// Checkpoints for resuming.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointRecipe {
    /// Steps between checkpoints; 0 for only one, at the end.
    pub every: u64,
    /// How many of the newest are kept, at least 1.
    pub keep: usize,
    /// Checkpoints of steps that this divides are kept for good; 0 for none.
    pub keep_every: u64,
}

impl Default for CheckpointRecipe {
    fn default() -> Self {
        CheckpointRecipe { every: 100, keep: 2, keep_every: 0 }
    }
}

/// Logging.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsRecipe {
    /// Steps between lines of metrics.jsonl.
    pub every: u64,
    /// Steps between lines that also have pruned fractions and gate half-lives; 0 for never.
    pub details_every: u64,
    /// Whether timeline.json gets the times of all ops of one step, and of what travelled between processes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub timeline: bool,
}

impl Default for MetricsRecipe {
    fn default() -> Self {
        MetricsRecipe { every: 1, details_every: 50, timeline: false }
    }
}

impl Recipe {
    /// Tokens in a step.
    pub fn tokens_per_step(&self) -> u64 {
        self.training.batch as u64 * self.data.sequence_length as u64
    }

    /// Steps in the whole run.
    pub fn steps(&self) -> u64 {
        self.training.tokens.div_ceil(self.tokens_per_step())
    }

    /// Sequences in memory at once.
    pub fn micro_batch(&self) -> usize {
        self.training.micro_batch.unwrap_or(self.training.batch).min(self.training.batch)
    }

    /// How the model is run in training.
    pub fn forward_options(&self) -> ForwardOptions {
        let pruning = match self.training.pruning {
            PruningRecipe::Word(PruningWord::Config) => Pruning::Config,
            PruningRecipe::Word(PruningWord::Off) => Pruning::Off,
            PruningRecipe::Word(PruningWord::Auto) => Pruning::Auto,
            PruningRecipe::Tolerance(tolerance) => Pruning::Tolerance(tolerance),
        };
        ForwardOptions { pruning, recompute: self.training.recompute, ..Default::default() }
    }

    /// The recipe as TOML, every default written out.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string_pretty(self).map_err(|e| Error::Encode {
            path: PathBuf::from(&self.name),
            format: "TOML",
            detail: e.to_string(),
        })
    }
}
