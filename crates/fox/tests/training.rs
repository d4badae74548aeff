//! Reference training runs: 40 steps of AdamW with clipping, warm-up and cosine decay, two micro-batches each. The
//! trainer must reproduce learning rates, losses, gradient norms and final weights.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::PathBuf;

use fox_base::difference::{largest, relative_error};
use fox_data::{Batch, IGNORED_LABEL, LoaderState};
use fox_model::{Model, SafetensorsFile};
use fox_tensor::Device;
use fox_train::checkpoint::RunState;
use fox_train::{Recipe, Stepper, Updater, recipe};
use serde_json::Value;

/// run.json as a recipe. The model of the recipe is unused: the run starts from stored weights.
fn recipe(json: &Value, batch: usize, micro_batch: usize) -> Recipe {
    let tokens = json["time"].as_u64().unwrap() * batch as u64;
    let steps = |name: &str| json[name].as_u64().unwrap() * tokens;
    let overrides = [
        format!("data.sequence_length={}", json["time"]),
        format!("training.tokens={}", steps("steps")),
        format!("training.batch={batch}"),
        format!("training.micro_batch={micro_batch}"),
        format!("optimizer.peak_lr={}", json["peak_lr"]),
        format!("optimizer.beta1={}", json["betas"][0]),
        format!("optimizer.beta2={}", json["betas"][1]),
        format!("optimizer.eps={}", json["eps"]),
        format!("optimizer.weight_decay={}", json["weight_decay"]),
        format!("optimizer.clip={}", json["clip"]),
        format!("schedule.warmup_tokens={}", steps("warmup_steps")),
    ];
    recipe::load("tiny-fox-pro", &overrides).unwrap()
}

/// How the rows of a step are passed to the trainer.
#[derive(Clone, Copy)]
enum Rows {
    /// Unchanged, in the two micro-batches of the reference.
    Given,
    /// Interleaved with as many rows without labels, in micro-batches with two, one or no labelled row. They have no
    /// effect: the weight of a position is 1 / labelled positions.
    Padded,
}

/// Runs the trainer along a reference run; returns the largest relative errors of loss, norm and final weights.
fn follow(name: &str, rows: Rows, device: &Device) -> [f64; 3] {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training").join(name);
    let text = fs::read_to_string(dir.join("run.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let size = |name: &str| json[name].as_u64().unwrap() as usize;
    let (steps, batch, time) = (size("steps"), size("batch"), size("time"));
    // Source of each row of the batch.
    let (places, micro_batch): (Vec<Option<usize>>, usize) = match rows {
        Rows::Given => ((0..batch).map(Some).collect(), batch / size("accumulation")),
        Rows::Padded => (vec![Some(0), None, None, None, Some(1), Some(2), None, Some(3)], 2),
    };
    let recipe = recipe(&json, places.len(), micro_batch);
    let mut file = SafetensorsFile::open(&dir.join("run.safetensors")).unwrap();
    let (ids, labels) = (file.read_i32("input_ids").unwrap(), file.read_i32("labels").unwrap());
    let losses = file.read_f32("loss").unwrap();
    let norms = file.read_f32("grad_norm").unwrap();
    let lrs = file.read_f32("lr").unwrap();

    let model = Model::from_checkpoint(&dir, device).unwrap();
    let updater = Updater::new(&recipe.optimizer, None, model.params(), device).unwrap();
    let state = |batches: u64| LoaderState { next_batch: batches, fingerprint: 0 };
    let mut stepper = Stepper::new(&recipe, model, updater, RunState::start(state(0))).unwrap();
    let mut errors = [0.0f64; 3];
    for step in 0..steps {
        let row = |values: &[i32], place: Option<usize>, without: i32| match place {
            Some(row) => values[(step * batch + row) * time..][..time].to_vec(),
            None => vec![without; time],
        };
        let rows = |values: &[i32], without| -> Vec<i32> {
            places.iter().flat_map(|place| row(values, *place, without)).collect()
        };
        let outcome = stepper
            .step(&Batch {
                inputs: rows(&ids, 5),
                labels: rows(&labels, IGNORED_LABEL),
                batch: places.len(),
                time,
                boundaries: None,
                state: state(step as u64 + 1),
            })
            .unwrap();
        let lr = outcome.lr;
        assert!((lr - f64::from(lrs[step])).abs() < 1e-8, "{name}, step {step}: lr {lr}");
        assert!(!outcome.report.skipped);
        let error = |got: f64, want: f32| (got / f64::from(want) - 1.0).abs();
        errors[0] = largest([errors[0], error(outcome.loss.mean, losses[step])]);
        errors[1] = largest([errors[1], error(outcome.report.grad_norm, norms[step])]);
    }
    let counted = stepper.state;
    assert_eq!((counted.step, counted.updates), (steps as u64, steps as u64));
    assert_eq!(counted.tokens, recipe.training.tokens);
    assert_eq!(counted.loader, state(steps as u64));
    for (_, spec, value) in stepper.model.params().iter() {
        let want = file.read_f32(&format!("final.{}", spec.name)).unwrap();
        errors[2] = errors[2].max(relative_error(&value.to_f64().unwrap(), &want, 0.0));
    }
    errors
}

fn follows(name: &str, rows: Rows, device: &Device) {
    let [loss, norm, weights] = follow(name, rows, device);
    println!("{name} on {device}: loss {loss:.1e}, norm {norm:.1e}, weights {weights:.1e}");
    assert!(loss < 1e-4, "{name} on {device}: a loss is {loss:.2e} away");
    assert!(norm < 1e-3, "{name} on {device}: a gradient norm is {norm:.2e} away");
    assert!(weights < 1e-3, "{name} on {device}: final weights are {weights:.2e} away");
}

#[test]
fn fox_pro_on_cpu() {
    follows("fox_pro", Rows::Given, &fox_cpu::device());
}

#[test]
fn fox_llama_on_cpu() {
    follows("fox_llama", Rows::Given, &fox_cpu::device());
}

#[test]
fn transformer_llama_on_cpu() {
    follows("transformer_llama", Rows::Given, &fox_cpu::device());
}

#[test]
fn fox_pro_on_the_oracle() {
    follows("fox_pro", Rows::Given, &Device::naive());
}

#[test]
fn rows_without_labels_have_no_effect() {
    follows("fox_pro", Rows::Padded, &fox_cpu::device());
}
