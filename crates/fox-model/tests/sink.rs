//! Attention sinks: what they mean, and their gradient.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{ForgettingConfig, ForwardOptions, Model, ModelConfig};
use fox_tensor::{Device, Gradients, Segments, Tape};

const ROWS: usize = 20;

fn model(sink: bool, device: &Device) -> Model {
    let mixer = ForgettingConfig { sink, kv_heads: 1, ..ForgettingConfig::fox_llama(2) };
    let mut config = ModelConfig::with_mixer(16, 2, mixer, 4.0).with_vocab(13).with_mlp_width(8);
    config.initializer_range = 0.4;
    Model::init(&config, 5, device).unwrap()
}

fn set_sinks(model: &mut Model, values: [f64; 2]) {
    for layer in 0..2 {
        let id = model.params().find(&format!("model.layers.{layer}.attn.sinks")).unwrap();
        let value = model.device().from_f64(&values, [2]).unwrap();
        model.params_mut().set(id, value).unwrap();
    }
}

/// Mean loss, and the gradients.
fn loss(model: &Model) -> (f64, Gradients) {
    let device = model.device();
    let ids = |shift: usize| -> Vec<i32> {
        (0..ROWS).map(|t| ((t * t * 3 + t + shift) % 13) as i32).collect()
    };
    let tokens = device.from_i32(&ids(0), [ROWS]).unwrap();
    let labels = device.from_i32(&ids(5), [ROWS]).unwrap();
    let weights = device.full([ROWS], 1.0 / ROWS as f32).unwrap();
    let segments = Segments::packed(&[0, 12, ROWS]).unwrap();
    let mut tape = Tape::recording(device);
    let options = ForwardOptions::default();
    let loss = model.loss(&mut tape, &tokens, &labels, &weights, &segments, &options).unwrap();
    let mut gradients = Gradients::default();
    tape.backward(&mut gradients).unwrap();
    (loss.per_token.to_f64().unwrap().iter().sum::<f64>() / ROWS as f64, gradients)
}

/// A sink that takes nothing changes nothing; one that takes all leaves the residual stream alone.
#[test]
fn sink_weights_range_from_zero_to_one() {
    let device = Device::naive();
    let (plain, mut with) = (model(false, &device), model(true, &device));
    set_sinks(&mut with, [-80.0, -80.0]);
    let ((want, a), (got, b)) = (loss(&plain), loss(&with));
    assert!((want - got).abs() < 1e-12, "{want} {got}");
    let q = |model: &Model, gradients: &Gradients| {
        let id = model.params().find("model.layers.0.attn.q_proj.weight").unwrap();
        gradients.get(id).unwrap().to_f64().unwrap()
    };
    for (a, b) in q(&plain, &a).iter().zip(q(&with, &b)) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }
    set_sinks(&mut with, [0.5, -0.5]);
    assert!((loss(&with).0 - want).abs() > 1e-3);
}

/// Of sinks, gates, queries and values, by differences along the gradient.
#[test]
fn gradients_match_finite_differences() {
    let device = Device::naive();
    let mut model = model(true, &device);
    set_sinks(&mut model, [0.7, -0.4]);
    let gradients = loss(&model).1;
    for name in ["sinks", "fgate_proj.bias", "q_proj.weight", "v_proj.weight"] {
        let name = format!("model.layers.0.attn.{name}");
        let id = model.params().find(&name).unwrap();
        let gradient = gradients.get(id).unwrap().to_f64().unwrap();
        let squares: f64 = gradient.iter().map(|g| g * g).sum();
        assert!(squares > 0.0, "{name}");
        let start = model.params().value(id).clone();
        let values = start.to_f64().unwrap();
        let scale = 1e-4 / squares.sqrt();
        let mut at = |step: f64| {
            let moved: Vec<f64> = values.iter().zip(&gradient).map(|(x, g)| x + step * g).collect();
            let moved = device.from_f64(&moved, start.shape()).unwrap();
            model.params_mut().set(id, moved).unwrap();
            let value = loss(&model).0;
            model.params_mut().set(id, start.clone()).unwrap();
            value
        };
        let slope = (at(scale) - at(-scale)) / (2.0 * scale);
        assert!((slope / squares - 1.0).abs() < 1e-4, "{name}: {slope} {squares}");
    }
}
