//! Forget gates for models without: they compute the same at first, and what cannot be done is said.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::{Path, PathBuf};

use fox_model::{ForwardOptions, Model, RetrofitOptions, SafetensorsFile, retrofit_checkpoint};
use fox_tensor::{Device, Segments, Tape};

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

/// Logits of `length` tokens.
fn logits(folder: &Path, length: usize) -> Vec<f64> {
    let device = Device::naive();
    let model = Model::from_checkpoint(folder, &device).unwrap();
    let vocab = model.config().vocab_size;
    let ids: Vec<i32> = (0..length).map(|t| ((t * t * 7 + 3 * t) % vocab) as i32).collect();
    let ids = device.from_i32(&ids, [length]).unwrap();
    let (mut tape, segments) = (Tape::inference(&device), Segments::uniform(1, length));
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &ids, &segments, None, &options).unwrap();
    model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap()
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Step 0 of a retrofitted model is the original, over all of its length.
#[test]
fn retrofit_preserves_logits() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "hf_llama_gqa_tied",
        "hf_llama_rope_llama3",
        "hf_mistral_window",
        "hf_qwen2",
        "hf_qwen3",
        "transformer_llama_as_fox",
    ] {
        for output_gate in [false, true] {
            let out = folder.path().join(format!("{name}-{output_gate}"));
            let options = RetrofitOptions { memory: Vec::new(), output_gate };
            let made = retrofit_checkpoint(&dump(name), &out, &options).unwrap();
            assert_eq!(made.to.as_str(), "fox");
            assert!(made.added > 0 && made.decay > 0.0 && made.decay < 1e-8, "{made:?}");
            let error = largest_difference(&logits(&dump(name), 256), &logits(&out, 256));
            assert!(error < 1e-5, "{name}, output gate {output_gate}: {error}");
            if name.starts_with("hf") {
                assert!(out.join("generation_config.json").is_file(), "{name}");
            }
        }
    }
}

#[test]
fn heads_may_have_different_memory_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let options = RetrofitOptions { memory: vec![100.0, 1e7, 300.0, 1e9], output_gate: false };
    let made = retrofit_checkpoint(&dump("hf_qwen2"), &out, &options).unwrap();
    assert!((made.decay - 0.01).abs() < 1e-6, "{}", made.decay);
    let mut file = SafetensorsFile::open(&out.join("model.safetensors")).unwrap();
    let bias = file.read_f32("model.layers.1.attn.fgate_proj.bias").unwrap();
    let memory: Vec<f64> = bias.iter().map(|b| 1.0 / (-f64::from(*b)).exp().ln_1p()).collect();
    for (got, want) in memory.iter().zip(&options.memory) {
        assert!((got / want - 1.0).abs() < 1e-5, "{got} {want}");
    }
    assert!(
        file.read_f32("model.layers.0.attn.fgate_proj.weight").unwrap().iter().all(|w| *w == 0.0)
    );
    // A memory that short changes the logits.
    let error = largest_difference(&logits(&dump("hf_qwen2"), 64), &logits(&out, 64));
    assert!(error > 1e-3, "{error}");
}

#[test]
fn rejects_models_that_cannot_be_retrofitted() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let refused = |name: &str, options: RetrofitOptions| {
        let error = retrofit_checkpoint(&dump(name), &out, &options).unwrap_err().to_string();
        assert!(!out.exists(), "nothing is written");
        error.rsplit(": ").next().unwrap().to_string()
    };
    let memory = |memory: &[f64]| RetrofitOptions { memory: memory.to_vec(), output_gate: false };
    assert_eq!(refused("fox_pro", memory(&[])), "the model has forget gates already");
    assert_eq!(
        refused("mamba2", memory(&[])),
        "gates can be added to attention, but the model is Mamba-2"
    );
    assert_eq!(
        refused("hf_qwen2", memory(&[1e9, 1e9, 1e9])),
        "3 memory lengths do not fit 4 heads; give one or 4"
    );
    assert_eq!(
        refused("hf_qwen2", memory(&[0.0])),
        "a memory of 0 tokens cannot be; give between 1 and 1e30"
    );
}
