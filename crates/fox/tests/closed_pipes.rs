//! Closed output pipes: training, preparation and evaluation continue; only `fox generate` ends.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests
#![cfg(unix)]

mod common;

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{
    checkpoints, command, metrics, recipe, result, run, small_model, stderr, text, wait_until,
};

/// Starts a command and closes the reading ends of both its outputs before it can have written anything.
fn unheard(command: &mut Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    child
}

fn fox(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.args(args);
    command
}

/// Exit status of a process, which must end within a minute.
fn end_of(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("it does not end");
        }
        sleep(Duration::from_millis(2));
    }
}

/// Waits until metrics.jsonl of a run has this many lines.
fn wait_for_lines(out: &Path, lines: usize) {
    wait_until("it trains", || {
        fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().lines().count() >= lines
    });
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

#[test]
fn training_survives_closed_pipe_bit_exact() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, whole, torn) = (recipe(dir.path()), dir.path().join("a"), dir.path().join("b"));
    // Not quiet, so that writes to the closed pipe fail.
    let extra = ["--set", "training.tokens=5120"];
    let output = run(&recipe, &whole, &extra);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).lines().count() > 2, "nothing is said: {}", stderr(&output));

    let status = end_of(&mut unheard(&mut command(&recipe, &torn, &extra)));
    assert!(status.success(), "{status}");
    assert!(result(&torn) == result(&whole));
    assert_eq!(metrics(&torn), metrics(&whole));
    assert!(torn.join("summary.json").exists());
}

#[test]
fn signal_checkpoints_run_with_closed_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let extra = ["--set", "training.tokens=5120000", "--set", "checkpoints.every=0"];
    let mut child = unheard(&mut command(&recipe, &out, &extra));
    wait_for_lines(&out, 3);
    signal(&child, "-TERM");
    assert_eq!(end_of(&mut child).code(), Some(130));
    assert_eq!(checkpoints(&out).len(), 1);
}

/// Whether SIGHUP is ignored here (as under `nohup`), which child processes inherit.
fn ignores_hang_ups() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 == 1)
}

/// `nohup`: SIGHUP is ignored before the program starts.
#[test]
fn ignored_sighup_stays_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, whole) = (recipe(dir.path()), dir.path().join("whole"));
    let extra = ["--quiet", "--set", "training.tokens=51200", "--set", "checkpoints.every=0"];
    assert!(run(&recipe, &whole, &extra).status.success());
    for (trap, code) in [("trap '' HUP; ", 0), ("", 130)] {
        if trap.is_empty() && ignores_hang_ups() {
            println!("skipped: hang-ups are ignored here");
            continue;
        }
        let out = dir.path().join(format!("run-{code}"));
        let inner = command(&recipe, &out, &extra);
        let mut outer = Command::new("sh");
        outer.args(["-c", &format!("{trap}exec \"$@\""), "sh"]);
        let mut child = unheard(outer.arg(inner.get_program()).args(inner.get_args()));
        wait_for_lines(&out, 3);
        signal(&child, "-HUP");
        assert_eq!(end_of(&mut child).code(), Some(code), "{trap}");
        assert_eq!(checkpoints(&out).len(), 1);
        if code == 0 {
            assert!(result(&out) == result(&whole));
        }
    }
}

#[test]
fn prepare_and_eval_survive_closed_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus.txt");
    fs::write(&corpus, "some text to prepare").unwrap();
    // An empty document prints a note.
    fs::write(dir.path().join("empty.txt"), "").unwrap();
    let out = dir.path().join("data");
    let prepare = ["prepare", text(dir.path()), text(&out), "--tokenizer", "bytes"];
    assert!(end_of(&mut unheard(&mut fox(&prepare))).success());
    assert!(out.join("index.json").exists());

    let model = dir.path().join("small");
    small_model(&model, |config| config.max_position_embeddings = 64);
    let out = dir.path().join("loss");
    let eval = ["eval", "loss", text(&model), "--length", "64", "--documents", "3"];
    let status = end_of(&mut unheard(&mut fox(&[&eval[..], &["--out", text(&out)]].concat())));
    assert!(status.success(), "{status}");
    for file in ["loss.json", "loss.csv", "loss.svg"] {
        assert!(out.join(file).exists(), "{file}");
    }
    let out = dir.path().join("needle");
    let eval = ["eval", "needle", text(&model), "--lengths", "64", "--cases", "1"];
    let status = end_of(&mut unheard(&mut fox(&[&eval[..], &["--out", text(&out)]].concat())));
    assert!(status.success(), "{status}");
    assert!(out.join("needle.json").exists());
}

/// The requested tokens would take many minutes.
#[test]
fn generate_ends_on_closed_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("small");
    small_model(&model, |config| config.max_position_embeddings = 64);
    let args = ["generate", text(&model), "-p", "the fox", "--ignore-end", "--cache", "16"];
    let mut command = fox(&[&args[..], &["-m", "3000000"]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 10];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    drop(child.stdout.take());
    let status = end_of(&mut child);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((status.code(), said.as_str()), (Some(0), ""));
}

#[test]
fn closed_pipe_keeps_exit_codes() {
    for (args, code) in [
        (&["info", "fox-pro-125m"][..], 0),
        (&["info", "fox-pro-125m", "--json"], 0),
        (&["train", "--list"], 0),
        (&["--help"], 0),
        (&["no-such-command"], 2),
        (&["info", "no-such-model"], 1),
        (&["verify", "no/such/dump"], 1),
        (&["train", "no-such-recipe"], 1),
    ] {
        let status = end_of(&mut unheard(&mut fox(args)));
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}
