//! Training as one of several processes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use anyhow::Result;
use fox_dist::{Group, Placement};
use fox_train::Recipe;

use crate::ranks;

/// The processes that the environment names; this one alone without any.
pub fn join(placement: Option<&Placement>, recipe: &Recipe) -> Result<Arc<Group>> {
    let mut hash = DefaultHasher::new();
    // Where the data lie may differ from machine to machine; what they are is compared later.
    let mut recipe = recipe.clone();
    (recipe.data.path, recipe.data.heldout) = (None, None);
    recipe.to_toml()?.hash(&mut hash);
    let value = format!("{} {:016x}", recipe.name, hash.finish());
    ranks::join(placement, vec![ranks::invariant("recipe", value)])
}
