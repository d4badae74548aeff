//! The reference's training runs: 40 steps of AdamW with clipping, warm-up and cosine decay, two
//! micro-batches each. Losses, gradient norms and final weights must be followed by the trainer's parts.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::{Path, PathBuf};

use fox_data::{Batch, LoaderState};
use fox_model::{ForwardOptions, Model, SafetensorsFile, relative_error};
use fox_tensor::{Device, Gradients};
use fox_train::{Decay, Optimizer, OptimizerSettings, Schedule, accumulate};
use serde_json::Value;

/// The hyper-parameters of run.json, as the trainer takes them.
struct Run {
    steps: usize,
    batch: usize,
    time: usize,
    micro_batch: usize,
    schedule: Schedule,
    optimizer: OptimizerSettings,
}

impl Run {
    fn read(file: &Path) -> Run {
        let json: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        let size = |name: &str| json[name].as_u64().unwrap() as usize;
        let real = |name: &str| json[name].as_f64().unwrap();
        let (steps, batch, time) = (size("steps"), size("batch"), size("time"));
        let tokens = (batch * time) as u64;
        Run {
            steps,
            batch,
            time,
            micro_batch: batch / size("accumulation"),
            schedule: Schedule {
                peak: real("peak_lr"),
                warmup: size("warmup_steps") as u64 * tokens,
                total: steps as u64 * tokens,
                decay_tokens: None,
                decay: Decay::Cosine,
                final_fraction: 0.0,
            },
            optimizer: OptimizerSettings {
                peak_lr: real("peak_lr"),
                beta1: json["betas"][0].as_f64().unwrap(),
                beta2: json["betas"][1].as_f64().unwrap(),
                eps: real("eps"),
                weight_decay: real("weight_decay"),
                clip: real("clip"),
            },
        }
    }
}

/// Follows a run and returns the largest relative errors of loss, norm and final weights.
fn follow(name: &str, device: &Device) -> [f64; 3] {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training").join(name);
    let run = Run::read(&dir.join("run.json"));
    let mut file = SafetensorsFile::open(&dir.join("run.safetensors")).unwrap();
    let (ids, labels) = (file.read_i32("input_ids").unwrap(), file.read_i32("labels").unwrap());
    let losses = file.read_f32("loss").unwrap();
    let norms = file.read_f32("grad_norm").unwrap();
    let lrs = file.read_f32("lr").unwrap();

    let mut model = Model::from_checkpoint(&dir, device).unwrap();
    let mut optimizer = Optimizer::new(run.optimizer, model.params(), device).unwrap();
    let rows = run.batch * run.time;
    let mut errors = [0.0f64; 3];
    for step in 0..run.steps {
        let range = step * rows..(step + 1) * rows;
        let batch = Batch {
            inputs: ids[range.clone()].to_vec(),
            labels: labels[range].to_vec(),
            batch: run.batch,
            time: run.time,
            boundaries: None,
            state: LoaderState { next_batch: step as u64 + 1, fingerprint: 0 },
        };
        let lr = run.schedule.lr((step * rows) as u64);
        assert!((lr - f64::from(lrs[step])).abs() < 1e-8, "{name}, step {step}: lr {lr}");
        let (options, mut gradients) = (ForwardOptions::default(), Gradients::default());
        let loss = accumulate(&model, &batch, run.micro_batch, &options, &mut gradients).unwrap();
        let update = optimizer.step(model.params_mut(), &gradients, lr).unwrap();
        assert!(!update.skipped);
        let error = |got: f64, want: f32| (got / f64::from(want) - 1.0).abs();
        errors[0] = errors[0].max(error(loss.mean, losses[step]));
        errors[1] = errors[1].max(error(update.grad_norm, norms[step]));
    }
    assert_eq!(optimizer.updates(), run.steps as u64);
    for (_, spec, value) in model.params().iter() {
        let want = file.read_f32(&format!("final.{}", spec.name)).unwrap();
        errors[2] = errors[2].max(relative_error(&value.to_f64().unwrap(), &want));
    }
    errors
}

fn follows(name: &str, device: &Device) {
    let [loss, norm, weights] = follow(name, device);
    println!("{name} on {device}: loss {loss:.1e}, norm {norm:.1e}, weights {weights:.1e}");
    assert!(loss < 1e-4, "{name} on {device}: a loss is {loss:.2e} away");
    assert!(norm < 1e-3, "{name} on {device}: a gradient norm is {norm:.2e} away");
    assert!(weights < 1e-3, "{name} on {device}: final weights are {weights:.2e} away");
}

#[test]
fn fox_pro_on_cpu() {
    follows("fox_pro", &fox_cpu::device());
}

#[test]
fn fox_llama_on_cpu() {
    follows("fox_llama", &fox_cpu::device());
}

#[test]
fn transformer_llama_on_cpu() {
    follows("transformer_llama", &fox_cpu::device());
}

#[test]
fn fox_pro_on_the_oracle() {
    follows("fox_pro", &Device::naive());
}
