//! `fox prepare`: concurrent processes, kills, and messages.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use common::{stderr, succeeded};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn command(corpus: &Path, out: &Path, extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.arg("prepare").arg(corpus).arg(out).args(["--tokenizer", "bytes"]);
    command.args(["--shard-tokens", "200000", "--heldout", "0.2"]).args(extra);
    command
}

fn run(corpus: &Path, out: &Path, extra: &[&str]) -> Output {
    command(corpus, out, extra).output().unwrap()
}

/// Some 12 MB of text in short documents.
fn write_corpus(folder: &Path) -> PathBuf {
    let path = folder.join("corpus.jsonl");
    let line = |i: u64| {
        let text = format!("document {i} of a corpus that takes a while ").repeat(4);
        format!("{{\"text\": \"{text}\"}}\n")
    };
    fs::write(&path, (0..60_000).map(line).collect::<String>()).unwrap();
    path
}

/// All files below a folder with their contents.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

/// The contents of two folders are the same, names included.
fn same(a: &Path, b: &Path) -> bool {
    let inside = |folder: &Path| -> Vec<(PathBuf, Vec<u8>)> {
        let below = |path: PathBuf| path.strip_prefix(folder).unwrap().to_path_buf();
        contents(folder).into_iter().map(|(path, bytes)| (below(path), bytes)).collect()
    };
    inside(a) == inside(b)
}

fn wait_for(what: &Path, child: &mut Child) {
    let start = Instant::now();
    while !what.exists() && child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(60), "{} does not come", what.display());
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn prepare_locks_survive_kills() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = write_corpus(dir.path());
    let (whole, torn) = (dir.path().join("whole"), dir.path().join("torn"));
    succeeded(&run(&corpus, &whole, &[]));

    // Killed repeatedly, each time later; every kill leaves a stale lock file.
    let (mut kills, mut refused) = (0, 0);
    for shard in [0, 2, 4, 6, 9] {
        let mut child = command(&corpus, &torn, &[])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(&torn.join(format!("train/{shard:05}.tokens")), &mut child);
        let second = run(&corpus, &torn, &[]);
        if child.try_wait().unwrap().is_none() {
            // The first process may hold the lock before it has written its process id.
            let sentence = |who: &str| {
                let torn = torn.display();
                format!(
                    "error: another process{who} is preparing into {torn}; wait until it has ended or choose another folder\n"
                )
            };
            let known = [sentence(""), sentence(&format!(" ({})", child.id()))];
            assert_eq!(second.status.code(), Some(1));
            assert!(known.contains(&stderr(&second)), "{}", stderr(&second));
            refused += 1;
            child.kill().unwrap();
            kills += 1;
        }
        child.wait().unwrap();
    }
    assert!(kills > 0 && refused > 0, "{kills} kills, {refused} refused");
    succeeded(&run(&corpus, &torn, &[]));
    assert!(same(&whole, &torn));
}

#[test]
fn changed_corpus_is_prepared_again() {
    let dir = tempfile::tempdir().unwrap();
    let (corpus, out) = (dir.path().join("corpus.jsonl"), dir.path().join("out"));
    let lines: String = (10..60).map(|i| format!("{{\"text\": \"document {i}\"}}\n")).collect();
    fs::write(&corpus, &lines).unwrap();
    assert!(run(&corpus, &out, &[]).status.success());
    let again = run(&corpus, &out, &[]);
    assert!(String::from_utf8_lossy(&again.stdout).contains("was complete already"));
    let before = contents(&out);
    // The same size, then another one.
    for changed in [lines.replace("document 33", "document 88"), lines.replace('3', "three")] {
        fs::write(&corpus, changed).unwrap();
        let output = run(&corpus, &out, &[]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stderr(&output).contains("the corpus has changed, so it was prepared again"));
        let fresh = dir.path().join("fresh");
        assert!(run(&corpus, &fresh, &[]).status.success());
        assert!(same(&fresh, &out));
        fs::remove_dir_all(fresh).unwrap();
    }
    // Other options are refused, and the original corpus gives the original bytes.
    let output = run(&corpus, &out, &["--no-end-mark"]);
    assert!(stderr(&output).contains("holds another preparation (its separator or end marks"));
    fs::write(&corpus, &lines).unwrap();
    assert!(run(&corpus, &out, &[]).status.success());
    assert!(contents(&out) == before);
}

#[test]
fn skipped_and_duplicate_documents_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (corpus, heldout) = (dir.path().join("a.jsonl"), dir.path().join("b.jsonl"));
    fs::write(&corpus, "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"text\": \"two\"}\n").unwrap();
    fs::write(&heldout, "{\"text\": \"two\"}\n{\"text\": \"three\"}\n").unwrap();
    let out = dir.path().join("out");
    let extra = ["--heldout-corpus", heldout.to_str().unwrap(), "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.arg("prepare").arg(&corpus).arg(&out).args(["--tokenizer", "bytes"]).args(extra);
    for complete in [false, true] {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(
            stderr(&output),
            "note: empty documents are left out (1)\nnote: 1 of 2 held-out documents are also trained on; a loss on them says little about new text\n"
        );
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["already_complete"], complete);
        assert_eq!((&json["empty_documents"], &json["shared_documents"]), (&1.into(), &1.into()));
    }
}

/// Opening a pipe without a writer must not block.
#[cfg(unix)]
#[test]
fn rejects_named_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("a.jsonl");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for corpus in [&pipe, dir.path()] {
        let output = run(corpus, &dir.path().join("out"), &[]);
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(said.contains("a.jsonl is a named pipe, not a file"), "{said}");
        assert!(!dir.path().join("out").exists(), "a failed start leaves nothing behind");
    }
}
