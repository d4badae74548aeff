//! `fox eval`, `fox inspect` and `fox compare`.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{dump, fox, refused, small_model, succeed, text};
use fox_data::{SyntheticTokenizer, Tokenizer};
use fox_model::{Model, WriteOptions};
use serde_json::Value;
use tempfile::{TempDir, tempdir};

/// The error message of a command that fails with code 1.
fn complaint(args: &[&str]) -> String {
    let output = fox(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    refused(&output)
}

/// A folder with a small untrained model of the embedded corpus.
fn checkpoint() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("small");
    small_model(&path, |config| {
        // Also covers the byte tokenizer.
        config.vocab_size = 256;
        config.max_position_embeddings = 64;
    });
    (folder, path)
}

#[test]
fn eval_loss_writes_files_and_resumes() {
    let (folder, model) = checkpoint();
    let out = folder.path().join("loss");
    let named = format!("again={}", model.display());
    let args = ["eval", "loss", text(&model), &named, "--length", "128", "--out", text(&out)];
    let printed = succeed(&[&args[..], &["--documents", "3"]].concat());
    assert!(printed.contains("small") && printed.contains("P(128)"), "{printed}");
    let json: Value = serde_json::from_slice(&fs::read(out.join("loss.json")).unwrap()).unwrap();
    let (a, b) = (&json["curves"][0], &json["curves"][1]);
    assert_eq!((a["model"].as_str(), b["model"].as_str()), (Some("small"), Some("again")));
    assert_eq!(a["per_position"], b["per_position"]);
    assert_eq!(a["training_length"], 64);
    // The loss of an untrained model is near that of a uniform guess.
    let mean = a["mean"]["value"].as_f64().unwrap();
    assert!((mean - 256f64.ln()).abs() < 0.3, "{mean}");
    assert_eq!(fs::read_to_string(out.join("loss.csv")).unwrap().lines().count(), 129);
    for svg in ["loss.svg", "slope.svg"] {
        assert!(fs::read_to_string(out.join(svg)).unwrap().ends_with("</svg>\n"));
    }

    let json: Value =
        serde_json::from_str(&succeed(&[&args[..], &["--documents", "5", "--json"]].concat()))
            .unwrap();
    assert_eq!(json[0]["documents"], 5);
    // Another length in the same folder is measured again.
    let shorter = ["eval", "loss", text(&model), "--length", "64", "--out", text(&out)];
    assert!(succeed(&shorter).contains("P(64)"));
}

#[test]
fn untrained_model_finds_no_needles() {
    let (folder, model) = checkpoint();
    let out = folder.path().join("needle");
    let args = ["eval", "needle", text(&model), "--lengths", "32,64", "--depths", "3"];
    let printed = succeed(&[&args[..], &["--cases", "2", "--out", text(&out)]].concat());
    assert!(printed.contains("chance") && printed.contains("100%"), "{printed}");
    let json: Value = serde_json::from_slice(&fs::read(out.join("needle.json")).unwrap()).unwrap();
    let cells = json["maps"][0]["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 6);
    // A row of the table is a depth; the cells are in the order of the lengths.
    for (d, depth) in ["0%", "50%", "100%"].into_iter().enumerate() {
        let row = printed.lines().find(|line| line.split_whitespace().nth(1) == Some(depth));
        let shown = row.unwrap().split(['(', ')']).skip(1).step_by(2);
        let log_prob = |cell: &Value| format!("{:.2}", cell["log_prob"].as_f64().unwrap());
        assert_eq!(shown.collect::<Vec<_>>(), [d, 3 + d].map(|i| log_prob(&cells[i])), "{printed}");
    }
    let scores = fs::read_to_string(out.join("small.scores.jsonl")).unwrap();
    assert_eq!(scores.lines().count(), 1 + 2 * 3 * 2);

    // Any text and any needle, with the tokenizer of bytes.
    let hay = folder.path().join("hay.txt");
    fs::write(&hay, "The sea was calm. ".repeat(60)).unwrap();
    let needle = folder.path().join("needle.toml");
    fs::write(&needle, "needle = 'The key is 7.'\nquestion = 'The key is'\nanswer = ' 7'").unwrap();
    let own = ["--haystack", text(&hay), "--needle", text(&needle), "--tokenizer", "bytes"];
    let out = folder.path().join("own");
    let args =
        ["eval", "needle", text(&model), "--lengths", "200", "--depths", "1", "--cases", "1"];
    succeed(&[&args[..], &own, &["--mode", "standard", "--out", text(&out)]].concat());
    assert!(out.join("needle-small-accuracy.svg").exists());

    // One word out of 16: its rank lies between 1 and 16.
    let out = folder.path().join("words");
    let own = ["--haystack", text(&hay), "--tokenizer", "bytes", "--candidates", "16"];
    let printed = succeed(&[&args[..], &own, &["--out", text(&out)]].concat());
    assert!(printed.contains("chance 6.2%"), "{printed}");
    let json: Value = serde_json::from_slice(&fs::read(out.join("needle.json")).unwrap()).unwrap();
    let rank = json["maps"][0]["cells"][0]["rank"].as_f64().unwrap();
    assert!((1.0..=16.0).contains(&rank), "{rank}");
    assert!(out.join("needle-small-preferred.svg").exists());
}

#[test]
fn ruler_scores_generated_samples_and_files() {
    let (folder, model) = checkpoint();
    let hay = folder.path().join("hay.txt");
    fs::write(&hay, "The sea was calm. ".repeat(60)).unwrap();
    let out = folder.path().join("ruler");
    let args = ["eval", "ruler", text(&model), "--tokenizer", "bytes", "--out", text(&out)];
    let own = ["--haystack", text(&hay), "--lengths", "1024", "--tasks", "qa_1,phonebook"];
    let own = [&args[..], &own, &["--candidates", "4", "--samples", "2"]].concat();
    let printed = succeed(&own);
    assert!(printed.contains("average of RULER's") && printed.contains("chance 25.0"), "{printed}");
    let json: Value = serde_json::from_slice(&fs::read(out.join("ruler.json")).unwrap()).unwrap();
    let cells = json["models"][0]["cells"].as_array().unwrap();
    assert_eq!((cells.len(), &cells[1]["task"]), (2, &Value::from("phonebook")));
    assert_eq!((&cells[0]["samples"], &cells[0]["chance"]), (&2.into(), &0.25.into()));
    assert!(out.join("ruler-small-match.svg").exists() && out.join("ruler-small-top.svg").exists());
    // Stored scores are reused.
    let scores = out.join("small.ruler.jsonl");
    let stored = fs::read_to_string(&scores).unwrap();
    assert_eq!(stored.lines().count(), 1 + 4);
    fs::write(&scores, stored.replace("\"matched\":0.0", "\"matched\":1.0")).unwrap();
    let json: Value = serde_json::from_str(&succeed(&[&own[..], &["--json"]].concat())).unwrap();
    assert_eq!(json["models"][0]["cells"][0]["matched"], 1.0);

    // A file of RULER's.
    let file = folder.path().join("niah.jsonl");
    let line = "{\"index\": 0, \"input\": \"The key is 7. The key is\", \"outputs\": [\"7\"], \"length\": 30}\n";
    fs::write(&file, line.repeat(2)).unwrap();
    let out = folder.path().join("file");
    let args = ["eval", "ruler", text(&model), "--tokenizer", "bytes", "--out", text(&out)];
    let args = [&args[..], &["--file", text(&file), "--max-tokens", "4"]].concat();
    let printed = succeed(&args);
    assert!(printed.contains("niah ") && printed.contains("32"), "{printed}");
    fs::write(&file, line.replace("outputs", "answers")).unwrap();
    let said = complaint(&args);
    assert!(said.contains("niah.jsonl: line 1: the field `outputs` is missing"), "{said}");
}

#[test]
fn boundaries_rank_heads_and_mark_matrices() {
    let (folder, model) = checkpoint();
    let code = folder.path().join("code.txt");
    let file = |i: usize| format!("// src/file{i}.rs\n{}\n", "let x = y + 1;\n".repeat(6));
    fs::write(&code, (0..12).map(file).collect::<String>()).unwrap();
    let out = folder.path().join("boundaries");
    let args = ["eval", "boundaries", text(&model), "--tokenizer", "bytes", "--data", text(&code)];
    let args = [&args[..], &["--length", "512", "--after", "32", "--out", text(&out)]].concat();
    let find = |pattern| [&args[..], &["--boundary", pattern]].concat();
    let printed = succeed(&find(r"^// .*\.rs$"));
    assert!(printed.contains("kept over a boundary") && printed.contains("L1 H1"), "{printed}");
    let json: Value = serde_json::from_slice(&fs::read(out.join("small-1.json")).unwrap()).unwrap();
    assert_eq!(json["heads"].as_array().unwrap().len(), 4);
    assert_eq!(json["heads"][0]["log_gates"].as_array().unwrap().len(), 48);
    // An untrained gate is 1/2 everywhere.
    let gate = json["heads"][3]["log_gates"][7].as_f64().unwrap();
    assert!((gate - 0.5f64.ln()).abs() < 0.3, "{gate}");
    let svgs = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
    let svgs: Vec<PathBuf> = svgs.filter(|path| path.extension().unwrap() == "svg").collect();
    assert_eq!(svgs.len(), 1 + 3);
    let marked = svgs.iter().filter(|svg| fs::read_to_string(svg).unwrap().contains("<circle"));
    assert_eq!(marked.count(), 3);
    assert!(complaint(&find("nothing")).contains("\"nothing\" has no match in 1 documents"));
    assert!(complaint(&find("(")).contains("is not a regular expression: unclosed group"));
}

#[test]
fn inspect_writes_page_and_json() {
    let (folder, model) = checkpoint();
    let page = folder.path().join("page.html");
    let args = ["inspect", text(&model), "--length", "300", "--out", text(&page)];
    let printed = succeed(&[&args[..], &["--heads", "1:0"]].concat());
    assert!(printed.contains("L1 H1") && printed.contains("local"), "{printed}");
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("L1 H0: forget matrix F") && html.contains("attention map A"));
    assert!(!html.contains("src=\"http") && !html.contains("<script"));
    let json: Value =
        serde_json::from_slice(&fs::read(folder.path().join("page.json")).unwrap()).unwrap();
    assert_eq!(json["heads"].as_array().unwrap().len(), 4);
    assert_eq!(json["pictures"][0]["gates"].as_array().unwrap().len(), 300);
    // An untrained gate is 1/2: the half-life is one or two tokens.
    let half_life = json["heads"][0]["half_life"]["median"].as_f64().unwrap();
    assert!((1.0..=2.0).contains(&half_life), "{half_life}");
    let said = complaint(&[&args[..], &["--heads", "2:0"]].concat());
    assert!(said.contains("there is no head 0 in layer 2"), "{said}");
}

/// A folder with the data of two short tasks and of one of LongBench, and its configuration.
fn task_data(folder: &Path) -> PathBuf {
    let data = folder.join("data");
    fs::create_dir_all(&data).unwrap();
    let write = |name: &str, text: &str| fs::write(data.join(name), text).unwrap();
    write(
        "piqa.jsonl",
        "{\"goal\": \"boil water\", \"sol1\": \"a kettle\", \"sol2\": \"a sieve\", \"label\": 0}\n\
         {\"goal\": \"cut paper\", \"sol1\": \"a spoon\", \"sol2\": \"scissors\", \"label\": 1}\n",
    );
    write("lambada_openai.jsonl", "{\"text\": \"the end of the day\"}\n{\"text\": \"no one\"}\n");
    write(
        "trec.jsonl",
        "{\"context\": \"Q: why? Type: reason\", \"input\": \"Q: where?\", \"answers\": [\"place\"], \
          \"all_classes\": [\"place\", \"reason\"]}\n",
    );
    write("dataset2prompt.json", "{\"trec\": \"{context}\\n{input} Type:\"}");
    write("dataset2maxlen.json", "{\"trec\": 4}");
    data
}

#[test]
fn eval_tasks_writes_files_and_reuses_them() {
    let (folder, model) = checkpoint();
    let (data, out) = (task_data(folder.path()), folder.path().join("tasks"));
    let args = ["eval", "tasks", text(&model), "--task-data", text(&data), "--out", text(&out)];
    let args = [&args[..], &["--tokenizer", "bytes", "--longbench", text(&data)]].concat();
    let printed = succeed(&args);
    for part in ["piqa acc_norm", "lambada_openai perplexity", "trec classification"] {
        assert!(printed.contains(part), "{printed}");
    }
    let json: Value = serde_json::from_slice(&fs::read(out.join("tasks.json")).unwrap()).unwrap();
    assert_eq!(json["results"].as_array().unwrap().len(), 3);
    assert_eq!(json["results"][0]["task"], "lambada_openai");
    // An untrained model finds each of 256 bytes about as likely; the last word has one space and "day".
    let sample = fs::read_to_string(out.join("small.lambada_openai.samples.jsonl")).unwrap();
    let sample: Value = serde_json::from_str(sample.lines().next().unwrap()).unwrap();
    let log_prob = sample["log_prob"].as_f64().unwrap();
    assert!((log_prob + 4.0 * 256f64.ln()).abs() < 1.0, "{log_prob}");
    // Stored answers are reused.
    let (path, fake) = (out.join("small.piqa.json"), "\"items\": 77");
    let known = fs::read_to_string(&path).unwrap();
    fs::write(&path, known.replace("\"items\": 2", fake)).unwrap();
    let again: Value = serde_json::from_str(&succeed(&[&args[..], &["--json"]].concat())).unwrap();
    assert_eq!(again["results"][1]["figures"][0]["items"], 77);
    assert!(succeed(&["eval", "tasks", "--list"]).contains("winogrande"));
}

#[test]
fn custom_task_is_read_from_file() {
    let (folder, model) = checkpoint();
    let path = folder.path().join("mine.toml");
    let task = "data = 'items.jsonl'\nmetrics = ['acc', 'acc_bytes', 'exact_match']\n[multiple_choice]\n\
                context = 'Is {{ thing|trim }} alive?'\ncontinuation = ['yes', 'no']\nanswer = '{{ alive }}'\n\
                labels = ['1', '0']\n";
    fs::write(&path, task).unwrap();
    let items =
        "{\"thing\": \" a fox\", \"alive\": true}\n{\"thing\": \"a stone\", \"alive\": false}";
    fs::write(folder.path().join("items.jsonl"), items).unwrap();
    let out = folder.path().join("own");
    let args = ["eval", "tasks", text(&model), "--tokenizer", "bytes", "--tasks", text(&path)];
    let printed = succeed(&[&args[..], &["--out", text(&out)]].concat());
    assert!(printed.contains("mine acc_bytes"), "{printed}");
}

#[test]
fn compare_writes_one_page() {
    let (folder, model) = checkpoint();
    let (data, out) = (task_data(folder.path()), folder.path().join("compare"));
    let named = format!("again={}", model.display());
    let few = ["--length", "128", "--documents", "2", "--lengths", "32,64", "--cases", "1"];
    let rest = ["--depths", "2", "--task-data", text(&data), "--out", text(&out)];
    let one = [&["compare", text(&model)], &few[..], &rest].concat();
    succeed(&one);
    let two = [&["compare", text(&model), &named], &few[..], &rest].concat();
    let printed = succeed(&two);
    assert!(printed.contains("FoX (Pro)") && printed.contains("again"), "{printed}");
    let html = fs::read_to_string(out.join("report.html")).unwrap();
    for part in
        ["Loss at every position", "needles found", "Short tasks", "half-life of every head"]
    {
        assert!(html.contains(part), "{part}");
    }
    let json: Value = serde_json::from_slice(&fs::read(out.join("compare.json")).unwrap()).unwrap();
    assert_eq!(json["models"].as_array().unwrap().len(), 2);
    assert_eq!(
        json["loss"]["curves"][0]["per_position"],
        json["loss"]["curves"][1]["per_position"]
    );
    assert_eq!(json["needle"]["maps"][1]["cells"].as_array().unwrap().len(), 4);
    assert_eq!(json["heads"][0]["heads"].as_array().unwrap().len(), 4);
    let said = complaint(&["compare", text(&model), text(&model), "--out", text(&out)]);
    assert!(said.contains("NAME=PATH"), "{said}");
}

#[test]
fn rejects_invalid_input() {
    let (folder, model) = checkpoint();
    let out = folder.path().join("out");
    let out = ["--out", text(&out)];
    let with = |args: &[&str]| complaint(&[args, &out].concat());

    let said = with(&["eval", "loss", "nowhere"]);
    assert!(said.contains("nowhere"), "{said}");
    // The dumps have 64 ids and no tokenizer.
    let small = dump("fox_pro");
    let said = with(&["eval", "loss", &small, "--tokenizer", "synthetic"]);
    assert!(said.contains("has 64 token ids, but the data has 90"), "{said}");
    let said = with(&["eval", "needle", &small]);
    assert!(said.contains("--tokenizer"), "{said}");
    let said = with(&["inspect", &small, "--tokenizer", "gpt2"]);
    assert!(said.contains("has 64 token ids, but the tokenizer has 50257"), "{said}");

    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    let bytes = ["--tokenizer", "bytes"];
    let said =
        with(&[&["eval", "loss", text(&model), "--data", text(&empty)], &bytes[..]].concat());
    assert!(said.contains("empty"), "{said}");
    let said =
        with(&[&["eval", "needle", text(&model), "--haystack", text(&empty)], &bytes[..]].concat());
    assert!(said.contains("empty"), "{said}");
    let said = with(&["eval", "loss", text(&model), "--data", "missing.txt"]);
    assert!(said.contains("missing.txt"), "{said}");

    let data = task_data(folder.path());
    let tasks = ["eval", "tasks", text(&model), "--tokenizer", "bytes", "--task-data", text(&data)];
    let said = with(&[&tasks[..], &["--tasks", "pika"]].concat());
    assert!(said.contains("there is no task pika; did you mean piqa?"), "{said}");
    let said = with(&[&tasks[..], &["--tasks", "sciq"]].concat());
    assert!(said.contains("no data of task sciq"), "{said}");
    fs::write(data.join("sciq.jsonl"), "{\"support\": \"s\", \"question\": \"q\"}").unwrap();
    let said = with(&[&tasks[..], &["--tasks", "sciq"]].concat());
    assert!(said.contains("has no column \"distractor1\" (it has support, question)"), "{said}");
    let tokenizer = ["--tokenizer", "bytes", "--task-data", text(&data), "--tasks", "piqa"];
    let said = with(&[&["eval", "tasks", &small], &tokenizer[..]].concat());
    assert!(said.contains("has 64 token ids, but the tokenizer has 256"), "{said}");
    // The error of the operating system is printed once.
    let hay = ["--haystack", text(&empty), "--needle", "gone.toml", "--tokenizer", "bytes"];
    let said = with(&[&["eval", "needle", text(&model)], &hay[..]].concat());
    assert_eq!(said, "error: cannot read gone.toml: No such file or directory (os error 2)");
}

/// A copy of a checkpoint whose output projection is `value` throughout.
fn damaged(folder: &Path, model: &Path, value: f32) -> PathBuf {
    let path = folder.join(format!("damaged{value}"));
    let mut damaged = Model::from_checkpoint(model, &fox_cpu::device()).unwrap();
    // `fox inspect` does not use the output projection.
    for name in ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"] {
        let id = damaged.params().find(name).unwrap();
        let tensor = damaged.params().value(id).clone();
        let filled = tensor.device().full(tensor.shape(), value).unwrap();
        damaged.params_mut().set(id, filled).unwrap();
    }
    damaged.save(&path, &WriteOptions::for_model(damaged.config())).unwrap();
    Tokenizer::Synthetic(SyntheticTokenizer).save(&path).unwrap();
    path
}

/// All result files below a folder, without lists of scores that have a header only.
fn results(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        let is_head = path.to_string_lossy().ends_with(".scores.jsonl")
            && fs::read_to_string(&path).unwrap().lines().count() == 1;
        match path.is_dir() {
            true => found.extend(results(&path)),
            false if is_head => {}
            false => found.push(path),
        }
    }
    found
}

/// Every evaluation of a model with NaN or infinities is an error with exit code 1 and writes no files.
#[test]
fn nan_model_fails_evaluation() {
    let (folder, model) = checkpoint();
    let data = task_data(folder.path());
    for value in [f32::NAN, f32::INFINITY] {
        let bad = damaged(folder.path(), &model, value);
        let out = folder.path().join(format!("out{value}"));
        let page = out.join("page.html");
        let named = format!("good={}", model.display());
        let length = ["--length", "128", "--documents", "2"];
        let needles = ["--lengths", "32,64", "--depths", "2", "--cases", "1"];
        let tasks = ["--task-data", text(&data), "--tasks", "piqa"];
        let commands: [Vec<&str>; 5] = [
            [&["eval", "loss", text(&bad), &named, "--out", text(&out)], &length[..]].concat(),
            [&["eval", "needle", text(&bad), "--out", text(&out)], &needles[..]].concat(),
            [
                &["eval", "tasks", text(&bad), "--out", text(&out), "--tokenizer", "bytes"],
                &tasks[..],
            ]
            .concat(),
            [&["compare", text(&bad), "--out", text(&out)], &length[..], &needles[..]].concat(),
            vec!["inspect", text(&bad), "--length", "100", "--out", text(&page)],
        ];
        for command in commands {
            let said = complaint(&command);
            assert!(said.contains("which is not a finite number"), "{command:?}: {said}");
            assert!(said.contains(&format!("damaged{value}")), "{command:?}: {said}");
            assert_eq!(results(&out), Vec::<PathBuf>::new(), "{command:?}");
        }
    }
}
