//! Models with Wall attention on the CPU: decoding keeps its bits.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{ForwardOptions, Model, ModelConfig, PagePolicy, WallConfig};

fn tokens(count: usize) -> Vec<i32> {
    (0..count).map(|t| ((t * 7 + t / 3 * 5) % 20) as i32).collect()
}

/// A prefix that two sequences share, and a batch of both: the bits of each alone.
#[test]
fn shared_prefixes_and_batches_keep_bits() {
    let options = ForwardOptions::default();
    let mixer = WallConfig { scalar_gate: true, ..WallConfig::new(4) };
    let mut config = ModelConfig::wall(32, 2, 4);
    (config.vocab_size, config.initializer_range) = (20, 0.3);
    config.mixer = Box::new(WallConfig { gate_init_bias: 1.0, ..mixer });
    let model = Model::init(&config, 5, &fox_cpu::device()).unwrap();
    let mut prefix = model.new_paged_cache(&PagePolicy::keep_all()).unwrap();
    model.decode(&[&tokens(150)], &mut prefix, &options).unwrap();
    let (mut alone, mut other) = (prefix.clone(), prefix.clone());
    let step = |cache: &mut fox_model::Cache, ids: &[&[i32]]| {
        model.decode(ids, cache, &options).unwrap().to_f64().unwrap()
    };
    let want = [step(&mut alone, &[&[3]]), step(&mut other, &[&[9, 4]])];
    let mut joined = fox_model::Cache::join(vec![prefix.clone(), prefix]).unwrap();
    assert_eq!(step(&mut joined, &[&[3], &[9, 4]]), want.concat());
    let lens: Vec<usize> =
        joined.split().unwrap().iter().map(|cache| cache.usage(0).tokens).collect();
    assert_eq!(lens, [151, 152]);
}
