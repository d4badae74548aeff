//! Tolerances of pruning and eviction are logarithms of fractions: values that are not negative are refused wherever
//! they can be given.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::process::{Command, Output};

fn fox(args: &[String]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox")).args(args).output().unwrap()
}

/// Commands and the flag that takes a tolerance, the value to follow.
const FLAGS: [&[&str]; 6] = [
    &["bench", "attention", "--acp="],
    &["bench", "train", "--acp="],
    &["bench", "decode", "nowhere", "--eviction="],
    &["generate", "nowhere", "--eviction="],
    &["serve", "nowhere", "--eviction="],
    &["inspect", "nowhere", "--log-pruning-tolerance="],
];

/// The same for keys of a recipe.
const KEYS: [&str; 2] = ["training.pruning", "model.log_pruning_tolerance"];

#[test]
fn rejects_invalid_pruning_tolerance() {
    let folder = tempfile::tempdir().unwrap();
    for value in ["10000", "0.5", "0", "nan", "inf"] {
        for flag in FLAGS {
            let mut args: Vec<String> = flag.iter().map(|arg| arg.to_string()).collect();
            args.last_mut().unwrap().push_str(value);
            let output = fox(&args);
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
            assert!(said.contains("a negative number") && said.contains(value), "{args:?}: {said}");
        }
        for key in KEYS {
            let out = folder.path().join("run");
            let set = format!("{key}={value}");
            let args = ["train", "tiny-fox-pro", "--out", out.to_str().unwrap(), "--set", &set];
            let output = fox(&args.map(String::from));
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{set}: {said}");
            assert!(said.contains("negative") && said.lines().count() == 1, "{set}: {said}");
            assert!(!out.exists(), "{set}");
        }
    }
}

#[test]
fn rejects_checkpoint_with_invalid_tolerance() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "forgetting_transformer-project_fox", "hidden_size": 64, "num_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 50, "log_pruning_tolerance": 10000.0}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let output = fox(&["info".into(), folder.path().to_str().unwrap().into()]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("log_pruning_tolerance") && said.contains("negative"), "{said}");
}
