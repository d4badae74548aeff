//! Output and exit codes of the commands.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::Path;

use common::{dump, fox, stderr, stdout, text};
use serde_json::{Value, json};
use tempfile::tempdir;

#[test]
fn verify_prints_pass_last() {
    let output = fox(&["verify", &dump("fox_pro"), &dump("fox_pro_left_padded")]);
    assert!(output.status.success(), "{}", stderr(&output));
    let printed = stdout(&output);
    assert_eq!(printed.lines().last(), Some("PASS: 44 comparisons"));
    assert_eq!(printed.matches("PASS: 44 comparisons").count(), 2);
    assert!(printed.contains("grad.model.layers.1.attn.k_proj.shift_proj.weight"));
}

#[test]
fn verify_exits_with_1_beyond_tolerance() {
    let output = fox(&["verify", &dump("fox_llama"), "--tol-grad", "1e-12", "--device", "naive"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).lines().last().unwrap().starts_with("FAIL: "));
}

#[test]
fn verify_json_reports_every_folder() {
    let output = fox(&["verify", "--json", &dump("no_such_dump"), &dump("fla_fox")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: "));
    let json: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(json["passed"], false);
    assert!(json["dumps"][0]["error"].as_str().unwrap().contains("no_such_dump"));
    assert_eq!(json["dumps"][1]["passed"], true);
    let names: Vec<&str> = json["dumps"][1]["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| check["name"].as_str().unwrap())
        .collect();
    assert!(names.contains(&"grad.model.layers.0.mlp.up_proj.weight"), "{names:?}");
    assert!(names.contains(&"grad.model.layers.0.attn.f_proj.bias"), "{names:?}");
}

/// Predictions of `fox_train::cluster`, computed by hand.
#[test]
fn info_predicts_step_on_many_devices() {
    let small = ["info", "fox-pro-125m", "--set", "training.batch=32"];
    let plan = |more: &[&str]| fox(&[&small[..], more].concat());
    let output = plan(&[
        "--gpus",
        "8",
        "--nodes",
        "4",
        "--link",
        "450GB/s",
        "--network",
        "50GB/s",
        "--json",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let json: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let contexts: Vec<u64> =
        json["plans"].as_array().unwrap().iter().map(|p| p["context"].as_u64().unwrap()).collect();
    assert_eq!(contexts, [1, 2, 4, 8, 16, 32]);
    assert_eq!(json["best_context"], 1, "rows that fit need no division of sequences");
    let first = &json["plans"][0];
    let number = |name: &str| first[name].as_f64().unwrap();
    let parameters = 8.0 * 31.0 / 32.0 * 162_508_176.0;
    assert!((number("gradient_bytes") / parameters - 1.0).abs() < 1e-9, "{first}");
    assert!((number("gradient_seconds") / (parameters / 31.0 * 24.0 / 50e9) - 1.0).abs() < 1e-9);
    let sum = number("compute_seconds") + number("gradient_seconds") + number("key_seconds");
    assert_eq!(number("step_seconds"), sum);
    assert!(number("overlapped_seconds") < sum);
    let printed = stdout(&plan(&["--gpus", "2", "--step", "3"]));
    assert!(printed.contains("1.50 s"), "half of a measured step: {printed}");
    assert!(printed.ends_with("best: parallel.context=1, 2 x 1 ranks\n"), "{printed}");
    for (more, words) in [
        (
            &["--gpus", "7"][..],
            "no way to divide training.batch=32 x data.sequence_length=16384 among 7 ranks",
        ),
        (&["--gpus", "8", "--link", "quick"], "`quick` must be a number of bytes, e.g. 450GB/s"),
        (&["--gpus", "8", "--fetched", "2"], "--fetched is 2; use a fraction between 0 and 1"),
    ] {
        let output = plan(more);
        assert!(!output.status.success() && stderr(&output).contains(words), "{}", stderr(&output));
    }
}

#[test]
fn info_counts_parameters_and_memory() {
    let output = fox(&["info", "fox-pro-125m", "--seq", "16384", "--json"]);
    let json: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(json["parameters"]["total"], 162_508_176);
    // 12 layers, 768 keys, 768 values and 12 gates per token, 2 x 768 shift states, 4 bytes each.
    let cache = 12 * 4 * (16384 * (2 * 768 + 12) + 2 * 768);
    assert_eq!(json["memory"]["cache_bytes"], f64::from(cache));
    let printed = stdout(&fox(&["info", &dump("fox_pro_fixed_alibi")]));
    assert!(printed.contains("forget gate fixed per head"), "{printed}");
    assert!(printed.contains("not trained"), "{printed}");
}

#[test]
fn convert_to_fla_round_trips() {
    let temp = tempdir().unwrap();
    let (fla, back) = (temp.path().join("fla"), temp.path().join("back"));
    let output = fox(&[
        "convert",
        &dump("fox_llama"),
        text(&fla),
        "--to",
        "fla",
        "--max-shard-size",
        "20KB",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(fla.join("model.safetensors.index.json").exists());
    assert!(fox(&["convert", text(&fla), text(&back), "--to", "official"]).status.success());
    // The tensors are unchanged: the result still matches the dump.
    for dir in [&fla, &back] {
        fs::copy(Path::new(&dump("fox_llama")).join("io.safetensors"), dir.join("io.safetensors"))
            .unwrap();
    }
    assert!(fox(&["verify", text(&back)]).status.success());
    let output = fox(&["verify", text(&fla)]);
    assert!(stderr(&output).contains("the dump has no gradient of"), "{}", stderr(&output));
}

#[test]
fn convert_keeps_model_type_of_matching_layout() {
    let temp = tempdir().unwrap();
    let out = temp.path().join("out");
    let from = dump("transformer_llama_as_fox");
    assert!(fox(&["convert", &from, text(&out), "--to", "official"]).status.success());
    let config: Value =
        serde_json::from_str(&fs::read_to_string(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "forgetting_transformer-project_fox");
    // Every field of the reference configuration round-trips.
    let reference = fs::read_to_string(Path::new(&from).join("config.json")).unwrap();
    let reference: Value = serde_json::from_str(&reference).unwrap();
    for (field, value) in config.as_object().unwrap() {
        let free = ["architectures", "dtype", "torch_dtype", "use_cache"];
        if !free.contains(&field.as_str()) {
            assert_eq!(reference.get(field), Some(value), "{field}");
        }
    }
}

#[test]
fn convert_rejects_invalid_input() {
    let temp = tempdir().unwrap();
    let out = temp.path().join("out");
    let output = fox(&["convert", &dump("fox_pro"), text(&out), "--to", "fla"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.starts_with("error: ") && said.trim_end().lines().count() == 1, "{said}");
    assert!(said.contains("use_k_shift, use_v_shift, use_output_norm"), "{said}");
    assert!(!out.exists());

    fs::create_dir(&out).unwrap();
    fs::write(out.join("precious"), "x").unwrap();
    let output = fox(&["convert", &dump("fox_llama"), text(&out), "--to", "fla"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("not an empty folder"), "{}", stderr(&output));
}

#[test]
fn bf16_export_halves_the_file() {
    let temp = tempdir().unwrap();
    let size = |dtype: &str| {
        let out = temp.path().join(dtype);
        let (from, to) = (dump("fox_llama"), text(&out));
        let args = ["convert", &from, to, "--to", "official", "--dtype", dtype];
        assert!(fox(&args).status.success());
        fs::metadata(out.join("model.safetensors")).unwrap().len()
    };
    let (full, half) = (size("f32"), size("bf16"));
    assert!(half * 2 < full + 4096 && half * 2 > full, "{half} {full}");
}

/// `fox info` takes a recipe; memory is computed at its sequence length.
#[test]
fn info_describes_recipes_and_runs() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("mine.toml");
    let recipe = "extends = \"tiny-fox-pro\"\n[training]\ntokens = 8192\nbatch = 4\n";
    fs::write(&file, format!("{recipe}[data]\nsequence_length = 128\n")).unwrap();
    let file = file.to_str().unwrap();
    let printed = stdout(&fox(&["info", file]));
    assert!(printed.starts_with(&format!("{file} (recipe)\n")), "{printed}");
    assert!(printed.contains("memory for 4 x 128 tokens"), "{printed}");
    let printed: Value = serde_json::from_str(&stdout(&fox(&["info", file, "--json"]))).unwrap();
    assert_eq!(printed["training"], json!({ "tokens": 8192, "steps": 16, "tokens_per_step": 512 }));
    let built_in: Value =
        serde_json::from_str(&stdout(&fox(&["info", "tiny-fox-pro", "--seq", "64", "--json"])))
            .unwrap();
    assert_eq!(built_in["parameters"], printed["parameters"]);
    assert_eq!(built_in["memory"]["seq"], 64);
    // A published configuration takes precedence over a recipe of the same name.
    assert!(
        stdout(&fox(&["info", "fox-pro-125m"]))
            .starts_with("fox-pro-125m (published configuration)")
    );
}

#[test]
fn invalid_usage_exits_with_2() {
    for args in [&["info", "nowhere"][..], &["verify", "nowhere"], &["info", "."]] {
        let output = fox(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let said = stderr(&output);
        assert!(said.starts_with("error: ") && said.trim_end().lines().count() == 1, "{said}");
    }
    for args in [
        &["verify"][..],
        &["convert", "a", "b"],
        &["convert", "a", "b", "--to", "fla", "--max-shard-size", "9XB"],
        &["info", "fox-pro-125m", "--seq", "0"],
        &["frobnicate"],
    ] {
        assert_eq!(fox(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn help_documents_memory_formula() {
    let help = stdout(&fox(&["info", "--help"]));
    assert!(help.contains("weights 4P + gradients 4P + AdamW moments 8P"), "{help}");
}

#[test]
fn acp_without_value_precedes_another_flag() {
    for acp in [&["--acp"][..], &["--acp", "-5"], &["--acp=-5"]] {
        let sizes = ["bench", "attention", "--seq", "128", "--heads", "1", "--head-dim", "8"];
        let output = fox(&[&sizes, acp, &["--repeat", "1"]].concat());
        assert!(output.status.success(), "{acp:?}: {}", stderr(&output));
        assert!(stdout(&output).contains("blocks pruned"), "{acp:?}");
    }
}

#[test]
fn selftest_without_cases_fails() {
    let output = fox(&["selftest", "--device", "cpu", "--only", "atention"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no case name contains `atention`"));
    let output = fox(&["selftest", "--device", "cpu", "--only", "pages", "no-such-dump"]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stdout(&output).contains("no-such-dump: FAIL folder"), "{}", stdout(&output));
    let output = fox(&["selftest", "--device", "cpu", "--only", "pages", &dump("fox_pro")]);
    assert!(output.status.success(), "{}", stdout(&output));
    assert!(stdout(&output).contains("44 comparisons agree"), "{}", stdout(&output));
}

/// On CPUs that round activations to 8 bits, decoding and the forward pass differ by roundings.
#[test]
fn selftest_of_8_bit_decoding_passes() {
    let output =
        fox(&["selftest", "--device", "cpu", "--random", "0", "--only", "decoding/fox-pro-8-bit"]);
    assert!(output.status.success(), "{}", stdout(&output));
}

#[test]
fn bench_hybrid_sums_layers() {
    let sizes =
        ["--seq", "32", "--batch", "1", "--vocab", "64", "--repeat", "1", "--device", "cpu"];
    let output = fox(&[&["bench", "hybrid", "tiny-hybrid", "--json"], &sizes[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let hybrid = &report["hybrids"][0];
    assert_eq!(hybrid["layers"], serde_json::json!(["fox", "window:64", "gated-delta-net"]));
    assert!(hybrid["error_vs_oracle"].as_f64().unwrap() < 1e-4);
    let alone = hybrid["alone_ms"].as_object().unwrap().values().map(|ms| ms.as_f64().unwrap());
    let (sum, step) = (hybrid["sum_ms"].as_f64().unwrap(), hybrid["ms_per_step"].as_f64().unwrap());
    assert!((alone.sum::<f64>() / 3.0 / sum - 1.0).abs() < 1e-9, "each is a third of the layers");
    assert!((step / sum / hybrid["ratio"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    let output = fox(&[&["bench", "hybrid", "tiny-fox-pro"], &sizes[..]].concat());
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("has no model.mixers, so it is not a hybrid"),
        "{}",
        stderr(&output)
    );
}
