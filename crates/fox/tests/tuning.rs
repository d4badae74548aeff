//! `fox retrofit`, `fox convert --to hf` and `fox train --init`.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{recipe, refused, result, run, stderr, succeeded};

fn fox(args: &[&dyn AsRef<std::ffi::OsStr>]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox"))
        .args(args.iter().map(|arg| arg.as_ref()))
        .output()
        .unwrap()
}

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

#[test]
fn retrofit_adds_gates_to_llama() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("gated");
    let said = succeeded(&fox(&[&"retrofit", &dump("hf_qwen3"), &out]));
    assert!(
        said.contains("(qwen3) -> ") && said.contains("(fox), 19,812 parameters, 132"),
        "{said}"
    );
    assert!(said.ends_with(" of them new; a gate forgets 3.9e-9 nat per token\n"), "{said}");
    let said = succeeded(&fox(&[&"info", &out]));
    assert!(said.contains("forget gate from the input") && said.contains("RoPE 1000000"), "{said}");
    // Hugging Face layouts have no forget gates.
    let said = refused(&fox(&[&"convert", &out, &dir.path().join("back"), &"--to", &"hf"]));
    assert!(said.contains("cannot express fgate_type \"full\""), "{said}");
    let said = refused(&fox(&[&"retrofit", &dump("hf_qwen3"), &out]));
    assert!(said.contains("exists and is not an empty folder"), "{said}");
    let said = refused(&fox(&[
        &"retrofit",
        &dump("hf_qwen3"),
        &dir.path().join("x"),
        &"--memory",
        &"9,9,9",
    ]));
    assert!(said.ends_with("3 memory lengths do not fit 2 heads; give one or 2"), "{said}");
    let spread = dir.path().join("spread");
    let said =
        succeeded(&fox(&[&"retrofit", &dump("hf_qwen3"), &spread, &"--gate-init", &"spread"]));
    assert!(said.ends_with(" of them new; a gate forgets 1.0e0 nat per token\n"), "{said}");
    let start = [&"--gate-init" as &dyn AsRef<std::ffi::OsStr>, &"64,8"];
    let said =
        refused(&fox(&[&"retrofit", &dump("hf_qwen3"), &dir.path().join("x"), start[0], start[1]]));
    assert!(said.ends_with("give `spread` or SHORTEST,LONGEST in tokens, e.g. 8,512"), "{said}");
}

#[test]
fn fine_tunes_from_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, first) = (recipe(dir.path()), dir.path().join("first"));
    let short = ["--set", "training.tokens=2560", "--quiet"];
    assert!(run(&recipe, &first, &short).status.success());
    let tune = |out: &Path, init: &Path| {
        let mut extra = short.to_vec();
        let init = init.to_str().unwrap();
        extra.extend(["--init", init, "--set", "training.train=[\"gates\"]"]);
        succeeded(&run(&recipe, out, &extra));
        result(out)
    };
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    // A run folder stands for its export.
    let tuned = tune(&a, &first.join("export"));
    assert!(tuned == tune(&b, &first));
    assert!(tuned.0 != result(&first).0);
    let missing = dir.path().join("frist");
    let output = run(&recipe, &dir.path().join("c"), &["--init", missing.to_str().unwrap()]);
    let hint = format!("did you mean {}?", first.display());
    assert!(refused(&output).contains(&hint), "{}", stderr(&output));
    for command in ["info", "verify", "inspect"] {
        let said = refused(&fox(&[&command, &dir.path()]));
        assert!(
            said.contains("config.json") || said.contains("io.safetensors"),
            "{command}: {said}"
        );
    }
    let said = refused(&fox(&[&"retrofit", &dir.path().join("nothing"), &dir.path().join("d")]));
    assert!(said.contains("a checkpoint folder holds config.json"), "{said}");
}
