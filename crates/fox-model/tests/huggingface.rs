//! Folders of Hugging Face's library: both layouts of config.json, round trips, companions, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fox_model::{
    CheckpointLayout, CheckpointReader, FileDtype, ModelConfig, SafetensorsFile, WriteOptions,
    convert_checkpoint,
};

#[rustfmt::skip]
const DUMPS: [&str; 9] = [
    "hf_llama", "hf_llama_bf16", "hf_llama_gqa_tied", "hf_llama_head_dim", "hf_llama_rope_llama3",
    "hf_llama_sharded", "hf_mistral_window", "hf_qwen2", "hf_qwen3",
];

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

/// Every tensor of a folder by name.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        if !name.ends_with(".safetensors") || name == "io.safetensors" {
            continue;
        }
        let mut file = SafetensorsFile::open(&path).unwrap();
        let names: Vec<String> = file.names().map(String::from).collect();
        for name in names {
            let dims = file.dims(&name).unwrap().to_vec();
            let values = file.read_f32(&name).unwrap();
            assert!(all.insert(name, (dims, values)).is_none());
        }
    }
    all
}

fn convert(from: &Path, to: &Path, layout: CheckpointLayout, shard: Option<u64>) -> String {
    let mut reader = CheckpointReader::open(from).unwrap();
    let model_type = match reader.model_type().layout() == layout {
        true => reader.model_type(),
        false => reader.config().default_model_type(layout),
    };
    let options = WriteOptions { model_type, dtype: FileDtype::F32, max_shard_bytes: shard };
    convert_checkpoint(&mut reader, to, &options).unwrap();
    model_type.as_str().to_string()
}

#[test]
fn conversion_round_trips_tensors_and_tokenizer_files() {
    for name in DUMPS {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        fs::create_dir(&source).unwrap();
        for entry in fs::read_dir(dump(name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, source.join(path.file_name().unwrap())).unwrap();
        }
        fs::write(source.join("chat_template.jinja"), "{{ messages }}").unwrap();
        fs::write(source.join("tokenizer.json"), "{\"version\": 1}").unwrap();
        fs::write(source.join("notes.txt"), "not part of a checkpoint").unwrap();
        let (native, back) = (folder.path().join("native"), folder.path().join("back"));
        let kept = convert(&source, &native, CheckpointLayout::NATIVE, None);
        assert_eq!(kept, "fox", "{name}");
        let kind = convert(&native, &back, CheckpointLayout::HUGGING_FACE, Some(9000));
        let before = CheckpointReader::open(&source).unwrap();
        assert_eq!(kind, before.model_type().as_str(), "{name}");
        assert!(back.join("model.safetensors.index.json").exists(), "{name}");
        assert_eq!(tensors(&back), tensors(&source), "{name}");
        let after = CheckpointReader::open(&back).unwrap();
        assert_eq!(after.config(), before.config(), "{name}");
        for file in ["generation_config.json", "chat_template.jinja", "tokenizer.json"] {
            let (a, b) = (fs::read(source.join(file)), fs::read(back.join(file)));
            assert_eq!(a.unwrap(), b.unwrap(), "{name}/{file}");
        }
        assert!(!back.join("notes.txt").exists());
    }
}

#[test]
fn both_config_layouts_give_the_same_model() {
    for name in ["hf_llama_bf16", "hf_llama_rope_llama3", "hf_mistral_window", "hf_qwen2"] {
        let new = ModelConfig::from_file(&dump(name).join("config.json")).unwrap();
        let old = ModelConfig::from_file(&dump(name).join("config.v4.json")).unwrap();
        assert_eq!(old, new, "{name}");
    }
}

/// The whole of the dumps with the old layout, where they are.
#[test]
fn dumps_of_the_old_layout() {
    let Some(folder) = std::env::var_os("FOX_DUMPS").map(PathBuf::from) else {
        eprintln!("skipped: FOX_DUMPS does not name a folder of dumps");
        return;
    };
    let device = fox_tensor::Device::naive();
    for name in ["hf_llama_bf16", "hf_llama_rope_llama3", "hf_mistral_window", "hf_qwen2"] {
        let path = folder.join(format!("{name}_v4"));
        let report = fox_model::verify_dump(&path, &device, &Default::default()).unwrap();
        assert!(report.passed(), "{name}: {report:#?}");
    }
}

fn refused(json: &str) -> String {
    ModelConfig::from_json(json, Path::new("config.json")).unwrap_err().to_string()
}

#[test]
fn rejects_unsupported_configs() {
    for (json, want) in [
        (
            r#"{"model_type": "llama", "attention_bias": true}"#,
            "config.json: `attention_bias` must be false: biases of the output projection and of the MLP \
             are not supported",
        ),
        (
            r#"{"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}"#,
            "config.json: `rope_type` must be one of \"default\", \"llama3\", not \"yarn\"",
        ),
        (
            r#"{"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}"#,
            "config.json: `partial_rotary_factor` must be 1: heads rotate as a whole",
        ),
        (
            r#"{"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": true, "max_window_layers": 3}"#,
            "config.json: `sliding_window` holds for 1 of 4 layers; it must hold for all of them or for none",
        ),
        (
            r#"{"model_type": "llama", "num_hidden_layers": 4}"#,
            "config.json: `intermediate_size` must be there: the width of the MLP",
        ),
        (
            r#"{"model_type": "llama", "intermediate_size": 512, "head_dim": 20}"#,
            "config.json: `head_dim` gives heads of width 20; the width must be a multiple of 8 up to 256",
        ),
    ] {
        assert_eq!(refused(json), want);
    }
    let message = refused(r#"{"model_type": "gpt_oss"}"#);
    assert!(message.starts_with("config.json: unknown model_type `gpt_oss`; supported are "));
    for known in ["llama", "mistral", "qwen2", "qwen3", "gated_deltanet", "hgrn2", "mamba2"] {
        assert!(message.contains(&format!(" {known}")), "{known} in {message}");
    }
}

#[test]
fn names_options_that_transformers_lacks() {
    let config = ModelConfig::fox_llama(32, 2, 2);
    let kind = config.default_model_type(CheckpointLayout::HUGGING_FACE);
    assert_eq!(
        config.to_json(kind).unwrap_err().to_string(),
        "model_type `llama` cannot express fgate_type \"full\", use_rope false"
    );
}

/// transformers loads what is written and computes the same logits. FOX_TRANSFORMERS names a Python that has it.
#[test]
fn logits_match_transformers() {
    let Some(python) = std::env::var_os("FOX_TRANSFORMERS") else {
        eprintln!("skipped: FOX_TRANSFORMERS does not name a Python with transformers");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/transformers_logits.py");
    let mut command = std::process::Command::new(python);
    command.arg(script);
    for name in DUMPS {
        let (native, written) =
            (folder.path().join(format!("{name}-fox")), folder.path().join(name));
        convert(&dump(name), &native, CheckpointLayout::NATIVE, None);
        convert(&native, &written, CheckpointLayout::HUGGING_FACE, Some(20_000));
        command.arg(written).arg(dump(name));
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), DUMPS.len(), "{text}");
    for (name, line) in DUMPS.iter().zip(lines) {
        println!("{name}: {line}");
        let error: f64 = line.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(error < 5e-6, "{name}: {line}");
    }
}
