//! Several processes train one model: bit-exact with one process, and all end when one is lost.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{
    checkpoints, command, fox, metrics, recipe, result, run, stderr, succeeded, text, wait_until,
};
use fox_dist::free_port;

/// Eight micro-batches, so that up to eight ranks can divide a batch.
#[rustfmt::skip]
const TREE: [&str; 9] = [
    "--quiet", "--set", "training.batch=8", "--set", "training.micro_batch=1", "--set",
    "training.reduction=tree", "--set", "training.tokens=25600",
];

/// `fox launch` of `fox train`.
fn launch(ranks: usize, recipe: &Path, out: &Path, extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    let count = ranks.to_string();
    command.args(["launch", "--ranks", &count, "--", "train"]).arg(recipe);
    command.arg("--out").arg(out).args(["--device", "cpu"]).args(extra);
    command
}

/// One rank, started without `fox launch`.
fn rank(rank: usize, size: usize, port: u16, command: &mut Command) -> Child {
    command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn tree_reduction_matches_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    for optimizer in ["adamw", "muon"] {
        let name = format!("optimizer.name={optimizer}");
        let average = ["--set", "training.ema=0.9", "--set", "evaluation.weights=ema"];
        let extra = [&TREE[..], &["--set", &name], &average].concat();
        let alone = dir.path().join(format!("{optimizer}-alone"));
        succeeded(&run(&recipe, &alone, &[&["--device", "cpu"][..], &extra].concat()));
        for ranks in [2, 4] {
            let out = dir.path().join(format!("{optimizer}-{ranks}"));
            succeeded(&launch(ranks, &recipe, &out, &extra).output().unwrap());
            let same = metrics(&out).iter().zip(metrics(&alone)).all(|(a, b)| {
                // Pruned fractions are those of the rows of rank 0.
                a.0 == b.0 && a.1 == b.1 && a.2.split(' ').take(4).eq(b.2.split(' ').take(4))
            });
            assert!(same && metrics(&out).len() == metrics(&alone).len(), "{ranks} {optimizer}");
            assert!(result(&out) == result(&alone), "{ranks} processes, {optimizer}");
        }
    }
}

#[test]
fn overlapped_reduction_is_bit_exact() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let short =
        ["--quiet", "--set", "training.tokens=12800", "--set", "training.micro_batch=1", "--set"];
    let runs: Vec<_> =
        ["0", "1000", "20000"].map(|bucket| (bucket, dir.path().join(bucket))).into();
    for (bucket, out) in &runs {
        let bucket = format!("parallel.bucket={bucket}");
        let extra = [&short[..], &[&bucket]].concat();
        succeeded(&launch(2, &recipe, out, &extra).output().unwrap());
    }
    for (bucket, out) in &runs[1..] {
        assert!(result(&runs[0].1) == result(out), "buckets of {bucket} bytes");
    }
    let facts = std::fs::read_to_string(runs[0].1.join("run.json")).unwrap();
    let facts: serde_json::Value = serde_json::from_str(&facts).unwrap();
    assert_eq!(facts["starts"][0]["exchange"], "TCP, sent to the owner and added there");
}

/// Killed with four ranks, resumed with two, killed again, finished by one.
#[test]
fn resumes_on_other_world_size_after_lost_rank() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let whole = dir.path().join("whole");
    let on_cpu = [&["--device", "cpu"][..], &TREE].concat();
    succeeded(&run(&recipe, &whole, &on_cpu));
    let out = dir.path().join("torn");
    for (ranks, lost) in [(4, 2), (2, 0)] {
        let port = free_port().unwrap();
        let known = checkpoints(&out).pop();
        let mut children: Vec<Child> = (0..ranks)
            .map(|r| rank(r, ranks, port, &mut command(&recipe, &out, &on_cpu)))
            .collect();
        wait_until("they train", || checkpoints(&out).pop() > known);
        children[lost].kill().unwrap();
        let start = Instant::now();
        for (r, child) in children.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            if r != lost {
                assert_eq!(output.status.code(), Some(1), "rank {r} of {ranks}");
                let said = stderr(&output);
                assert_eq!(said.lines().count(), 1, "{said}");
                assert!(said.contains(&format!("rank {lost} is gone")), "{said}");
                assert!(said.contains("run the same command again"), "{said}");
            }
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
    succeeded(&run(&recipe, &out, &on_cpu));
    assert!(result(&out) == result(&whole));
}

/// The process of a rank that `fox launch` started.
#[cfg(target_os = "linux")]
fn process_of_rank(launch: &Child, rank: usize) -> Option<u32> {
    let (parent, variable) = (format!("PPid:\t{}\n", launch.id()), format!("RANK={rank}"));
    std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let environment = std::fs::read(entry.path().join("environ")).ok()?;
        let is_rank = environment.split(|&b| b == 0).any(|v| v == variable.as_bytes());
        (status.contains(&parent) && is_rank).then(|| entry.file_name().to_str()?.parse().ok())?
    })
}

#[cfg(target_os = "linux")]
#[test]
fn launch_restarts_after_lost_rank() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let whole = dir.path().join("whole");
    succeeded(&run(&recipe, &whole, &[&["--device", "cpu"][..], &TREE].concat()));
    let out = dir.path().join("torn");
    let mut launched = Command::new(env!("CARGO_BIN_EXE_fox"));
    launched.args(["launch", "--ranks", "4", "--restarts", "3", "--min-ranks", "2", "--", "train"]);
    launched.arg(&recipe).arg("--out").arg(&out).args(["--device", "cpu"]).args(TREE);
    let launched = launched.stderr(Stdio::piped()).spawn().unwrap();
    for lost in [2, 1] {
        let known = checkpoints(&out).pop();
        wait_until("they train", || checkpoints(&out).pop() > known);
        let process = process_of_rank(&launched, lost).unwrap().to_string();
        assert!(Command::new("kill").args(["-9", &process]).status().unwrap().success());
        let gone = Path::new("/proc").join(process);
        wait_until("the rank is gone", || !gone.exists());
    }
    let output = launched.wait_with_output().unwrap();
    succeeded(&output);
    let said = stderr(&output);
    for restart in ["restart 1 of 3 with 2 processes", "restart 2 of 3 with 2 processes"] {
        assert!(said.contains(restart), "{said}");
    }
    assert!(result(&out) == result(&whole));
    let refused =
        fox(&["launch", "--ranks", "2", "--min-ranks", "1", "--", "train", "tiny-fox-pro"]);
    assert!(stderr(&refused).contains("--min-ranks needs --restarts"), "{}", stderr(&refused));
    // An error of the command is reported once.
    let launch = ["launch", "--ranks", "2", "--restarts", "9", "--", "train", "tiny-fox-pro"];
    let wrong = fox(&[&launch[..], &["--set", "checkpoint.every=4"]].concat());
    assert_eq!(wrong.status.code(), Some(1));
    assert!(!stderr(&wrong).contains("restart 1"), "{}", stderr(&wrong));
}

#[test]
fn every_rank_reports_invalid_division() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let out = dir.path().join("out");
    let output = launch(3, &recipe, &out, &["--quiet"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    // Every rank reports the cause itself: none mistakes it for a lost rank.
    let own = "test.toml: 3 processes cannot share it: training.batch is 4; set it to a multiple of their number";
    assert_eq!(said.lines().filter(|line| line.ends_with(own)).count(), 3, "{said}");
    let tree = ["--quiet", "--set", "training.reduction=tree", "--set", "training.micro_batch=4"];
    let said = stderr(&launch(2, &recipe, &out, &tree).output().unwrap());
    assert!(said.contains("set training.micro_batch"), "{said}");
    assert!(!out.exists(), "nothing was written");

    let port = free_port().unwrap();
    let other = ["--set", "training.seed=7"];
    let first = rank(0, 2, port, &mut command(&recipe, &out, &[]));
    let second = rank(1, 2, port, &mut command(&recipe, &out, &other));
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(said.contains("rank 1 has another recipe than rank 0"), "{said}");
    }
    assert!(!out.exists(), "nothing was written");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = rank(0, 2, port, &mut command(&recipe, &out, &[])).wait_with_output().unwrap();
    let said = stderr(&output);
    assert!(said.contains("rank 0 cannot listen at 127.0.0.1:"), "{said}");
    let output = fox(&["launch", "--ranks", "2", "--", "demo"]);
    assert!(stderr(&output).contains("fox launch starts `train`"), "{}", stderr(&output));
}

/// Numbers of every line of metrics.jsonl of a kind.
fn numbers(out: &Path, kind: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["kind"] == kind).collect()
}

#[test]
fn context_parallel_matches_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let set = [
        "data.sequence_length=256",
        "training.tokens=20480",
        "training.gate_memory=[0.4, 1000.0]",
        "parallel.context=2",
    ];
    let shared: Vec<&str> =
        ["--quiet"].into_iter().chain(set.iter().flat_map(|set| ["--set", set])).collect();
    let alone = dir.path().join("alone");
    let one = [&["--device", "cpu"][..], &shared[..7]].concat();
    succeeded(&run(&recipe, &alone, &one));
    for ranks in [2, 4] {
        let out = dir.path().join(format!("ranks-{ranks}"));
        succeeded(&launch(ranks, &recipe, &out, &shared).output().unwrap());
        for kind in ["train", "eval"] {
            let (got, want) = (numbers(&out, kind), numbers(&alone, kind));
            assert!(got.len() == want.len() && !got.is_empty(), "{kind}");
            for (got, want) in got.iter().zip(&want) {
                let (a, b) = (got["loss"].as_f64().unwrap(), want["loss"].as_f64().unwrap());
                assert!((a / b - 1.0).abs() < 1e-4, "{ranks} ranks, {kind}: {a} {b}");
            }
        }
        let last = numbers(&out, "train").pop().unwrap();
        let layers = last["exchanged"].as_array().unwrap();
        assert_eq!(layers.len(), 2, "{last}");
        for layer in layers {
            // Keys, values and gates of the first half of every sequence, sent to the second rank.
            assert_eq!(layer[1].as_u64().unwrap(), 4 * 128 * (2 * 32 + 2) * 4);
            assert!(layer[0].as_u64().unwrap() < layer[1].as_u64().unwrap(), "{layer}");
        }
        assert!(numbers(&alone, "train")[0].get("exchanged").is_none());
    }
}

#[test]
fn rejects_models_without_context_parallelism() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    for (ranks, set, words) in [
        (
            1,
            vec![],
            "1 process cannot share it: parallel.context is 2; set it to a divisor of their number, or to 1 for whole sequences",
        ),
        (
            2,
            vec![],
            "2 processes cannot share it: data.sequence_length is 64; parts for parallel.context=2 need a multiple of 128",
        ),
        (
            2,
            vec![
                "data.sequence_length=128",
                "model.model_type=fox",
                "model.attention_weights=stick_breaking",
            ],
            "stick-breaking cannot be computed on parts of a sequence; set it to 1, and the processes share the batch",
        ),
    ] {
        let mut extra = vec!["--quiet", "--set", "parallel.context=2"];
        extra.extend(set.iter().flat_map(|set| ["--set", set]));
        let out = dir.path().join("refused");
        let output = launch(ranks, &recipe, &out, &extra).output().unwrap();
        assert!(!output.status.success());
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
        assert!(!out.exists(), "nothing is left behind");
    }
}

#[test]
fn sharded_evaluation_matches_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let model = dir.path().join("model");
    let short = ["--quiet", "--device", "cpu", "--set", "training.tokens=5120"];
    succeeded(&run(&recipe, &model, &short));
    let evaluate = |ranks: usize, documents: &str| {
        let out = dir.path().join(format!("eval-{ranks}"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        if ranks > 1 {
            command.args(["launch", "--ranks", &ranks.to_string(), "--"]);
        }
        command.args(["eval", "loss", text(&model), "--length", "64", "--documents", documents]);
        let output = command.arg("--out").arg(&out).args(["--device", "cpu", "--json"]).output();
        let output = output.unwrap();
        succeeded(&output);
        let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (printed, std::fs::read(out.join("loss.csv")).unwrap())
    };
    // 64 chunks of this length form a batch: the last rank gets a partial batch or none.
    for documents in ["150", "200"] {
        let alone = evaluate(1, documents);
        assert_eq!(alone.0[0]["pieces"], documents.parse::<u64>().unwrap(), "{}", alone.0);
        for ranks in [2, 3] {
            assert!(evaluate(ranks, documents) == alone, "{ranks} processes, {documents}");
        }
    }
    // Losses of other data or of another model are refused.
    let port = free_port().unwrap();
    let start = |(r, split): (usize, &str)| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        command.args(["eval", "loss", text(&model), "--length", "64", "--split", split]);
        command.arg("--out").arg(dir.path().join("mixed")).args(["--device", "cpu"]);
        rank(r, 2, port, &mut command)
    };
    let children: Vec<Child> = ["heldout", "train"].into_iter().enumerate().map(start).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(
            said.contains("rank 1 has another model or other data than rank 0 (model "),
            "{said}"
        );
    }
}

/// Every rank writes its range of a checkpoint, so all must see the folder.
#[test]
fn rejects_run_folder_missing_on_other_rank() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let outs = ["here", "elsewhere"].map(|name| dir.path().join(name));
    let (port, quiet) = (free_port().unwrap(), ["--quiet", "--device", "cpu"]);
    let start = |r: usize| rank(r, 2, port, &mut command(&recipe, &outs[r], &quiet));
    let children: Vec<Child> = (0..2).map(start).collect();
    let words =
        "which rank 0 has; give all ranks the same run folder on a file system that they share";
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(!output.status.success());
        let said = stderr(&output);
        assert!(said.contains("rank 1 does not find") && said.contains(words), "{said}");
    }
    assert!(checkpoints(&outs[0]).is_empty(), "no half checkpoint");
}
