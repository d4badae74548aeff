//! The memory that `fox info` announces is the memory that a step takes.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{ForwardOptions, MemoryEstimate, Model, ModelConfig};
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
    let attention = if config.mixer.forgetting().is_some() { config.num_layers } else { 0 };
    assert_eq!(loss.blocks.len(), attention);
    drop(tape);
    // The output projection's gradient is there already; it counts as a gradient.
    (after - before) as f64 - 4.0 * (config.vocab_size * config.hidden_size) as f64
}

#[test]
fn activations_are_as_announced() {
    for mut config in [
        ModelConfig::fox_llama(128, 3, 4),
        ModelConfig::fox_pro(128, 3, 4),
        ModelConfig::transformer_llama(128, 3, 2),
        ModelConfig::delta_net(128, 3, 2),
        ModelConfig::gated_delta_net(128, 3, 2),
        ModelConfig::hgrn2(128, 3, 2),
        ModelConfig::mamba2(128, 3, 4),
    ] {
        config.vocab_size = 100;
        let estimate = MemoryEstimate::new(&config, 2, 256).unwrap();
        let kept = held(&config, 2, 256, false) / estimate.activations;
        assert!((0.9..1.1).contains(&kept), "{kept} of the announced activations");
        let again = held(&config, 2, 256, true);
        let inputs = estimate.activations_recomputed * 1.1;
        assert!(again <= inputs, "{again} bytes held, {inputs} announced with recomputation");
    }
}
