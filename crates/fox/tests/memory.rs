//! The memory estimate of `fox info` matches the memory of a step.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{Architecture, ForwardOptions, MemoryEstimate, Model, ModelConfig};
use fox_tensor::{Segments, Tape};

/// Bytes held after the forward pass of a training step, beyond the weights.
fn held(config: &ModelConfig, batch: usize, time: usize, recompute: bool) -> f64 {
    let device = fox_cpu::device();
    let model = Model::init(config, 0, &device).unwrap();
    let rows = batch * time;
    let ids = device.from_i32(&vec![1; rows], [rows]).unwrap();
    let weights = device.full([rows], 1.0 / rows as f32).unwrap();
    let before = device.memory().in_use;
    let mut tape = Tape::recording(&device);
    let options = ForwardOptions { recompute, ..Default::default() };
    let segments = Segments::uniform(batch, time);
    let loss = model.loss(&mut tape, &ids, &ids, &weights, &segments, &options).unwrap();
    let after = device.memory().in_use;
    let is_attention = |layer: &usize| {
        let mixer = config.mixer_of(*layer);
        mixer.forgetting().is_some() || ["PaTH", "PaTH-FoX", "Wall"].contains(&mixer.name())
    };
    let attention = (0..config.num_layers).filter(is_attention).count();
    assert_eq!(loss.tiles.len(), attention);
    drop(tape);
    // The gradient of the output projection is allocated already; it counts as a gradient.
    (after - before) as f64 - 4.0 * (config.vocab_size * config.hidden_size) as f64
}

#[test]
fn activation_memory_matches_estimate() {
    for (architecture, heads) in Architecture::all().into_iter().flat_map(|a| [(a, 2), (a, 4)]) {
        let config = architecture.config(128, 3, heads).with_vocab(100);
        let estimate = MemoryEstimate::new(&config, 2, 256).unwrap();
        let kept = held(&config, 2, 256, false) / estimate.activations;
        assert!(
            (0.9..1.1).contains(&kept),
            "{}: {kept} of the announced activations",
            architecture.name
        );
        let again = held(&config, 2, 256, true);
        let inputs = estimate.activations_recomputed * 1.1;
        let name = architecture.name;
        assert!(
            again <= inputs,
            "{name}: {again} bytes held, {inputs} announced with recomputation"
        );
    }
}
