//! `fox train`: its files, its errors, and its recovery.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{
    checkpoints, command, fox, metrics, recipe, refused, result, run, stderr, succeed, succeeded,
    wait_until,
};
use fox_data::{HeldOut, PrepareOptions, Tokenizer, prepare};

const SHORT: [&str; 3] = ["--set", "training.tokens=5120", "--quiet"];

fn with(extra: &[&'static str]) -> Vec<&'static str> {
    SHORT.iter().chain(extra).copied().collect()
}

/// The error message of a failing command.
fn sentence(output: &Output) -> String {
    refused(output)["error: ".len()..].to_string()
}

/// Names and contents of everything below a folder.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.push((path.display().to_string(), fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

/// A dry run prints the resolved recipe, with memory and time as comments.
#[test]
fn dry_run_prints_recipe_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let output = run(&recipe, &out, &with(&["--dry-run"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    for line in
        ["nothing was written", "steps             20", "tokens of a step  256", "time ", "memory "]
    {
        assert!(printed.contains(line), "{line}: {printed}");
    }
    assert!(!out.exists());
    // The printed text is a recipe that resolves to itself.
    let own = dir.path().join("own.toml");
    fs::write(&own, &printed).unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    for (recipe, out) in [(&recipe, &first), (&own, &second)] {
        succeeded(&run(recipe, out, &with(&["--device", "cpu"])));
    }
    assert_eq!(result(&first), result(&second));
    // An existing run folder is reported and unchanged.
    let before = contents(&first);
    let output = run(&recipe, &first, &with(&["--dry-run"]));
    assert!(String::from_utf8_lossy(&output.stdout).contains("holds a run, which would go on"));
    // The dry run reports that another run would be refused there.
    let output = run(&recipe, &first, &with(&["--dry-run", "--set", "optimizer.peak_lr=0.5"]));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("holds another run (optimizer.peak_lr is"), "{said}");
    assert_eq!(contents(&first), before);
}

/// Before a shorter run had a shorter warm-up, the folder of the same command has the warm-up of the recipe.
#[test]
fn older_run_keeps_its_warmup() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let shorter = ["--tokens", "5120", "--quiet"];
    let older = [&shorter[..], &["--set", "schedule.warmup_tokens=2560"]].concat();
    succeeded(&run(&recipe, &out, &older));
    succeeded(&run(&recipe, &out, &shorter));
    let other = [&shorter[..], &["--set", "schedule.warmup_tokens=999"]].concat();
    let said = stderr(&run(&recipe, &out, &other));
    assert!(said.contains("schedule.warmup_tokens is 2560 there and 999 here"), "{said}");
}

#[test]
fn run_folder_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let output = run(&recipe, &out, &SHORT);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("held-out loss") && text.contains("positions 32 to 63"), "{text}");
    for name in ["config.toml", "run.json", "metrics.jsonl", "summary.json", "export/config.json"] {
        assert!(out.join(name).is_file(), "{name}");
    }
    assert!(out.join("export/tokenizer.json").is_file());
    assert_eq!(fs::read_dir(out.join("tensorboard")).unwrap().count(), 1);
    let steps: Vec<u64> = metrics(&out).iter().filter(|m| m.0 == "train").map(|m| m.1).collect();
    assert_eq!(steps, [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]);
    let kept: Vec<_> =
        checkpoints(&out).iter().map(|p| p.file_name().unwrap().to_owned()).collect();
    assert_eq!(kept, ["step-00000018", "step-00000020"]);
    let facts = fs::read_to_string(out.join("run.json")).unwrap();
    assert!(facts.contains("synthetic-v2") && facts.contains("\"train\""), "{facts}");

    // The same command again prints the summary and does nothing else.
    let before = result(&out);
    succeeded(&run(&recipe, &out, &SHORT));
    assert!(result(&out) == before);

    // config.toml of the run folder is the resolved recipe.
    let other = dir.path().join("other");
    succeeded(&run(&out.join("config.toml"), &other, &["--quiet"]));
    assert!(result(&other) == before);

    // A checkpoint is exported as a Hugging Face folder.
    let export = dir.path().join("hf");
    succeed(&["train", "--out", common::text(&out), "--export", common::text(&export)]);
    assert!(fs::read(export.join("model.safetensors")).unwrap() == before.0);
    assert!(export.join("tokenizer.json").is_file());
}

#[test]
fn rejects_invalid_input_without_overwriting() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let fails = |extra: &[&'static str]| sentence(&run(&recipe, &out, &with(extra)));

    let text = fails(&["--set", "training.batsch=2"]);
    assert!(
        text.ends_with("unknown key `training.batsch`; did you mean `training.batch`?"),
        "{text}"
    );
    let text = fails(&["--data", "no/such/data"]);
    assert_eq!(text, "no/such/data does not exist; check the data path");
    let text = fails(&["--set", "data.sequence_length=20000"]);
    assert!(text.starts_with("a sequence of 20000 tokens is longer than any document"), "{text}");
    // No machine has that many GPUs.
    let text = fails(&["--device", "cuda", "--gpu", "99"]);
    let missing = "libcuda was not found; install the NVIDIA driver, or run on the CPU";
    assert!(text == missing || text.starts_with("there is no GPU number 99"), "{text}");
    assert!(!out.exists(), "a failed start must not leave a folder behind");

    // A folder with unrelated files.
    fs::create_dir(&out).unwrap();
    fs::write(out.join("thesis.txt"), "do not lose this").unwrap();
    let text = fails(&[]);
    assert!(
        text.ends_with("is not empty and holds no run of fox; choose another folder (--out)"),
        "{text}"
    );
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);

    // A folder with another run.
    let other = dir.path().join("other");
    assert!(run(&recipe, &other, &SHORT).status.success());
    let before = contents(&other);
    let text = sentence(&run(&recipe, &other, &["--quiet", "--set", "optimizer.peak_lr=1e-3"]));
    assert!(
        text.contains("holds another run (optimizer.peak_lr is 0.005 there and 0.001 here)"),
        "{text}"
    );
    let text = sentence(&run(&recipe, &other, &with(&["--set", "data.synthetic.seed=9"])));
    assert!(text.contains("data.synthetic.seed is 0 there and 9 here"), "{text}");
    assert!(contents(&other) == before, "the other run was touched");
}

#[test]
fn rejects_data_of_another_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus.txt");
    let text: String = (0..4000).map(|i| format!("line {i} of a text that repeats\n")).collect();
    fs::write(&corpus, text).unwrap();
    let data = dir.path().join("data");
    let mut options = PrepareOptions::new(&corpus, &data, Tokenizer::from_name("bytes").unwrap());
    options.held_out = HeldOut::None;
    prepare(&options, |_| std::ops::ControlFlow::Continue(())).unwrap();

    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let args = |extra: &[&str]| {
        let mut command = command(&recipe, &out, &SHORT);
        command.arg("--data").arg(&data).args(extra).output().unwrap()
    };
    let text = sentence(&args(&["--set", "data.tokenizer=gpt2"]));
    assert!(
        text.contains("was made with tokenizer bytes:") && text.contains("not gpt2:"),
        "{text}"
    );
    assert!(!out.exists());
    succeeded(&args(&[]));
    let marker = fs::read_to_string(out.join("export/fox_tokenizer.json")).unwrap();
    assert!(marker.contains("bytes"), "{marker}");
    let text = sentence(&run(&recipe, &out, &SHORT));
    assert!(text.contains("its data are"), "{text}");
}

#[test]
fn damaged_checkpoint_falls_back_to_previous() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, whole, torn) = (recipe(dir.path()), dir.path().join("a"), dir.path().join("b"));
    assert!(run(&recipe, &whole, &SHORT).status.success());
    assert!(run(&recipe, &torn, &SHORT).status.success());
    // Simulates a disk that lost a file of the last checkpoint before the run finished.
    let last = checkpoints(&torn).pop().unwrap();
    let file = last.join("optimizer.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    fs::remove_dir_all(torn.join("export")).unwrap();
    let output = run(&recipe, &torn, &SHORT);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stderr(&output);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("the checkpoint of step 20 cannot be used")
            && text.contains("the checksum of optimizer.safetensors differs")
            && text.contains("resuming from the checkpoint of step 18"),
        "{text}"
    );
    assert!(result(&torn) == result(&whole));
    assert_eq!(metrics(&torn), metrics(&whole));
}

#[cfg(unix)]
#[test]
fn signal_checkpoints_and_run_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, whole, torn) = (recipe(dir.path()), dir.path().join("a"), dir.path().join("b"));
    // Checkpoints only at the signal and at the end.
    let extra = ["--quiet", "--set", "checkpoints.every=0", "--set", "training.tokens=38400"];
    assert!(run(&recipe, &whole, &extra).status.success());
    let child = command(&recipe, &torn, &extra)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("it trains", || {
        fs::read_to_string(torn.join("metrics.jsonl")).unwrap_or_default().lines().count() >= 5
    });
    assert!(
        Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success()
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("run the same command again to go on"), "{text}");
    assert_eq!(checkpoints(&torn).len(), 1);
    assert!(run(&recipe, &torn, &extra).status.success());
    assert!(result(&torn) == result(&whole));
    assert_eq!(metrics(&torn), metrics(&whole));
}

/// A limit on file sizes simulates a full disk: writes fail at the same place.
#[cfg(unix)]
#[test]
fn full_disk_keeps_last_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, whole, torn) = (recipe(dir.path()), dir.path().join("a"), dir.path().join("b"));
    let extra = ["--quiet", "--set", "training.tokens=25600"];
    assert!(run(&recipe, &whole, &extra).status.success());
    let mut first = command(&recipe, &torn, &extra).stdout(Stdio::null()).spawn().unwrap();
    wait_until("it trains", || !checkpoints(&torn).is_empty());
    first.kill().unwrap();
    first.wait().unwrap();
    let kept = checkpoints(&torn).pop().unwrap();
    let before = contents(&kept);

    let inner = command(&recipe, &torn, &extra);
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"])
        .arg(inner.get_program())
        .args(inner.get_args())
        .output()
        .unwrap();
    let text = sentence(&output);
    let step: u64 = kept.to_string_lossy().rsplit('-').next().unwrap().parse().unwrap();
    assert!(
        text.starts_with(&format!("cannot write the checkpoint of step {}", step + 3)),
        "{text}"
    );
    assert!(text.contains(&format!("the checkpoint of step {step} is whole")), "{text}");
    assert!(contents(&kept) == before, "the last good checkpoint was touched");
    assert!(checkpoints(&torn).pop().unwrap() == kept, "files of the failed checkpoint remain");
    // With free space the run resumes.
    assert!(run(&recipe, &torn, &extra).status.success());
    assert!(result(&torn) == result(&whole));
}

#[test]
fn persistent_infinite_gradient_ends_run() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let output = run(
        &recipe,
        &out,
        &with(&["--set", "optimizer.peak_lr=1e30", "--set", "training.max_skips=3"]),
    );
    assert!(!output.status.success());
    let text = stderr(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[2].ends_with("the gradient is not finite, the update is left out (3 in all)"));
    assert!(lines[3].contains("was not finite in 3 steps in a row"), "{text}");
    let no_norm = |values: &str| values.split(' ').nth(2) == Some("null");
    let skipped = metrics(&out).iter().filter(|m| no_norm(&m.2)).count();
    assert_eq!(skipped, 3);
}

/// Too short for many consecutive skipped steps.
#[test]
fn nan_model_is_not_exported() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let short = ["--set", "optimizer.peak_lr=1e30", "--set", "training.tokens=1280"];
    let output =
        run(&recipe, &out, &with(&[&short[..], &["--set", "schedule.warmup_tokens=0"]].concat()));
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let words =
        "the weights or their held-out loss are not finite after step 5, the last one; lower";
    assert!(stderr(&output).contains(words), "{}", stderr(&output));
    assert!(!out.join("export").exists() && !out.join("summary.json").exists());
}

#[test]
fn run_folder_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    // The first run does not end before the second one starts.
    let extra = ["--quiet", "--set", "training.tokens=50000000"];
    let mut first = command(&recipe, &out, &extra).stdout(Stdio::null()).spawn().unwrap();
    wait_until("it trains", || out.join("metrics.jsonl").exists());
    let text = sentence(&run(&recipe, &out, &extra));
    assert!(text.starts_with("another process is training in"), "{text}");
    first.kill().unwrap();
    first.wait().unwrap();
}

/// The EMA is evaluated and exported on request, and exported from any checkpoint.
#[test]
fn ema_is_evaluated_and_exported() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, raw, ema) = (recipe(dir.path()), dir.path().join("raw"), dir.path().join("ema"));
    let keep = ["--set", "training.ema=0.9"];
    let averaged = [&keep[..], &["--set", "evaluation.weights=ema"]].concat();
    assert!(run(&recipe, &raw, &with(&keep)).status.success());
    succeeded(&run(&recipe, &ema, &with(&averaged)));
    // Training is unchanged; evaluations and exports differ.
    assert!(result(&raw).1 == result(&ema).1 && result(&raw).0 != result(&ema).0);
    let losses = |out: &Path, kind: &str| -> Vec<String> {
        metrics(out).into_iter().filter(|m| m.0 == kind).map(|m| m.2).collect()
    };
    assert_eq!(losses(&raw, "train"), losses(&ema, "train"));
    assert_ne!(losses(&raw, "eval"), losses(&ema, "eval"));
    // Both runs export raw weights and EMA.
    let export = |from: &Path, which: &[&str], to: &str| {
        let to = dir.path().join(to);
        let args = ["train", "--out", common::text(from), "--export", common::text(&to)];
        (fox(&[&args[..], which].concat()), to.join("model.safetensors"))
    };
    for (from, which, to, like) in [
        (&raw, &["--weights", "ema"][..], "a", &ema),
        (&ema, &["--weights", "raw"], "b", &raw),
        (&ema, &[], "c", &ema),
        (&raw, &[], "d", &raw),
    ] {
        let (output, file) = export(from, which, to);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(fs::read(file).unwrap() == result(like).0, "{to}");
    }
    let none = dir.path().join("none");
    assert!(run(&recipe, &none, &SHORT).status.success());
    let text = sentence(&export(&none, &["--weights", "ema"], "e").0);
    assert!(
        text.ends_with(
            "keeps no average of the weights; train with training.ema, or export the raw ones"
        ),
        "{text}"
    );
}

#[test]
fn rejects_run_shorter_than_schedule() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, out) = (recipe(dir.path()), dir.path().join("run"));
    let fails = |extra: &[&'static str]| sentence(&run(&recipe, &out, &with(extra)));
    let text = fails(&["--set", "schedule.warmup_tokens=5121"]);
    assert!(
        text.ends_with("`schedule.warmup_tokens` is 5121, but the run ends after 5120 tokens (training.tokens), before its learning rate is reached; lower one or raise the other"),
        "{text}"
    );
    const WSD: [&str; 4] = ["--set", "schedule.shape=wsd", "--set", "schedule.warmup_tokens=2560"];
    let text = fails(&[&WSD[..], &["--set", "schedule.decay_fraction=0.6"]].concat());
    assert!(
        text.ends_with("`schedule.warmup_tokens` is 2560, which with 3072 tokens of decay (schedule.decay_fraction) is more than the 5120 of the run (training.tokens); lower one of them"),
        "{text}"
    );
    assert!(!out.exists());
    let fits = with(&[&WSD[..], &["--set", "schedule.decay_fraction=0.5"]].concat());
    succeeded(&run(&recipe, &out, &fits));
}

/// A run folder written before `optimizer.name` and other keys existed resumes.
#[test]
fn old_run_folder_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, whole, old) = (recipe(dir.path()), dir.path().join("a"), dir.path().join("b"));
    assert!(run(&recipe, &whole, &SHORT).status.success());
    assert!(run(&recipe, &old, &SHORT).status.success());
    let config = fs::read_to_string(old.join("config.toml")).unwrap();
    let young = ["name = \"adamw\"", "shape = \"decay\"", "weights = \"raw\""];
    assert!(young.iter().all(|key| config.contains(key)), "{config}");
    let without = config.lines().filter(|line| !young.contains(line)).collect::<Vec<_>>();
    fs::write(old.join("config.toml"), without.join("\n")).unwrap();
    fs::remove_dir_all(old.join("export")).unwrap();
    fs::remove_dir_all(checkpoints(&old).pop().unwrap()).unwrap();
    succeeded(&run(&recipe, &old, &SHORT));
    assert!(result(&old) == result(&whole));
}
