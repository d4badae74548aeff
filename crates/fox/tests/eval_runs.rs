//! Evaluation of run folders: on the data of the run, at its newest checkpoint, under distinct names.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{complaint, outcome, recipe, run, stderr, text};
use serde_json::Value;

/// 20 steps on a corpus that is not the default one.
const SHORT: [&str; 8] = [
    "--set",
    "training.tokens=5120",
    "--set",
    "data.synthetic.seed=7",
    "--set",
    "optimizer.peak_lr=2e-2",
    "--device",
    "cpu",
];

fn json(args: &[&str]) -> Value {
    let (done, printed, said) = outcome(&[args, &["--json", "--device", "cpu"]].concat());
    assert!(done, "{said}");
    serde_json::from_str(&printed).unwrap()
}

/// Trains a run; returns its folder and output.
fn trained(dir: &Path, name: &str, extra: &[&str]) -> (PathBuf, String) {
    let out = dir.join(name);
    let output = run(&recipe(dir), &out, &[&SHORT[..], extra].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    (out, String::from_utf8(output.stdout).unwrap())
}

/// An evaluation of the documents that training evaluates on.
fn loss_args<'a>(model: &'a Path, out: &'a Path) -> [&'a str; 9] {
    let (model, out) = (text(model), text(out));
    ["eval", "loss", model, "--length", "64", "--documents", "4", "--out", out]
}

/// The held-out loss at the end of training.
fn loss_of(run: &Path) -> f64 {
    let summary: Value =
        serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
    summary["evaluation"]["loss"].as_f64().unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-5
}

#[test]
fn train_and_eval_report_same_heldout_loss() {
    let dir = tempfile::tempdir().unwrap();
    let (run, printed) = trained(dir.path(), "run", &[]);
    let name = "held-out loss (4 x 64 tokens)";
    assert!(printed.contains(name), "{printed}");
    // The head of a wide table has several lines.
    let names_it = |printed: &str| name.split(' ').all(|word| printed.contains(word));
    let figure = format!("{:.4}", loss_of(&run));
    let out = dir.path().join("loss");
    let args = loss_args(&run, &out);
    let (done, printed, said) = outcome(&args);
    assert!(done && names_it(&printed) && printed.contains(&figure), "{printed}{said}");
    let found = json(&args)[0]["mean"]["value"].as_f64().unwrap();
    assert!(near(found, loss_of(&run)), "{found} {}", loss_of(&run));

    let out = dir.path().join("compare");
    let small =
        ["--length", "64", "--documents", "4", "--lengths", "32", "--cases", "1", "--depths", "1"];
    let args = [&["compare", text(&run)], &small[..], &["--out", text(&out)]].concat();
    let (done, printed, said) = outcome(&args);
    assert!(done && names_it(&printed) && printed.contains(&figure), "{printed}{said}");
    let html = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(html.contains("Learning curves"));

    // The exported weights have no reference to the corpus of the run.
    let bare = dir.path().join("bare");
    copy(&run.join("export"), &bare);
    let out = dir.path().join("bare-loss");
    let args = loss_args(&bare, &out);
    let other = json(&args)[0]["mean"]["value"].as_f64().unwrap();
    assert!((other - found).abs() > 1e-3, "{other} {found}");
    // The corpus can be given by a flag.
    let out = dir.path().join("lent-loss");
    let with = ["--length", "64", "--documents", "4", "--out", text(&out), "--data", text(&run)];
    let same = json(&[&["eval", "loss", text(&bare)], &with[..]].concat());
    assert!(near(same[0]["mean"]["value"].as_f64().unwrap(), found));
    let both = ["eval", "loss", text(&run), text(&bare), "--length", "64", "--documents", "4"];
    let out = dir.path().join("both");
    let said = complaint(&[&both[..], &["--out", text(&out)]].concat());
    assert_eq!(
        said,
        "error: bare has other held-out data than run, so their losses cannot be compared; name data for both with \
         --data, e.g. one of the run folders"
    );
}

#[test]
fn needles_use_the_corpus_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let (run, _) = trained(dir.path(), "run", &[]);
    let bare = dir.path().join("bare");
    copy(&run.join("export"), &bare);
    let cases = |model: &Path, name: &str| {
        let out = dir.path().join(name);
        let args =
            ["eval", "needle", text(model), "--lengths", "64", "--cases", "1", "--depths", "1"];
        json(&[&args[..], &["--out", text(&out)]].concat())["cases"].as_str().unwrap().to_string()
    };
    let seed = |seed| fox_data::SyntheticConfig { seed, ..Default::default() }.held_out().seed;
    let (own, default) = (cases(&run, "own"), cases(&bare, "default"));
    assert!(own.contains(&seed(7).to_string()), "{own}");
    assert!(default.contains(&seed(0).to_string()), "{default}");
    let out = dir.path().join("both");
    let args = ["eval", "needle", text(&run), text(&bare), "--lengths", "64", "--cases", "1"];
    let said = complaint(&[&args[..], &["--depths", "1", "--out", text(&out)]].concat());
    assert!(said.contains("bare has other needles than run"), "{said}");
}

#[test]
fn unfinished_run_is_evaluated_at_newest_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (run, _) = trained(dir.path(), "run", &[]);
    let loss = loss_of(&run);
    fs::remove_dir_all(run.join("export")).unwrap();
    fs::remove_file(run.join("summary.json")).unwrap();
    let out = dir.path().join("loss");
    let args = loss_args(&run, &out);
    let (done, printed, said) = outcome(&args);
    assert!(done && printed.contains("run@20"), "{printed}{said}");
    assert_eq!(said, format!("{} is not finished: evaluated after step 20 of 20\n", run.display()));
    assert!(near(json(&args)[0]["mean"]["value"].as_f64().unwrap(), loss));
    // The newest checkpoint is lost; the previous one is used.
    fs::remove_file(run.join("checkpoints/step-00000020/manifest.json")).unwrap();
    let (done, printed, said) = outcome(&args);
    assert!(done && printed.contains("run@18") && said.contains("after step 18 of 20"), "{said}");
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let said = complaint(&args);
    assert!(
        said.contains("holds no checkpoint yet; train until the first one is written"),
        "{said}"
    );
}

#[test]
fn runs_of_equal_name_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    let (a, _) = trained(dir.path(), "a/tiny", &[]);
    let (b, _) = trained(dir.path(), "b/tiny", &["--set", "training.seed=1"]);
    let out = dir.path().join("loss");
    let args = ["eval", "loss", text(&a), text(&b), "--length", "64", "--documents", "4"];
    let found = json(&[&args[..], &["--out", text(&out)]].concat());
    assert_eq!((&found[0]["model"], &found[1]["model"]), (&"tiny (a)".into(), &"tiny (b)".into()));
    for (i, run) in [&a, &b].into_iter().enumerate() {
        assert!(near(found[i]["mean"]["value"].as_f64().unwrap(), loss_of(run)), "{i}");
    }
    let svg = fs::read_to_string(out.join("loss.svg")).unwrap();
    assert!(svg.contains("tiny (a)") && svg.contains("tiny (b)"));
}

/// Prepares documents of these lengths (in bytes), half of them held out.
fn prepared(dir: &Path, name: &str, lens: &[usize]) -> PathBuf {
    let (corpus, heldout) =
        (dir.join(format!("{name}.jsonl")), dir.join(format!("{name}-h.jsonl")));
    let line = |salt: usize, len: usize| {
        let word = |i: usize| ["sea ", "sun ", "fox ", "den "][(i * i / 3 + salt * i + salt) % 4];
        let text: String = (0..len / 4).map(word).collect();
        format!("{{\"text\": \"{}\"}}\n", &text)
    };
    let lines = |salt: usize| -> String {
        lens.iter().enumerate().map(|(i, len)| line(salt + 2 * i, *len)).collect()
    };
    fs::write(&corpus, lines(0)).unwrap();
    fs::write(&heldout, lines(1)).unwrap();
    let out = dir.join(name);
    let args = ["prepare", text(&corpus), text(&out), "--tokenizer", "bytes"];
    let (done, _, said) = outcome(&[&args[..], &["--heldout-corpus", text(&heldout)]].concat());
    assert!(done, "{said}");
    out
}

#[test]
fn eval_finds_prepared_data_of_run() {
    let dir = tempfile::tempdir().unwrap();
    let data = prepared(dir.path(), "data", &[400, 400, 60, 400]);
    let (run, _) = trained(dir.path(), "run", &["--data", text(&data)]);
    let out = dir.path().join("loss");
    let args = loss_args(&run, &out);
    let found = json(&args);
    assert!(near(found[0]["mean"]["value"].as_f64().unwrap(), loss_of(&run)), "{found}");
    assert_eq!((&found[0]["documents"], &found[0]["pieces"]), (&3.into(), &4.into()));
    // Needles lie in the held-out text.
    let out = dir.path().join("needle");
    let args = ["eval", "needle", text(&run), "--lengths", "256", "--cases", "1", "--depths", "1"];
    json(&[&args[..], &["--out", text(&out)]].concat());

    let said = complaint(&["eval", "loss", text(&run), "--out", text(&dir.path().join("long"))]);
    assert_eq!(
        said,
        "error: no document has 2048 tokens (the longest has 401); use a shorter length"
    );
    fs::rename(&data, dir.path().join("away")).unwrap();
    let said =
        complaint(&["eval", "loss", text(&run), "--out", text(&dir.path().join("away-loss"))]);
    assert!(said.contains("the data of ") && said.ends_with("; name them with --data"), "{said}");
}

#[test]
fn short_and_single_documents_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let short = prepared(dir.path(), "short", &[100, 100, 100, 100, 100]);
    let out = dir.path().join("run");
    let file = recipe(dir.path());
    let long = ["--data", text(&short), "--set", "evaluation.length=128"];
    let output = run(&file, &out, &[&SHORT[..], &long].concat());
    assert_eq!(
        stderr(&output),
        "error: no held-out document has 128 tokens (the longest has 101); lower evaluation.length, or set \
         evaluation.sequences to 0 for no evaluation\n"
    );
    assert!(!out.exists());
    let single = prepared(dir.path(), "single", &[1000]);
    let (run, _) = trained(dir.path(), "one", &["--data", text(&single)]);
    let out = dir.path().join("loss");
    let args = loss_args(&run, &out);
    let (done, _, said) = outcome(&args);
    assert!(done, "{said}");
    assert_eq!(
        said,
        "only one document has 64 tokens, so the intervals are over its 4 chunks, which are not independent\n"
    );
    let found = &json(&args)[0]["mean"];
    assert!(found["low"].as_f64() < found["high"].as_f64(), "{found}");
}

/// `--split` selects training or held-out documents, and the output names the split.
#[test]
fn either_split_can_be_measured() {
    let dir = tempfile::tempdir().unwrap();
    let data = prepared(dir.path(), "data", &[300, 200, 100]);
    let (run, _) = trained(dir.path(), "run", &["--data", text(&data)]);
    let out = dir.path().join("out");
    let evaluate = |split: &str| {
        let args = ["eval", "loss", text(&run), "--split", split, "--length", "32"];
        let (done, printed, said) =
            outcome(&[&args[..], &["--out", text(&out), "--device", "cpu"]].concat());
        assert!(done, "{said}");
        printed
    };
    let (train, heldout) = (evaluate("train"), evaluate("heldout"));
    assert!(train.contains("training loss") && !train.contains("held-out"), "{train}");
    assert!(heldout.contains("held-out loss"), "{heldout}");
    let report = fs::read_to_string(out.join("loss.json")).unwrap();
    assert!(report.contains("\"trained_on\": false"), "{report}");
    // Their resumable states are separate.
    for name in ["run.state.json", "run.train.state.json"] {
        assert!(out.join(name).is_file(), "{name}");
    }
}
