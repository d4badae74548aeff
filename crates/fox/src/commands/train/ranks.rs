//! Training as one of several processes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use fox_dist::{Fact, Group, Meeting, Placement};
use fox_train::Recipe;

/// How long the processes wait for each other, unless FOX_MEETING_SECONDS says otherwise.
const LIMIT: u64 = 120;

/// The processes that the environment names; this one alone without any.
pub fn meet(placement: Option<&Placement>, recipe: &Recipe) -> Result<Arc<Group>> {
    let Some(placement) = placement else { return Ok(Arc::new(Group::alone())) };
    let seconds = match std::env::var("FOX_MEETING_SECONDS") {
        Err(_) => LIMIT,
        Ok(text) => text
            .parse()
            .with_context(|| format!("FOX_MEETING_SECONDS is `{text}`, not a number of seconds"))?,
    };
    let mut hash = DefaultHasher::new();
    // Where the data lie may differ from machine to machine; what they are is compared later.
    let mut recipe = recipe.clone();
    (recipe.data.path, recipe.data.heldout) = (None, None);
    recipe.to_toml()?.hash(&mut hash);
    let fact = |name: &str, value: String| Fact { name: name.into(), value };
    let facts = vec![
        fact("version", env!("CARGO_PKG_VERSION").to_string()),
        fact("recipe", format!("{} {:016x}", recipe.name, hash.finish())),
    ];
    let meeting = Meeting { facts, limit: Duration::from_secs(seconds) };
    Ok(Arc::new(Group::meet(placement, &meeting)?))
}
