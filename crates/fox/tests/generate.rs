//! `fox generate` and `fox bench decode` as a user meets them.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{fox, small_model};
use fox_model::{Model, ModelConfig, WriteOptions};
use serde_json::Value;
use tempfile::{TempDir, tempdir};

fn succeed(args: &[&str]) -> (String, String) {
    let output = fox(args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    (String::from_utf8(output.stdout).unwrap(), said)
}

/// A folder with a small untrained model of the embedded corpus.
fn checkpoint() -> (TempDir, String) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("small");
    small_model(&path, |_| {});
    let path = path.to_str().unwrap().to_string();
    (folder, path)
}

#[test]
fn prompt_from_flag_file_or_stdin() {
    let (folder, model) = checkpoint();
    let run = ["generate", &model, "--max-tokens", "20", "--ignore-end"];
    let (text, said) = succeed(&[&run[..], &["--prompt", "Ann sings."]].concat());
    assert_eq!(text.split_whitespace().count(), 20, "{text}");
    assert!(said.starts_with("20 tokens, ") && said.contains("cache"), "{said}");
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "Ann sings.").unwrap();
    assert_eq!(succeed(&[&run[..], &["--file", file.to_str().unwrap()]].concat()).0, text);
    let mut child = Command::new(env!("CARGO_BIN_EXE_fox"))
        .args(run)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Ann sings.").unwrap();
    assert_eq!(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap(), text);
    let other = succeed(&[&run[..], &["--prompt", "Ann sings.", "--seed", "1"]].concat()).0;
    assert_ne!(other, text);
}

#[test]
fn json_has_ids_logprobs_usage_and_cache() {
    let (_folder, model) = checkpoint();
    let run = ["generate", &model, "--prompt", "Ann sings.", "--max-tokens", "9", "--ignore-end"];
    let (plain, _) = succeed(&run);
    let (json, _) = succeed(&[&run[..], &["--json", "--n", "2", "--weights", "f32"]].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    let choices = json["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_eq!(choices[0]["text"].as_str().unwrap(), plain.trim_end_matches('\n'));
    assert_ne!(choices[0]["ids"], choices[1]["ids"]);
    for choice in choices {
        assert_eq!(choice["ids"].as_array().unwrap().len(), 9);
        let scores = choice["logprobs"].as_array().unwrap();
        assert!(scores.iter().all(|score| score.as_f64().unwrap() < 0.0));
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["usage"]["prompt_tokens"], 3);
        assert!(choice["cache"]["bytes"].as_u64().unwrap() > 0);
        // The first token comes with the prefill, and the time ends when the text is printed: later than in the engine.
        let speed = 8.0 / choice["usage"]["decode_s"].as_f64().unwrap();
        let reported = choice["tokens_per_s"].as_f64().unwrap();
        assert!(reported > 0.0 && reported <= speed, "{choice}");
    }
    assert_eq!(choices[1]["usage"]["shared_tokens"], 3, "the prompt was read once");
}

#[test]
fn stop_strings_end_the_text() {
    let (_folder, model) = checkpoint();
    let run = ["generate", &model, "--prompt", "Ann sings.", "--max-tokens", "30", "--ignore-end"];
    let (all, _) = succeed(&run);
    let word = all.split_whitespace().nth(4).unwrap().trim_end_matches(['.', '?']).to_string();
    let (text, _) = succeed(&[&run[..], &["--stop", &word]].concat());
    assert_eq!(text.trim_end_matches('\n'), &all[..all.find(&word).unwrap()]);
}

#[test]
fn configured_end_marker_ends_the_text() {
    let (_folder, model) = checkpoint();
    let run = |extra: &[&str]| {
        let run = ["generate", &model, "--prompt", "Ann sings.", "--max-tokens", "9", "--json"];
        let json: Value = serde_json::from_str(&succeed(&[&run[..], extra].concat()).0).unwrap();
        let choice = &json["choices"][0];
        (choice["ids"].as_array().unwrap().clone(), choice["finish_reason"].clone())
    };
    let (all, _) = run(&["--ignore-end"]);
    let at = all.iter().position(|id| *id == all[4]).unwrap();
    // Any id may be the one, whatever begins a text.
    let file = PathBuf::from(&model).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["eos_token_id"] = all[4].clone();
    std::fs::write(&file, config.to_string()).unwrap();
    assert_eq!(run(&[]), (all[..at].to_vec(), "stop".into()));
    assert_eq!(run(&["--ignore-end"]).0, all);
}

#[test]
fn generate_rejects_invalid_options() {
    let (_folder, model) = checkpoint();
    let complaint = |args: &[&str]| {
        let output = fox(&[&["generate", &model, "--prompt", "the"], args].concat());
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = complaint(&["--cache", "0.000001"]);
    assert!(said.contains("--cache") && said.contains("bytes"), "{said}");
    assert!(complaint(&["--top-p", "2"]).contains("--top-p must be above 0 and at most 1, not 2"));
    assert!(complaint(&["--min-p", "2"]).contains("--min-p must be from 0 to 1"));
    assert_eq!(fox(&["generate", &model, "--eviction", "1"]).status.code(), Some(2));
}

/// A run that would go on for very long.
fn endless(model: &str, extra: &[&str]) -> std::process::Child {
    let args =
        ["generate", model, "--prompt", "the fox", "--max-tokens", "2000000", "--ignore-end"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.args(args).args(extra).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// By SIGTERM, which counts as an interrupt does: tests that a script runs in the background ignore interrupts, and what
/// they start does, too.
#[test]
fn interrupt_prints_the_summary() {
    let (_folder, model) = checkpoint();
    for extra in [&[][..], &["--n", "3"]] {
        let mut child = endless(&model, extra);
        let mut first = [0; 64];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        let asked = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        assert!(asked.success());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert!(said.contains(" tokens/s; prompt of 3 tokens"), "{said}");
    }
}

#[test]
fn closed_pipe_stops_generation() {
    let (_folder, model) = checkpoint();
    for extra in [&[][..], &["--json"]] {
        let mut child = endless(&model, extra);
        drop(child.stdout.take());
        let start = std::time::Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(
                start.elapsed() < std::time::Duration::from_secs(60),
                "still running: {extra:?}"
            );
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        assert!(status.success(), "{extra:?}");
    }
}

#[test]
fn bench_decode_prints_the_roofline() {
    let (_folder, model) = checkpoint();
    let args = ["--contexts", "70", "--tokens", "4", "--batches", "3", "--agree", "200"];
    let (json, _) = succeed(&[&["bench", "decode", &model, "--json"], &args[..]].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["single"].as_array().unwrap().len(), 3);
    assert!(json["error_vs_training_forward"].as_f64().unwrap() < 1e-5);
    assert!(json["agreement"]["worst_difference"].as_f64().unwrap() < 1e-3);
    assert!(json["single"][0]["roofline_fraction"].as_f64().unwrap() > 0.0);
}

#[test]
fn bench_throughput_reports_batches_and_prefills() {
    let (_folder, model) = checkpoint();
    let args = ["--context", "10", "--tokens", "8", "--prompt", "100", "--json"];
    // The former spelling works, with a notice for each name.
    for (name, flag, notices) in [("throughput", "--sequences", 0), ("streams", "--streams", 2)] {
        let command = ["bench", name, &model, flag, "1", "--resident", "yes"];
        let (json, said) = succeed(&[&command, &args[..]].concat());
        assert_eq!(said.matches("is now called").count(), notices, "{said}");
        let json: Value = serde_json::from_str(&json).unwrap();
        let row = &json["batches"][0];
        assert_eq!(row["same_bits_as_alone"], true);
        assert_eq!(row["slots"], 0, "a CPU has none");
        assert!(row["tokens_per_s"].as_f64().unwrap() > 0.0);
        assert!(row["roofline_fraction"].as_f64().unwrap() > 0.0);
        assert_eq!(json["prompts"][0]["tokens_per_s"].as_array().unwrap().len(), 3);
    }
}

#[test]
fn bench_capacity_counts_sequences_with_eviction() {
    let (_folder, model) = checkpoint();
    // 544 bytes per token in two layers of two heads: two sequences of 2,048 + 128 tokens fit without eviction. A step has
    // at least one of a prompt's 8 chunks, so the first sequence still decodes when the last prefill ends.
    let sizes = ["--context", "2048", "--sequences", "8", "--cache", "0.0032"];
    let bench = |memory: &str| {
        let command = ["bench", "capacity", &model, "--json", "--memory", memory];
        let (json, _) = succeed(&[&command[..], &sizes].concat());
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["sides"][0]["sequences"], 2, "{json:#}");
        assert!(json["compared_tokens"].as_u64().unwrap() >= 32, "{json:#}");
        for side in json["sides"].as_array().unwrap() {
            assert_eq!(side["preempted"], 0, "{json:#}");
            let peak = side["peak_cache_bytes"].as_u64().unwrap();
            assert!(peak <= json["cache_bytes"].as_u64().unwrap(), "{json:#}");
        }
        json
    };
    let local = bench("1,4");
    assert!(local["ratio"].as_f64().unwrap() >= 2.0, "{local:#}");
    assert!(local["largest_difference"].as_f64().unwrap() < 1e-3, "{local:#}");
    let [keeps, forgets] = [0, 1].map(|side| local["sides"][side]["cache_per_sequence"].as_f64());
    assert!(forgets.unwrap() < 0.5 * keeps.unwrap(), "{local:#}");
    let endless = bench("1e9,1e9");
    assert_eq!(endless["ratio"], 1.0, "{endless:#}");
    assert_eq!(endless["largest_difference"], 0.0, "{endless:#}");
}

#[test]
fn bench_capacity_rejects_invalid_options() {
    let (folder, model) = checkpoint();
    let config = ModelConfig::transformer_pro(32, 2, 2).with_vocab(64);
    let plain = folder.path().join("plain");
    let ungated = Model::init(&config, 1, &fox_cpu::device()).unwrap();
    ungated.save(&plain, &WriteOptions::for_model(&config)).unwrap();
    let plain = plain.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&[&model, "--memory", "0,16"], "two numbers of tokens above 0, the shorter one first"),
        (&[&model, "--memory", "64,16"], "the shorter one first"),
        (&[&model, "--memory", "nan,16"], "the shorter one first"),
        (&[&model, "--memory", "16"], "e.g. 16,1024"),
        (
            &[&model, "--cache", "0.0001", "--context", "2048"],
            "bytes of cache, but the engine has 107374",
        ),
        (&[&model, "--eviction", "off"], "nothing to compare"),
        (&[plain], "has no forget gates"),
        (&["fox-pro-125m"], "say how long heads remember, e.g. --memory 16,1024"),
    ];
    for (args, want) in cases {
        let output = fox(&[&["bench", "capacity"], *args].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(want), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}
