//! `fox train --data TEXT`: from a text to a model in one command.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A text long enough for a held-out split.
fn text(lines: usize) -> String {
    (0..lines).map(|n| format!("On day {n} the fox forgot {} hens.\n", n * n % 97)).collect()
}

/// A run of a few steps in `dir`.
fn train(dir: &Path, args: &[&str], input: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.current_dir(dir).arg("train").args(args).args(["--device", "cpu", "--threads", "1"]);
    let short = ["training.tokens=4096", "schedule.warmup_tokens=512", "data.sequence_length=128"];
    short.iter().for_each(|set| _ = command.args(["--set", set]));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that fails early does not read it.
    let _ = child.stdin.take().unwrap().write_all(input.unwrap_or_default().as_bytes());
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    said(output)
}

/// The error message of a failing command.
fn fails(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", said(output));
    let said = said(output);
    let line = said.lines().last().unwrap();
    line.strip_prefix("error: ").unwrap().to_owned()
}

#[test]
fn trains_on_text_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("hens.txt"), text(1000)).unwrap();
    let first = train(dir.path(), &["--data", "hens.txt"], None);
    let words = succeeds(&first);
    assert!(words.contains("prepared hens.txt in runs/hens/data"), "{words}");
    assert!(words.contains("held out (the end of each document)"), "{words}");
    assert!(words.contains("auto-selected recipe tiny-fox-pro"), "{words}");
    let printed = String::from_utf8_lossy(&first.stdout).into_owned();
    assert!(printed.contains("held-out loss"), "{printed}");
    let run = dir.path().join("runs/hens");
    for file in ["data/index.json", "config.toml", "export/config.json", "summary.json"] {
        assert!(run.join(file).is_file(), "{file}");
    }
    for line in ["tokens: 4,096 (the data have", "epochs: 0.1", "time: about"] {
        assert!(words.contains(line), "{line}: {words}");
    }
    for line in ["bits per byte", "perplexity per token", "fox inspect runs/hens", "--tokens 8192"]
    {
        assert!(printed.contains(line), "{line}: {printed}");
    }
    // The same command finds the finished run; a changed text is another run.
    let again = train(dir.path(), &["--data", "hens.txt"], None);
    succeeds(&again);
    assert_eq!(again.stdout, first.stdout);
    let before = fs::read(run.join("data/index.json")).unwrap();
    fs::write(dir.path().join("hens.txt"), text(1001)).unwrap();
    for _ in 0..2 {
        let words = succeeds(&train(dir.path(), &["--data", "hens.txt"], None));
        assert!(words.contains("runs/hens was trained on another version of hens.txt"), "{words}");
        assert!(dir.path().join("runs/hens-2/summary.json").is_file());
        assert!(!dir.path().join("runs/hens-3").exists());
    }
    assert_eq!(fs::read(run.join("data/index.json")).unwrap(), before);
}

/// A text that was too short for a run is prepared again once it is longer.
#[test]
fn longer_text_replaces_too_short_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("hens.txt"), text(10)).unwrap();
    let sentence = fails(&train(dir.path(), &["--data", "hens.txt"], None));
    assert!(sentence.contains("too few to learn from"), "{sentence}");
    fs::write(dir.path().join("hens.txt"), text(1000)).unwrap();
    succeeds(&train(dir.path(), &["--data", "hens.txt"], None));
    assert!(dir.path().join("runs/hens/summary.json").is_file());
}

#[test]
fn finished_run_is_extended_with_more_tokens() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("hens.txt"), text(1000)).unwrap();
    let fox = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        command.current_dir(dir.path()).args(line.split_whitespace()).stdin(Stdio::null());
        command.output().unwrap()
    };
    let base = "train tiny-fox-pro --data hens.txt --set data.sequence_length=128 --batch 2 --lr 2e-3 --device cpu";
    succeeds(&fox(&format!("{base} -o a --tokens 4096")));
    let first = fs::read(dir.path().join("a/export/model.safetensors")).unwrap();
    let longer = fox(&format!("{base} -o a --tokens 8192"));
    assert!(succeeds(&longer).contains("resumed from step 16"), "{}", said(&longer));
    assert!(String::from_utf8_lossy(&longer.stdout).contains("8,192"));
    let second = fs::read(dir.path().join("a/export/model.safetensors")).unwrap();
    assert_ne!(first, second);
    let config: toml::Table =
        fs::read_to_string(dir.path().join("a/config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["training"]["tokens"].as_integer(), Some(8192));
    assert_eq!(config["optimizer"]["peak_lr"].as_float(), Some(2e-3));
    assert_eq!(config["data"]["path"].as_str(), Some("data"));
    // Once more: nothing is left to do. Fewer tokens are another run.
    assert_eq!(succeeds(&fox(&format!("{base} -o a --tokens 8192"))).matches("step ").count(), 0);
    let sentence = fails(&fox(&format!("{base} -o a --tokens 4096")));
    assert!(sentence.contains("training.tokens is 8192 there and 4096 here"), "{sentence}");
    // An epoch of the data in other words.
    let words = succeeds(&fox(&format!("{base} -o b --epochs 0.25")));
    assert!(words.contains("epochs: 0.2"), "{words}");

    // A moved run is used from elsewhere; results go into it, and other formats are made of it.
    fs::create_dir(dir.path().join("away")).unwrap();
    fs::rename(dir.path().join("a"), dir.path().join("away/a")).unwrap();
    let elsewhere = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        command.current_dir(dir.path().join("away")).args(line.split_whitespace());
        succeeds(&command.output().unwrap())
    };
    elsewhere("eval loss a --length 64 --documents 2 --device cpu");
    elsewhere("inspect a --length 64 --device cpu");
    elsewhere("convert a official --to official");
    for file in
        ["a/eval-loss/loss.json", "a/inspect.html", "a/inspect.json", "official/config.json"]
    {
        assert!(dir.path().join("away").join(file).is_file(), "{file}");
    }
}

/// Three files of different lengths are enough for a published recipe.
#[test]
fn published_recipe_trains_on_folder() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus");
    fs::create_dir(&corpus).unwrap();
    for (name, lines) in [("a.py", 300), ("b.rs", 400), ("notes", 500)] {
        fs::write(corpus.join(name), text(lines)).unwrap();
    }
    let small = ["model.hidden_size=64", "model.num_hidden_layers=1", "model.num_heads=2"];
    let mut args = vec!["fox-pro-125m", "--data", "corpus"];
    small.iter().for_each(|set| args.extend(["--set", set]));
    let words = succeeds(&train(dir.path(), &args, None));
    assert!(words.contains("data.order is shuffled instead of longcrawl64"), "{words}");
}

/// JSON lines with messages become a chat model: divided, trained on the answers, exported with their template.
#[test]
fn trains_on_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let line = |n: usize| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"Where is hen {n}?\"}}, \
             {{\"role\": \"assistant\", \"content\": \"In the barn.\"}}]}}\n"
        )
    };
    fs::write(dir.path().join("chats.jsonl"), (0..60).map(line).collect::<String>()).unwrap();
    let dry = train(dir.path(), &["--data", "chats.jsonl", "--dry-run", "--json"], None);
    let figures: serde_json::Value =
        serde_json::from_slice(&dry.stdout).unwrap_or_else(|_| panic!("{}", succeeds(&dry)));
    assert_eq!(figures["config"]["data"]["messages"]["path"], "chats.jsonl", "{figures}");
    assert!(!dir.path().join("runs").exists(), "of a dry run");
    let first = train(dir.path(), &["--data", "chats.jsonl"], None);
    let words = succeeds(&first);
    assert!(words.contains("chats.jsonl has conversations: 57 to train on"), "{words}");
    assert!(words.contains("epochs: "), "{words}");
    assert!(words.contains("auto-selected recipe tiny-fox-pro"), "{words}");
    let printed = String::from_utf8_lossy(&first.stdout).into_owned();
    assert!(
        printed.contains("held-out loss") && printed.contains("fox chat runs/chats"),
        "{printed}"
    );
    let run = dir.path().join("runs/chats");
    assert_eq!(fs::read_to_string(run.join("data/heldout.jsonl")).unwrap().lines().count(), 3);
    assert!(run.join("export/chat_template.jinja").is_file());
    // The same command finds the finished run; other conversations are another run.
    succeeds(&train(dir.path(), &["--data", "chats.jsonl"], None));
    fs::write(dir.path().join("chats.jsonl"), (1..61).map(line).collect::<String>()).unwrap();
    let words = fails(&train(dir.path(), &["--data", "chats.jsonl"], None));
    assert!(words.starts_with("runs/chats holds another run (its data are"), "{words}");
    // A line that is not a conversation is named.
    fs::write(dir.path().join("bad.jsonl"), line(1) + "{\"text\": \"a\"}\n").unwrap();
    let words = fails(&train(dir.path(), &["--data", "bad.jsonl"], None));
    assert!(words.contains("bad.jsonl line 2 has no list `messages`"), "{words}");
}

/// A dry run selects the same recipe, prints it, and writes nothing.
#[test]
fn dry_run_on_text_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("hens.txt"), text(1000)).unwrap();
    let output = train(dir.path(), &["--data", "hens.txt", "--dry-run"], None);
    let words = succeeds(&output);
    assert!(words.contains("auto-selected recipe tiny-fox-pro"), "{words}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("#   run folder        runs/hens (new)\n"), "{printed}");
    let recipe: toml::Table = printed.parse().unwrap();
    assert_eq!(recipe["training"]["tokens"].as_integer(), Some(4096), "{printed}");
    assert_eq!(recipe["data"]["path"].as_str(), Some("runs/hens/data"), "{printed}");
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["hens.txt"]);
}

#[test]
fn trains_on_folder_and_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus");
    fs::create_dir(&corpus).unwrap();
    fs::write(corpus.join("a.md"), text(500)).unwrap();
    let lines: String = (0..150).map(|_| format!("{:?}\n", text(60))).collect();
    let objects: String = lines.lines().map(|text| format!("{{\"text\": {text}}}\n")).collect();
    fs::write(corpus.join("b.jsonl"), objects).unwrap();
    let args = ["tiny-fox-pro", "--data", "corpus", "--out", "run", "--tokenizer", "bytes"];
    let words = succeeds(&train(dir.path(), &args, None));
    assert!(words.contains("held out (documents)") && !words.contains("no recipe"), "{words}");

    let input = text(900);
    // The remains of a start that was killed while it read its input.
    fs::create_dir(dir.path().join("piped")).unwrap();
    fs::write(dir.path().join("piped/input.txt.partial"), "half").unwrap();
    let args = ["--data", "-", "--out", "piped"];
    let words = succeeds(&train(dir.path(), &args, Some(&input)));
    assert!(words.contains("auto-selected recipe"), "{words}");
    assert_eq!(fs::read_to_string(dir.path().join("piped/input.txt")).unwrap(), input);
    let words = succeeds(&train(dir.path(), &args, Some("something else")));
    assert!(words.contains("the standard input is not read"), "{words}");
}

#[test]
fn rejects_unusable_text() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("empty.txt"), "").unwrap();
    fs::write(dir.path().join("short.txt"), "Too short.").unwrap();
    fs::write(dir.path().join("picture.png"), b"\x89PNG\0").unwrap();
    fs::create_dir(dir.path().join("photos")).unwrap();
    fs::write(dir.path().join("photos/a.png"), b"\x89PNG\0").unwrap();
    for (args, part) in [
        (&["--data", "empty.txt"][..], "empty.txt"),
        (&["--data", "short.txt"], "too few to learn from"),
        (&["--data", "picture.png"], "no known corpus ending"),
        (&["--data", "photos"], "photos holds no text, only 1 .png"),
        (&["--data", "missing.txt"], "missing.txt"),
        (&["--data", "-"], "--out"),
        (&["--data", "-", "--out", "piped"], "the standard input is empty"),
        (&["--data", "short.txt", "--tokenizer", "nosuch"], "nosuch"),
    ] {
        let sentence = fails(&train(dir.path(), args, None));
        assert!(sentence.contains(part), "{args:?}: {sentence}");
    }
    assert!(!dir.path().join("piped/input.txt").exists());
}

#[test]
fn missing_heldout_split_prints_warning() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("hens.txt"), text(300)).unwrap();
    let prepared = Command::new(env!("CARGO_BIN_EXE_fox"))
        .current_dir(dir.path())
        .args(["prepare", "hens.txt", "data", "--tokenizer", "bytes", "--heldout", "0"])
        .output()
        .unwrap();
    succeeds(&prepared);
    let words = succeeds(&train(dir.path(), &["tiny-fox-pro", "--data", "data"], None));
    assert!(words.contains("WARNING: no data are held out"), "{words}");
}
