//! Input, events and result of a run.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use fox_data::Tokenizer;
use fox_model::Model;
use fox_tensor::Device;

use crate::metrics::{EvalRecord, StepRecord};
use crate::{Recipe, Summary};

/// What to train, and where.
#[derive(Clone, Debug)]
pub struct RunSpec {
    /// The recipe, with the path of the data in it.
    pub recipe: Recipe,
    /// The run folder: new, empty, or holding the same run, which is resumed.
    pub out: PathBuf,
    /// Where to compute.
    pub device: Device,
    /// The command line, for the record.
    pub command: Vec<String>,
}

/// What happens during a run.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Everything is open; steps follow.
    Started(&'a Start),
    /// Something that a user should read, in one line.
    Notice(&'a str),
    /// A step was made; every one is reported, whether it is written down or not.
    Step(&'a StepRecord),
    /// The held-out loss was measured.
    Evaluated(&'a EvalRecord),
    /// A checkpoint is on the disk.
    Checkpoint {
        /// Its step.
        step: u64,
        /// Its folder.
        path: &'a Path,
    },
    /// The Hugging Face folder is on the disk.
    Exported(&'a Path),
}

/// What is known when a run starts.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Name or file of the recipe.
    pub recipe: String,
    /// Number of parameters.
    pub parameters: usize,
    /// Steps in the whole run.
    pub steps: u64,
    /// Tokens in a step.
    pub tokens_per_step: u64,
    /// The step that the run resumes from; 0 for a new one.
    pub from_step: u64,
    /// FLOP/s of a plain matrix product on the device.
    pub gemm_rate: f64,
    /// Where it computes.
    pub device: String,
    /// Processes that work together.
    pub processes: usize,
    /// Bytes per second that each of them sends when all exchange tensors, where there are several.
    pub link: Option<f64>,
    /// How tensors travel between them.
    pub exchange: Option<String>,
    /// What the data are.
    pub data: String,
    /// Tokens of one epoch over prepared data; `None` for generated data and conversations.
    pub epoch_tokens: Option<u64>,
}

/// The callback of a run: it may stop it.
pub type Observer<'a> = dyn FnMut(&Event<'_>) -> ControlFlow<()> + 'a;

/// What a run leaves in memory; everything else is in its folder.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The trained model, with the weights that `evaluation.weights` names once the run is over.
    pub model: Model,
    /// The tokenizer that belongs to it, when it is known.
    pub tokenizer: Option<Tokenizer>,
    /// The figures of the run; `finished` is false when it was stopped.
    pub summary: Summary,
}
