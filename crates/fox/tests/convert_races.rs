//! Several `fox convert` at once into one folder: one wins with its own model, nothing is mixed or deleted.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use fox_model::{CheckpointReader, Model, ModelConfig, WriteOptions};
use fox_tensor::{Device, ParamId};

const WRITERS: usize = 3;

/// Models that differ in all weights.
fn models(folder: &Path) -> Vec<PathBuf> {
    let config = ModelConfig::fox_llama(32, 2, 2).with_vocab(64);
    let write = |seed: usize| {
        let path = folder.join(format!("model-{seed}"));
        let model = Model::init(&config, seed as u64, &Device::naive()).unwrap();
        model.save(&path, &WriteOptions::for_model(&config)).unwrap();
        path
    };
    (0..WRITERS).map(write).collect()
}

/// All weights of a checkpoint, one after the other.
fn weights(folder: &Path) -> Vec<f32> {
    let mut reader = CheckpointReader::open(folder).unwrap();
    let count = reader.specs().len();
    (0..count).flat_map(|i| reader.read(ParamId(i)).unwrap()).collect()
}

fn convert(from: &Path, to: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_fox"))
        .args(["convert", "--to", "fla", "--max-shard-size", "4KB"])
        .args([from, to])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn race(rounds: usize) {
    let folder = tempfile::tempdir().unwrap();
    let models = models(folder.path());
    let expected: Vec<Vec<f32>> = models.iter().map(|model| weights(model)).collect();
    for round in 0..rounds {
        let out = folder.path().join(format!("out-{round}"));
        // A folder of the user's with a name that fox might use.
        let own = folder.path().join(format!("out-{round}.partial"));
        fs::create_dir(&own).unwrap();
        fs::write(own.join("notes.txt"), "mine").unwrap();
        let writers: Vec<Child> = models.iter().map(|model| convert(model, &out)).collect();
        let mut winners = Vec::new();
        for (i, writer) in writers.into_iter().enumerate() {
            let output = writer.wait_with_output().unwrap();
            match output.status.success() {
                true => winners.push(i),
                false => {
                    let error = String::from_utf8(output.stderr).unwrap();
                    // The first of them when the winner is ready before this one starts.
                    let refused = ["not an empty folder", "not empty"];
                    assert!(refused.iter().any(|words| error.contains(words)), "{error}");
                }
            }
        }
        assert_eq!(winners.len(), 1, "round {round}");
        assert_eq!(weights(&out), expected[winners[0]], "round {round}: another model");
        assert_eq!(fs::read_to_string(own.join("notes.txt")).unwrap(), "mine");
        let left = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(left.is_empty(), "{left:?} left behind");
    }
}

#[test]
fn concurrent_converts_leave_one_complete_model() {
    race(6);
}

#[test]
#[ignore = "takes minutes: 200 races of 3 processes"]
fn concurrent_converts_leave_one_complete_model_200_times() {
    race(200);
}
