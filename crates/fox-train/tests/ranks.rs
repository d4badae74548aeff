//! Ranks as threads of one process: they stop together, and each names what it cannot write or find.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use fox_dist::{Group, Placement, Rendezvous, free_port};
use fox_train::{Event, Outcome, Result, RunSpec, recipe, train_in};

/// Two ranks that have met.
fn pair() -> [Arc<Group>; 2] {
    let port = free_port().unwrap();
    let meet = |rank: usize| {
        let (host, launcher) = ("127.0.0.1".into(), "torchrun");
        let (size, local_rank, local_size) = (2, rank, 2);
        let place = Placement { rank, size, local_rank, local_size, host, port, launcher };
        let rendezvous = Rendezvous { limit: Duration::from_secs(60), ..Rendezvous::default() };
        Arc::new(Group::join(&place, &rendezvous).unwrap())
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(move || meet(1));
        [meet(0), second.join().unwrap()]
    })
}

/// Ten steps; an evaluation after every second one, a checkpoint after every third.
fn spec(out: &Path) -> RunSpec {
    let set = [
        "data.sequence_length=32",
        "training.batch=2",
        "training.tokens=640",
        "schedule.warmup_tokens=0",
        "evaluation.every=2",
        "evaluation.sequences=2",
        "evaluation.length=32",
        "checkpoints.every=3",
        "model.num_hidden_layers=1",
    ];
    let recipe = recipe::load("tiny-fox-pro", &set.map(String::from)).unwrap();
    RunSpec { recipe, out: out.to_path_buf(), device: fox_cpu::device(), command: Vec::new() }
}

/// What two ranks come to that train in these folders; `stops` says of an event whether the rank is asked to stop.
fn train(
    outs: [&Path; 2],
    stops: impl Fn(usize, &Event<'_>) -> bool + Sync,
) -> [Result<Outcome>; 2] {
    let groups = pair();
    let (say, hear) = channel();
    std::thread::scope(|scope| {
        for (rank, (group, out)) in groups.iter().zip(outs).enumerate() {
            let (say, stops) = (say.clone(), &stops);
            scope.spawn(move || {
                let outcome = train_in(&spec(out), group, &mut |event| match stops(rank, event) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                });
                say.send((rank, outcome)).unwrap();
            });
        }
        let next = || {
            let limit = Duration::from_secs(120);
            // A deadlock would last for ever.
            hear.recv_timeout(limit).inspect_err(|_| groups[0].fail("deadlock")).unwrap()
        };
        let mut outcomes = [next(), next()];
        outcomes.sort_by_key(|(rank, _)| *rank);
        outcomes.map(|(_, outcome)| outcome)
    })
}

/// Whatever a rank is doing when it alone is asked.
#[test]
fn stop_request_stops_all_ranks_after_same_step() {
    let is = |what: &str, event: &Event<'_>| match event {
        Event::Started(_) => what == "start",
        Event::Step(_) => what == "step",
        Event::Evaluated(_) => what == "evaluation",
        Event::Checkpoint { .. } => what == "checkpoint",
        _ => false,
    };
    for asked in 0..2 {
        for (what, steps) in [("start", 0), ("step", 1), ("evaluation", 2), ("checkpoint", 3)] {
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("run");
            for outcome in train([&out, &out], |rank, event| rank == asked && is(what, event)) {
                let summary = outcome.unwrap().summary;
                assert_eq!((summary.steps, summary.finished), (steps, false), "{asked} at {what}");
            }
            let kept = out.join(format!("checkpoints/step-{steps:08}"));
            assert_eq!(kept.is_dir(), steps > 0, "rank {asked} at the {what}");
        }
    }
}

#[cfg(unix)]
#[test]
fn write_failure_names_last_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let [here, there] = ["here", "there"].map(|name| dir.path().join(name));
    // The second rank sees the folder of the first checkpoint, and one without the file of the next.
    let first = "checkpoints/step-00000003.partial";
    std::fs::create_dir_all(there.join("checkpoints/step-00000006.partial")).unwrap();
    std::os::unix::fs::symlink(here.join(first), there.join(first)).unwrap();
    let [zero, one] = train([&here, &there], |_, _| false).map(|o| o.unwrap_err().to_string());
    let words = "cannot write the checkpoint of step 6 (";
    assert!(one.starts_with(words), "{one}");
    assert!(one.contains("; the checkpoint of step 3 is whole, free some space"), "{one}");
    assert!(zero.starts_with(&format!("rank 1 failed: {words}")), "{zero}");
}

#[test]
fn rejects_checkpoint_folder_that_is_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let [here, there] = ["here", "there"].map(|name| dir.path().join(name));
    for outcome in train([&here, &here], |_, event| matches!(event, Event::Step(_))) {
        outcome.unwrap();
    }
    let [zero, one] = train([&here, &there], |_, _| false).map(|o| o.unwrap_err().to_string());
    let words =
        "which rank 0 has; give all ranks the same run folder on a file system that they share";
    assert!(one.starts_with("rank 1 does not find ") && one.ends_with(words), "{one}");
    assert!(zero.starts_with("rank 1 failed: rank 1 does not find"), "{zero}");
}
