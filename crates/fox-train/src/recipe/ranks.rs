//! How a batch is divided among processes and parts, and how their gradients are added.

use serde::{Deserialize, Serialize};

use super::Recipe;
use crate::{Error, Result};

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
    /// Whether this many processes can share the batch.
    pub(crate) fn check_ranks(&self, ranks: usize) -> Result<()> {
        let (batch, micro) = (self.training.batch, self.micro_batch());
        let refuse =
            |detail: String| Err(Error::Ranks { origin: self.name.clone(), ranks, detail });
        if !batch.is_multiple_of(ranks) {
            return refuse(format!(
                "training.batch is {batch}; set it to a multiple of their number"
            ));
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
}
