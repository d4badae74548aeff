//! How a batch is divided among processes and parts, and how their gradients are added.

use fox_model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::Recipe;
use crate::{Error, Result};

/// Parts of a sequence are whole blocks of attention, so that their results have the bits of one process.
const BLOCK: usize = 64;

/// Enough for the full speed of a link, and few enough that the last bucket, which nothing hides, is short.
const BUCKET: usize = 32 << 20;

/// How several processes share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelRecipe {
    /// Processes that share a sequence: each holds as many successive tokens of it. The others share the batch.
    pub context: usize,
    /// What every process keeps only a part of.
    pub shard: Shard,
    /// How tensors travel between GPUs.
    pub exchange: Exchange,
    /// How earlier keys and states of shared sequences travel; between devices only where all tensors do.
    pub keys: Exchange,
    /// Bytes of complete gradients that are summed over the processes at once, overlapped with the backward pass; 0: all
    /// are summed after it. The sums have the same bits.
    pub bucket: usize,
}

impl Default for ParallelRecipe {
    fn default() -> Self {
        let (shard, exchange) = (Shard::Optimizer, Exchange::Device);
        ParallelRecipe { context: 1, shard, exchange, keys: exchange, bucket: BUCKET }
    }
}

/// What is divided among the processes, by parameter. The bits of a run and its checkpoints do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// The state of the optimizer (ZeRO stage 1): every process has all weights and gradients.
    #[default]
    Optimizer,
    /// Also gradients and weights (ZeRO stage 3): weights are gathered block by block in every pass.
    Weights,
}

/// How tensors travel between the GPUs of several processes. Between CPUs there is only the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// From GPU to GPU, over NCCL.
    #[default]
    Device,
    /// Through the memory of the host, over TCP.
    Host,
}

impl ParallelRecipe {
    pub(super) fn is_default(&self) -> bool {
        *self == ParallelRecipe::default()
    }
}

/// How the gradients of the parts of a batch (`training.micro_batch` rows each) are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// One after the other within a process, then over the processes.
    #[default]
    Running,
    /// As a binary tree over all parts: the same bits for 1, 2, 4 ... processes, for one more copy of the gradients
    /// per level of the tree.
    Tree,
}

impl Reduction {
    pub(super) fn is_default(&self) -> bool {
        *self == Reduction::default()
    }
}

impl Recipe {
    /// Whether this many processes can share the work.
    ///
    /// # Errors
    /// What does not fit, and what would.
    pub fn check_ranks(&self, ranks: usize) -> Result<()> {
        let (batch, micro) = (self.training.batch, self.micro_batch());
        let refuse =
            |detail: String| Err(Error::Ranks { origin: self.name.clone(), ranks, detail });
        let (context, length) = (self.parallel.context, self.data.sequence_length);
        if context == 0 || !ranks.is_multiple_of(context) {
            return refuse(format!(
                "parallel.context is {context}; set it to a divisor of their number, or to 1 for whole sequences"
            ));
        }
        if context > 1 && !length.is_multiple_of(context * BLOCK) {
            return refuse(format!(
                "data.sequence_length is {length}; parts for parallel.context={context} need a multiple of {}",
                context * BLOCK
            ));
        }
        // As many processes share the batch.
        let ranks = ranks / context;
        if !batch.is_multiple_of(ranks) {
            return refuse(match context {
                1 => format!("training.batch is {batch}; set it to a multiple of their number"),
                _ => format!(
                    "training.batch is {batch}; with parallel.context={context} set it to a multiple of {ranks}"
                ),
            });
        }
        if self.training.reduction == Reduction::Tree {
            let parts = batch / micro;
            if !batch.is_multiple_of(micro)
                || !parts.is_power_of_two()
                || !parts.is_multiple_of(ranks)
            {
                return refuse(format!(
                    "training.reduction=\"tree\" needs batch / micro_batch ({batch} / {micro}) to be a power of two and a multiple of their number; set training.micro_batch"
                ));
            }
        }
        Ok(())
    }

    /// Whether every layer can work on a part of a sequence, where it must.
    pub(crate) fn check_context(&self, config: &ModelConfig) -> Result<()> {
        let context = self.parallel.context;
        let mixers = (0..config.num_layers).map(|layer| config.mixer_of(layer));
        let unfit = mixers.into_iter().find(|mixer| !mixer.continues_sequences());
        match unfit.filter(|_| context > 1) {
            None => Ok(()),
            Some(mixer) => Err(Error::value(
                &self.name,
                "parallel.context",
                format!(
                    "is {context}, but {} cannot be computed on parts of a sequence; set it to 1, and the processes share the batch",
                    mixer.name()
                ),
            )),
        }
    }
}
