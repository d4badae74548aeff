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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fox_dist::{Meeting, Placement, free_port};

    use super::*;

    /// What two ranks that read these data say.
    fn two(data: [&str; 2]) -> [Result<()>; 2] {
        let port = free_port().unwrap();
        let meet = |rank: usize| {
            let (host, launcher) = ("127.0.0.1".to_string(), "test");
            let placement =
                Placement { rank, size: 2, local_rank: rank, local_size: 2, host, port, launcher };
            let meeting = Meeting { facts: Vec::new(), limit: Duration::from_secs(60) };
            let group = Group::meet(&placement, &meeting).unwrap();
            let checked = check_same_data(&group, data[rank]);
            group.leave().unwrap();
            checked
        };
        std::thread::scope(|scope| {
            [0, 1].map(|rank| scope.spawn(move || meet(rank))).map(|rank| rank.join().unwrap())
        })
    }

    #[test]
    fn ranks_with_other_data_say_so() {
        assert!(two(["shards 1", "shards 1"]).iter().all(Result::is_ok));
        for said in two(["shards 1", "shards 2"]) {
            let words = "rank 1 has other data than rank 0 (shards 2 and shards 1)";
            assert!(said.unwrap_err().to_string().contains(words));
        }
    }
}
