//! Ranks as threads of one process, over real links.

use std::time::Duration;

use fox_dist::{Group, Invariant, Placement, Rendezvous, free_port};

pub fn placement(rank: usize, size: usize, port: u16) -> Placement {
    let host = "127.0.0.1".to_string();
    Placement { rank, size, local_rank: rank, local_size: size, host, port, launcher: "torchrun" }
}

pub fn rendezvous(recipe: &str) -> Rendezvous {
    let invariants = vec![
        Invariant { name: "version".into(), value: "1".into() },
        Invariant { name: "recipe".into(), value: recipe.into() },
    ];
    Rendezvous { invariants, limit: Duration::from_secs(60), secret: "secret".into() }
}

/// What each of `size` ranks comes to, run side by side.
#[allow(dead_code)] // not every test file starts groups
pub fn ranks<T: Send>(size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let port = free_port().unwrap();
    std::thread::scope(|scope| {
        let start = |rank| {
            let work = &work;
            scope.spawn(move || {
                work(Group::join(&placement(rank, size, port), &rendezvous("a")).unwrap())
            })
        };
        // The first comes last: the others must wait for it.
        let threads: Vec<_> = (0..size).rev().map(start).collect();
        let mut results: Vec<T> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        results.reverse();
        results
    })
}
