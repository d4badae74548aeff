//! What the processes of a run must have in common.

use fox_dist::Group;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Result;

/// What the first process says, for all.
pub fn agree<T: Serialize + DeserializeOwned>(group: &Group, own: Option<T>) -> Result<Option<T>> {
    if group.size() == 1 {
        return Ok(own);
    }
    let text = serde_json::to_vec(&own).unwrap_or_default();
    Ok(serde_json::from_slice(&group.broadcast(0, &text)?).unwrap_or_default())
}
