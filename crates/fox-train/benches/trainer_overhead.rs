//! What the trainer adds to a step: loader, metrics, schedule, logging and their bookkeeping, against a bare loop of
//! forward, backward and update. Run with
//!
//! ```text
//! cargo bench -p fox-train --bench trainer_overhead -- [STEPS]
//! ```
//!
//! Both take turns, step by step, so that a busy machine slows both alike. Details (half-lives, pruned
//! fractions) are written every 50 steps, evaluation and checkpoints are left out: they are not part of a step.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a measuring program

use std::ops::ControlFlow;
use std::time::Instant;

use fox_data::{Batch, Loader};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{AdamW, DType, Gradients, Segments, Tape, Tensor};
use fox_train::data::RunData;
use fox_train::{Event, RunSpec, recipe, train};

/// The shapes of the comparison.
#[rustfmt::skip]
const SHAPES: [&str; 11] = [
    "model.hidden_size=256", "model.num_hidden_layers=4", "model.num_heads=4",
    "model.intermediate_size=768", "data.sequence_length=512", "training.batch=8",
    "evaluation.sequences=0", "checkpoints.every=0", "metrics.every=1", "metrics.details_every=50",
    "schedule.warmup_tokens=4096",
];

/// Forward, backward and update, and nothing else.
struct Bare {
    model: Model,
    moments: Vec<[Tensor; 2]>,
    batches: Vec<Batch>,
    steps: usize,
}

impl Bare {
    fn new(loader: &Loader, model: Model) -> Bare {
        let device = model.device().clone();
        let zeros = |value: &Tensor| device.zeros(value.shape(), DType::F32).unwrap();
        let moments =
            model.params().iter().map(|(_, _, value)| [zeros(value), zeros(value)]).collect();
        let batches = (0..4).map(|i| loader.batch(i).unwrap()).collect();
        Bare { model, moments, batches, steps: 0 }
    }

    fn step(&mut self) {
        let batch = &self.batches[self.steps % self.batches.len()];
        let device = self.model.device().clone();
        let rows = batch.inputs.len();
        let mut gradients = Gradients::default();
        let mut tape = Tape::recording(&device);
        let loss = self
            .model
            .loss(
                &mut tape,
                &device.from_i32(&batch.inputs, [rows]).unwrap(),
                &device.from_i32(&batch.labels, [rows]).unwrap(),
                &device.full([rows], 1.0 / rows as f32).unwrap(),
                &Segments::uniform(batch.batch, batch.time),
                &ForwardOptions::default(),
            )
            .unwrap();
        tape.backward(&mut gradients).unwrap();
        let loss = loss.per_token.to_f32().unwrap().iter().map(|x| f64::from(*x)).sum::<f64>();
        assert!(loss.is_finite());
        let all: Vec<&Tensor> = gradients.iter().map(|(_, grad)| grad).collect();
        let norm = device.backend().sum_squares(&all).unwrap().sqrt();
        self.steps += 1;
        for (id, grad) in gradients.iter() {
            let update = AdamW {
                lr: 1e-3,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: if self.model.params().spec(id).decay { 0.1 } else { 0.0 },
                step: self.steps as u64,
                grad_scale: (1.0 / (norm + 1e-6)).min(1.0) as f32,
            };
            let [m, v] = &mut self.moments[id.0];
            let param = self.model.params_mut().value_mut(id);
            device.backend().adamw(param, grad, m, v, &update).unwrap();
        }
    }
}

fn main() {
    let steps: u64 = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(60);
    let mut overrides: Vec<String> = SHAPES.iter().map(|text| text.to_string()).collect();
    overrides.push(format!("training.tokens={}", steps * 8 * 512));
    let recipe = recipe::load("tiny-fox-pro", &overrides).unwrap();
    let device = fox_cpu::device();
    let data = RunData::open(&recipe).unwrap();
    let config = recipe.model_config(data.train.vocab_size()).unwrap();
    let model = Model::init(&config, 0, &device).unwrap();
    let mut bare = Bare::new(&data.loader(&recipe).unwrap(), model);
    let out = tempfile::tempdir().unwrap();
    let spec = RunSpec { recipe, out: out.path().join("run"), device, command: Vec::new() };

    let (mut trainer_seconds, mut bare_seconds) = (Vec::new(), Vec::new());
    let mut since = Instant::now();
    train(&spec, &mut |event| {
        if let Event::Step(_) = event {
            trainer_seconds.push(since.elapsed().as_secs_f64());
            let begin = Instant::now();
            bare.step();
            bare_seconds.push(begin.elapsed().as_secs_f64());
        }
        since = Instant::now();
        ControlFlow::Continue(())
    })
    .unwrap();
    // The first steps pay for memory.
    let warm = 3.min(trainer_seconds.len() - 1);
    let (trainer, bare) = (&trainer_seconds[warm..], &bare_seconds[warm..]);
    let mean = |xs: &[f64]| xs.iter().sum::<f64>() / xs.len() as f64;
    let median = |xs: &[f64]| {
        let mut sorted = xs.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    for (name, of) in [("mean", mean as fn(&[f64]) -> f64), ("median", median)] {
        let (with, without) = (of(trainer), of(bare));
        println!(
            "{name}: trainer {:.2} ms, bare loop {:.2} ms, overhead {:+.2}% over {} steps",
            1e3 * with,
            1e3 * without,
            100.0 * (with / without - 1.0),
            trainer.len(),
        );
    }
}
