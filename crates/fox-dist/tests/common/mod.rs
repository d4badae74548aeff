//! Ranks as threads of one process, over real links.

use std::time::Duration;

use fox_dist::{Fact, Group, Meeting, Placement, free_port};

pub fn placement(rank: usize, size: usize, port: u16) -> Placement {
    let host = "127.0.0.1".to_string();
    Placement { rank, size, local_rank: rank, local_size: size, host, port, launcher: "torchrun" }
}

pub fn meeting(recipe: &str) -> Meeting {
    let facts = vec![
        Fact { name: "version".into(), value: "1".into() },
        Fact { name: "recipe".into(), value: recipe.into() },
    ];
    Meeting { facts, limit: Duration::from_secs(60) }
}

/// What each of `size` ranks comes to, run side by side.
pub fn ranks<T: Send>(size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let port = free_port().unwrap();
    std::thread::scope(|scope| {
        let start = |rank| {
            let work = &work;
            scope.spawn(move || {
                work(Group::meet(&placement(rank, size, port), &meeting("a")).unwrap())
            })
        };
        // The first comes last: the others must wait for it.
        let threads: Vec<_> = (0..size).rev().map(start).collect();
        let mut results: Vec<T> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        results.reverse();
        results
    })
}
