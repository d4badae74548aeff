//! Distillation: the gradient is that of the objective, and a model has nothing to learn from itself.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{ForwardOptions, Model, ModelConfig};
use fox_tensor::{Device, Gradients, IGNORE_LABEL, Segments, Tape, Tensor};

const ROWS: usize = 12;
const VOCAB: usize = 11;

fn model(seed: u64, device: &Device) -> Model {
    let mut config = ModelConfig::fox_llama(16, 1, 2).with_vocab(VOCAB).with_mlp_width(8);
    config.initializer_range = 0.5;
    Model::init(&config, seed, device).unwrap()
}

struct Batch {
    tokens: Tensor,
    labels: Tensor,
    weights: Tensor,
    segments: Segments,
}

fn batch(device: &Device) -> Batch {
    let mut labels: Vec<i32> = (0..ROWS).map(|t| ((t * 5 + 2) % VOCAB) as i32).collect();
    labels[4] = IGNORE_LABEL;
    let tokens: Vec<i32> = (0..ROWS).map(|t| ((t * t + 3) % VOCAB) as i32).collect();
    let weights: Vec<f32> = (0..ROWS).map(|t| 0.05 + 0.01 * t as f32).collect();
    Batch {
        tokens: device.from_i32(&tokens, [ROWS]).unwrap(),
        labels: device.from_i32(&labels, [ROWS]).unwrap(),
        weights: device.from_f32(&weights, [ROWS]).unwrap(),
        segments: Segments::packed(&[0, 7, ROWS]).unwrap(),
    }
}

fn log_probabilities(model: &Model, batch: &Batch) -> Vec<Vec<f64>> {
    let mut tape = Tape::inference(model.device());
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &batch.tokens, &batch.segments, None, &options).unwrap();
    let logits = model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap();
    let row = |row: &[f64]| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(|x| x - sum.ln()).collect()
    };
    logits.chunks(VOCAB).map(row).collect()
}

/// The objective, from its definition.
fn objective(student: &Model, teacher: &Model, share: f64, batch: &Batch) -> f64 {
    let (own, other) = (log_probabilities(student, batch), log_probabilities(teacher, batch));
    let (labels, weights) = (batch.labels.to_i32().unwrap(), batch.weights.to_f64().unwrap());
    let term = |r: usize| {
        let divergence: f64 = other[r].iter().zip(&own[r]).map(|(t, s)| t.exp() * (t - s)).sum();
        weights[r] * ((1.0 - share) * -own[r][labels[r] as usize] + share * divergence)
    };
    (0..ROWS).filter(|r| labels[*r] != IGNORE_LABEL).map(term).sum()
}

fn gradients(student: &Model, batch: &Batch) -> (Vec<f64>, Gradients) {
    let mut tape = Tape::recording(student.device());
    let Batch { tokens, labels, weights, segments } = batch;
    let options = ForwardOptions::default();
    let loss = student.loss(&mut tape, tokens, labels, weights, segments, &options).unwrap();
    let mut gradients = Gradients::default();
    tape.backward(&mut gradients).unwrap();
    (loss.per_token.to_f64().unwrap(), gradients)
}

#[test]
fn distillation_gradient_matches_the_objective() {
    let device = Device::naive();
    let (batch, share) = (batch(&device), 0.7);
    let (mut student, teacher) = (model(1, &device), model(2, &device));
    let plain = gradients(&student, &batch).0;
    student.distil_from(model(2, &device), share).unwrap();
    let (loss, gradients) = gradients(&student, &batch);
    assert_eq!(loss, plain, "the loss that is reported is that of the labels");
    for name in ["lm_head.weight", "model.layers.0.attn.q_proj.weight", "model.embeddings.weight"] {
        let id = student.params().find(name).unwrap();
        let gradient = gradients.get(id).unwrap().to_f64().unwrap();
        let squares: f64 = gradient.iter().map(|g| g * g).sum();
        let start = student.params().value(id).clone();
        let mut at = |step: f64| {
            let moved: Vec<f64> =
                start.to_f64().unwrap().iter().zip(&gradient).map(|(x, g)| x + step * g).collect();
            let moved = student.device().from_f64(&moved, start.shape()).unwrap();
            student.params_mut().set(id, moved).unwrap();
            let value = objective(&student, &teacher, share, &batch);
            student.params_mut().set(id, start.clone()).unwrap();
            value
        };
        let slope = (at(1e-4) - at(-1e-4)) / 2e-4;
        assert!((slope / squares - 1.0).abs() < 1e-4, "{name}: {slope} {squares}");
    }
}

#[test]
fn self_distillation_has_zero_gradient() {
    let device = Device::naive();
    let mut student = model(1, &device);
    student.distil_from(model(1, &device), 1.0).unwrap();
    let (_, gradients) = gradients(&student, &batch(&device));
    for (id, gradient) in gradients.iter() {
        let name = &student.params().spec(id).name;
        assert!(gradient.to_f64().unwrap().iter().all(|g| g.abs() < 1e-9), "{name}");
    }
}

#[test]
fn rejects_incompatible_teachers() {
    let device = Device::naive();
    let config = ModelConfig::fox_llama(16, 1, 2).with_vocab(VOCAB + 1);
    let other = Model::init(&config, 0, &device).unwrap();
    let error = model(1, &device).distil_from(other, 0.5).unwrap_err().to_string();
    assert_eq!(error, "a model with 11 token ids cannot learn from one with 12");
    let error = model(1, &device).distil_from(model(2, &device), 1.5).unwrap_err().to_string();
    assert_eq!(error, "a weight of 1.5 is not between 0 and 1");
}
