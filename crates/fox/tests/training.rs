//! The reference's training runs: 40 steps of AdamW with clipping, warm-up and cosine decay, two
//! micro-batches each. Losses, gradient norms and final weights must be followed.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::f64::consts::PI;
use std::fs;
use std::path::PathBuf;

use fox_model::{ForwardOptions, Model, SafetensorsFile, relative_error};
use fox_tensor::{AdamW, DType, Device, Gradients, Segments, Tape, Tensor};
use serde_json::Value;

/// The hyper-parameters of run.json.
struct Run {
    steps: usize,
    batch: usize,
    time: usize,
    accumulation: usize,
    peak_lr: f64,
    warmup_steps: usize,
    weight_decay: f64,
    betas: [f64; 2],
    eps: f64,
    clip: f64,
}

impl Run {
    fn read(file: &std::path::Path) -> Run {
        let json: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        let size = |name: &str| json[name].as_u64().unwrap() as usize;
        let real = |name: &str| json[name].as_f64().unwrap();
        Run {
            steps: size("steps"),
            batch: size("batch"),
            time: size("time"),
            accumulation: size("accumulation"),
            peak_lr: real("peak_lr"),
            warmup_steps: size("warmup_steps"),
            weight_decay: real("weight_decay"),
            betas: [0, 1].map(|i| json["betas"][i].as_f64().unwrap()),
            eps: real("eps"),
            clip: real("clip"),
        }
    }

    /// Linear warm-up from 0, then a cosine to 0; read before the step.
    fn lr(&self, step: usize) -> f64 {
        let (n, warmup, total) = (step as f64, self.warmup_steps as f64, self.steps as f64);
        if n < warmup {
            return self.peak_lr * n / warmup;
        }
        self.peak_lr * (1.0 + (PI * (n - warmup) / (total - warmup)).cos()) / 2.0
    }
}

/// Adds the gradient of the mean loss of one micro-batch, weighted by its share of the step.
fn micro_batch(
    model: &Model,
    ids: &[i32],
    labels: &[i32],
    run: &Run,
    gradients: &mut Gradients,
) -> f64 {
    let (device, rows) = (model.device(), ids.len());
    let weight = 1.0 / (rows * run.accumulation) as f32;
    let segments = Segments::uniform(rows / run.time, run.time);
    let mut tape = Tape::recording(device);
    let loss = model
        .loss(
            &mut tape,
            &device.from_i32(ids, [rows]).unwrap(),
            &device.from_i32(labels, [rows]).unwrap(),
            &device.full([rows], weight).unwrap(),
            &segments,
            &ForwardOptions::default(),
        )
        .unwrap();
    tape.backward(gradients).unwrap();
    loss.per_token.to_f64().unwrap().iter().sum::<f64>() / rows as f64
}

fn follows(name: &str, device: &Device) {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training").join(name);
    let run = Run::read(&dir.join("run.json"));
    let mut file = SafetensorsFile::open(&dir.join("run.safetensors")).unwrap();
    let (ids, labels) = (file.read_i32("input_ids").unwrap(), file.read_i32("labels").unwrap());
    let losses = file.read_f32("loss").unwrap();
    let norms = file.read_f32("grad_norm").unwrap();
    let lrs = file.read_f32("lr").unwrap();

    let mut model = Model::from_checkpoint(&dir, device).unwrap();
    let mut moments: Vec<[Tensor; 2]> = model
        .params()
        .iter()
        .map(|(_, _, value)| [0, 1].map(|_| device.zeros(value.shape(), DType::F32).unwrap()))
        .collect();
    let rows = run.batch * run.time;
    let micro = rows / run.accumulation;
    for step in 0..run.steps {
        let lr = run.lr(step);
        assert!((lr - f64::from(lrs[step])).abs() < 1e-8, "{name}, step {step}: lr {lr}");
        let mut gradients = Gradients::default();
        let mut loss = 0.0;
        for part in 0..run.accumulation {
            let range = step * rows + part * micro..step * rows + (part + 1) * micro;
            let (ids, labels) = (&ids[range.clone()], &labels[range]);
            loss +=
                micro_batch(&model, ids, labels, &run, &mut gradients) / run.accumulation as f64;
        }
        let all: Vec<&Tensor> = gradients.iter().map(|(_, grad)| grad).collect();
        let norm = device.backend().sum_squares(&all).unwrap().sqrt();
        let (want_loss, want_norm) = (f64::from(losses[step]), f64::from(norms[step]));
        let what = format!("{name} on {device}, step {step}");
        assert!((loss / want_loss - 1.0).abs() < 1e-4, "{what}: loss {loss}, not {want_loss}");
        assert!((norm / want_norm - 1.0).abs() < 1e-3, "{what}: norm {norm}, not {want_norm}");
        for (id, grad) in gradients.iter() {
            let decay = if model.params().spec(id).decay { run.weight_decay } else { 0.0 };
            let update = AdamW {
                lr: lr as f32,
                beta1: run.betas[0] as f32,
                beta2: run.betas[1] as f32,
                eps: run.eps as f32,
                weight_decay: decay as f32,
                step: step as u64 + 1,
                grad_scale: (run.clip / (norm + 1e-6)).min(1.0) as f32,
            };
            let [m, v] = &mut moments[id.0];
            let param = model.params_mut().value_mut(id);
            device.backend().adamw(param, grad, m, v, &update).unwrap();
        }
    }
    for (_, spec, value) in model.params().iter() {
        let want = file.read_f32(&format!("final.{}", spec.name)).unwrap();
        let error = relative_error(&value.to_f64().unwrap(), &want);
        assert!(error < 1e-3, "{name} on {device}: {} ends {error:.2e} away", spec.name);
    }
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
