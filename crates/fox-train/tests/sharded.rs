//! Weights in shards (ZeRO stage 3): the bits and the checkpoints of replicated weights, and memory as planned. Ranks are
//! threads of one process, over TCP.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fox_dist::{Group, Placement, Rendezvous, free_port};
use fox_train::cluster::{Cluster, ClusterPlan};
use fox_train::data::RunData;
use fox_train::{Event, Recipe, Result, RunSpec, recipe, train_in};

const SHORT: [&str; 9] = [
    "data.sequence_length=32",
    "training.batch=12",
    "training.tokens=1536",
    "schedule.warmup_tokens=0",
    "evaluation.every=2",
    "evaluation.sequences=5",
    "evaluation.length=32",
    "checkpoints.every=2",
    "metrics.details_every=3",
];
const WEIGHTS: &str = "parallel.shard=\"weights\"";

fn load(name: &str, set: &[&str]) -> Recipe {
    let set: Vec<String> = SHORT.iter().chain(set).map(ToString::to_string).collect();
    recipe::load(name, &set).unwrap()
}

/// Every rank's outcome: the peak of its device's memory. `stop` asks all ranks to stop after this step.
fn train(recipe: &Recipe, ranks: usize, out: &Path, stop: Option<u64>) -> Vec<Result<usize>> {
    let port = free_port().unwrap();
    let run = |rank: usize| {
        let (host, launcher) = ("127.0.0.1".into(), "torchrun");
        let place = Placement {
            rank,
            size: ranks,
            local_rank: rank,
            local_size: ranks,
            host,
            port,
            launcher,
        };
        let rendezvous = Rendezvous { limit: Duration::from_secs(60), ..Rendezvous::default() };
        let group = Arc::new(Group::join(&place, &rendezvous).unwrap());
        let device = fox_cpu::device();
        let spec = RunSpec {
            recipe: recipe.clone(),
            out: out.to_path_buf(),
            device: device.clone(),
            command: Vec::new(),
        };
        train_in(&spec, &group, &mut |event| match event {
            Event::Step(step) if Some(step.step) == stop => ControlFlow::Break(()),
            Event::Started(_) => {
                // The speed of the device is measured before, which takes memory, too.
                device.reset_peak();
                ControlFlow::Continue(())
            }
            _ => ControlFlow::Continue(()),
        })?;
        Ok(device.memory().peak)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All weights and states of the optimizer that a run has written, by file.
fn written(out: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![out.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|e| e == "safetensors") => {
                    let name = path.strip_prefix(out).unwrap().to_path_buf();
                    found.push((name, std::fs::read(&path).unwrap()));
                }
                false => {}
            }
        }
    }
    found.sort();
    found
}

/// Losses, norms and half-lives, without times and memory.
fn figures(out: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let all: serde_json::Value = serde_json::from_str(line).unwrap();
        ["step", "loss", "grad_norm", "pruned", "half_lives", "evaluation"]
            .map(|key| all[key].to_string())
            .join(" ")
    };
    text.lines().map(line).collect()
}

fn assert_same(a: &Path, b: &Path, what: &str) {
    let (left, right) = (written(a), written(b));
    let names = |files: &[(PathBuf, Vec<u8>)]| -> Vec<PathBuf> {
        files.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&left), names(&right), "{what}");
    assert!(left.len() >= 3, "{what}: checkpoints and an export");
    for ((name, a), (_, b)) in left.iter().zip(&right) {
        assert!(a == b, "{what}: {} has other bytes", name.display());
    }
}

fn unwrap(outcomes: Vec<Result<usize>>) -> Vec<usize> {
    outcomes.into_iter().map(|outcome| outcome.unwrap()).collect()
}

/// Several models and ways to add gradients. Three ranks and widths of 72 and 152 divide nothing evenly.
#[test]
fn sharded_weights_have_replicated_bits() {
    let recomputed =
        ["model.num_hidden_layers=2", "training.micro_batch=3", "training.recompute=true"];
    let tree = [
        "model.num_hidden_layers=2",
        "training.batch=8",
        "training.tokens=1024",
        "training.micro_batch=1",
        "training.reduction=tree",
    ];
    let muon = [
        "model.hidden_size=72",
        "model.num_heads=3",
        "model.intermediate_size=152",
        "optimizer.name=\"muon\"",
        "training.ema=0.9",
        "evaluation.weights=\"ema\"",
    ];
    let late = ["parallel.bucket=0", "training.train=[\"attention\", \"head\"]"];
    let context = [
        "parallel.context=2",
        "data.sequence_length=128",
        "training.batch=4",
        "training.tokens=2048",
    ];
    let cases: [(&str, &str, usize, &[&str]); 5] = [
        ("recomputation and accumulation", "tiny-fox-pro", 2, &recomputed),
        ("tree", "tiny-fox-pro", 4, &tree),
        ("Muon, an average and uneven widths", "tiny-fox-pro", 3, &muon),
        ("hybrid, frozen parameters, late sums", "tiny-hybrid", 2, &late),
        ("divided sequences", "tiny-fox-pro", 4, &context),
    ];
    for (what, name, ranks, set) in cases {
        let dir = tempfile::tempdir().unwrap();
        let [replicated, sharded] = ["replicated", "sharded"].map(|name| dir.path().join(name));
        unwrap(train(&load(name, set), ranks, &replicated, None));
        unwrap(train(&load(name, &[set, &[WEIGHTS]].concat()), ranks, &sharded, None));
        assert_same(&replicated, &sharded, what);
        assert_eq!(figures(&replicated), figures(&sharded), "{what}");
    }
}

#[test]
fn runs_resume_with_another_sharding() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["model.num_hidden_layers=2"];
    let (replicated, sharded) =
        (load("tiny-fox-pro", &set), load("tiny-fox-pro", &[&set[..], &[WEIGHTS]].concat()));
    let whole = dir.path().join("whole");
    unwrap(train(&replicated, 2, &whole, None));
    for (what, first, second) in
        [("to shards", &replicated, &sharded), ("from shards", &sharded, &replicated)]
    {
        let out = dir.path().join(what);
        unwrap(train(first, 2, &out, Some(2)));
        unwrap(train(second, 2, &out, None));
        let last = |folder: &Path| {
            let files = written(folder);
            let export = |(name, _): &(PathBuf, Vec<u8>)| name.starts_with("export");
            files.into_iter().filter(export).collect::<Vec<_>>()
        };
        assert!(last(&whole) == last(&out), "{what}");
        assert!(!last(&out).is_empty());
    }
}

/// A rank that ends in the middle of a step ends the others with the reason, and the run resumes to the same bits.
#[test]
fn lost_rank_ends_sharded_run() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    let recipe = load("tiny-fox-pro", &["model.num_hidden_layers=1", WEIGHTS]);
    unwrap(train(&recipe, 2, &whole, None));
    let port = free_port().unwrap();
    let run = |rank: usize| {
        let (host, launcher) = ("127.0.0.1".into(), "torchrun");
        let (size, local_rank, local_size) = (2, rank, 2);
        let place = Placement { rank, size, local_rank, local_size, host, port, launcher };
        let rendezvous = Rendezvous { limit: Duration::from_secs(60), ..Rendezvous::default() };
        let group = Arc::new(Group::join(&place, &rendezvous).unwrap());
        let (recipe, out) = (recipe.clone(), out.clone());
        let spec = RunSpec { recipe, out, device: fox_cpu::device(), command: Vec::new() };
        train_in(&spec, &group, &mut |event| {
            if let (1, Event::Step(step)) = (rank, event)
                && step.step == 2
            {
                group.fail("no more power");
            }
            ControlFlow::Continue(())
        })
    };
    std::thread::scope(|scope| {
        let one = scope.spawn(|| run(1));
        let error = run(0).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 failed: no more power"), "{error}");
        assert!(one.join().unwrap().is_err());
    });
    unwrap(train(&recipe, 2, &out, None));
    assert_same(&whole, &out, "resumed");
}

/// The pool's peak at the rank that needs the most, where weights outweigh activations.
#[test]
fn peak_memory_is_as_planned() {
    let set = [
        "model.hidden_size=256",
        "model.intermediate_size=704",
        "model.num_hidden_layers=6",
        "model.num_heads=4",
        "model.vocab_size=2048",
        "training.batch=4",
        "training.tokens=512",
        "evaluation.sequences=0",
        "checkpoints.every=0",
        "metrics.details_every=0",
    ];
    let mut peaks = Vec::new();
    for (shard, more) in [
        ("optimizer", &[][..]),
        ("optimizer, recomputed", &["training.recompute=true"][..]),
        ("optimizer, accumulated", &["training.micro_batch=1"][..]),
        (
            "optimizer, accumulated as a tree",
            &["training.micro_batch=1", "training.reduction=\"tree\""][..],
        ),
        ("weights", &[WEIGHTS][..]),
        ("weights, recomputed", &[WEIGHTS, "training.recompute=true"][..]),
        ("weights, accumulated", &[WEIGHTS, "training.micro_batch=1"][..]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let recipe = load("tiny-fox-pro", &[&set[..], more].concat());
        let ranks = if shard.contains("accumulated") { 2 } else { 4 };
        let measured = unwrap(train(&recipe, ranks, &dir.path().join("run"), None));
        let config = recipe.model_config(RunData::open(&recipe).unwrap().train.vocab_size());
        let cluster = Cluster {
            gpus: ranks,
            nodes: 1,
            link: 1e9,
            network: 1e9,
            rate: 1e9,
            fetched: 1.0,
            visited: 1.0,
            narrow: false,
        };
        let planned = ClusterPlan::new(&recipe, &config.unwrap(), &cluster).unwrap().memory;
        let measured = *measured.iter().max().unwrap() as f64;
        println!("{shard}: {measured} measured, {planned} planned, {:.3}", planned / measured);
        peaks.push((shard, planned / measured));
    }
    for (shard, ratio) in peaks {
        assert!((ratio - 1.0).abs() < 0.05, "{shard}: planned / measured is {ratio}");
    }
}
