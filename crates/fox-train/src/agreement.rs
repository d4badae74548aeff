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

/// Everybody must read the same data.
pub fn check_same_data(group: &Group, identity: &str) -> Result<()> {
    let all = group.all_gather(identity.as_bytes())?;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(fox_dist::Error::Refused(format!(
        "rank {rank} has other data than rank 0 ({} and {}); give all ranks the same --data",
        name(&all[rank]),
        name(&all[0])
    ))
    .into())
}
