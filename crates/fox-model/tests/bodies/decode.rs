//! Decoding step by step, in chunks and all at once gives the logits of one full evaluation; the
//! same bodies run on every device.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::mixers::hybrid::LayerConfigs;
use fox_model::{
    Architecture, DecayTime, DeltaConfig, ForgetGate, ForgettingConfig, ForwardOptions,
    Hgrn2Config, HybridConfig, LayerKind, LowerBounds, Mamba2Config, MixerConfig, Model,
    ModelConfig, QkNorm,
};
use fox_tensor::{Activation, Device, Gradients, Rope, RopeScaling, Segments, Tape};

pub const VOCAB: usize = 37;

pub fn small(mixer: ForgettingConfig) -> ModelConfig {
    small_of(mixer)
}

fn small_of(mixer: impl MixerConfig) -> ModelConfig {
    let mut config = ModelConfig::fox_llama(32, 2, 4).with_vocab(VOCAB).with_mlp_width(24);
    // Large weights, so that every term matters.
    config.initializer_range = 0.3;
    config.mixer = Box::new(mixer);
    config
}

/// Variants that between them have every option of the layer.
pub fn variants() -> Vec<(&'static str, ModelConfig)> {
    let (llama, pro) = (ForgettingConfig::fox_llama(4), ForgettingConfig::fox_pro(4));
    let decay_time = Some(DecayTime { min: 1.5, max: 20.0 });
    let scaling = RopeScaling {
        factor: 4.0,
        low_freq_factor: 0.5,
        high_freq_factor: 2.0,
        original_length: 16,
    };
    vec![
        ("llama", small(llama.clone())),
        ("pro", small(pro.clone())),
        ("pro grouped", small(ForgettingConfig { kv_heads: 2, qkv_bias: true, ..pro.clone() })),
        (
            "pro rope window grouped",
            small(ForgettingConfig {
                rope: Some(Rope::new(100.0)),
                window: Some(5),
                kv_heads: 1,
                qk_norm: Some(QkNorm::Shared),
                ..pro.clone()
            }),
        ),
        (
            "k shift only, silu gate, fixed",
            small(ForgettingConfig {
                k_shift: true,
                output_gate: Some(Activation::Silu),
                gate: ForgetGate::Fixed { decay_time },
                ..llama.clone()
            }),
        ),
        (
            "v shift only, bias only",
            small(ForgettingConfig {
                v_shift: true,
                gate: ForgetGate::BiasOnly { decay_time },
                ..llama.clone()
            }),
        ),
        (
            "transformer window",
            small(ForgettingConfig { window: Some(4), ..llama.clone().without_forgetting() }),
        ),
        (
            "stick-breaking",
            small(ForgettingConfig { gate: ForgetGate::None, ..llama.clone().stick_breaking() }),
        ),
        (
            "stick-breaking pro with gates, window, grouped",
            small(ForgettingConfig {
                kv_heads: 2,
                window: Some(6),
                ..pro.clone().stick_breaking()
            }),
        ),
        (
            "wide heads, scaled and faded rope",
            small(ForgettingConfig {
                rope: Some(Rope { strength: 0.75, scaling: Some(scaling), ..Rope::new(100.0) }),
                head_dim: Some(24),
                kv_heads: 2,
                qk_norm_eps: 1e-3,
                ..pro.clone()
            }),
        ),
        ("sinks, grouped", small(ForgettingConfig { sink: true, kv_heads: 2, ..pro.clone() })),
        (
            "sinks, window, no gate",
            small(ForgettingConfig {
                sink: true,
                window: Some(5),
                ..llama.clone().without_forgetting()
            }),
        ),
        ("transformer pro", small(pro.without_forgetting())),
        (
            "a factor per key",
            small(ForgettingConfig {
                gate: ForgetGate::KeyScale,
                kv_heads: 2,
                qk_norm: Some(QkNorm::PerHead),
                ..llama.clone()
            }),
        ),
        ("one gate for all heads", small(ForgettingConfig { gate: ForgetGate::Shared, ..llama })),
    ]
    .into_iter()
    .chain(recurrent_variants())
    .chain(hybrids())
    .chain(architectures())
    .collect()
}

/// Every architecture that can be asked for by name, as it is built.
fn architectures() -> impl Iterator<Item = (&'static str, ModelConfig)> {
    Architecture::all().into_iter().map(|architecture| {
        let config = architecture.config(64, 2, 2).with_vocab(VOCAB).with_mlp_width(24);
        (architecture.name, config)
    })
}

/// Layers of every kind, and attention of different kinds.
fn hybrids() -> Vec<(&'static str, ModelConfig)> {
    let of = |words: &[&str]| {
        let pattern = words.iter().map(|word| LayerKind::parse(word).unwrap()).collect();
        let mut config = small_of(HybridConfig::new(pattern, LayerConfigs::standard(32, 4)));
        config.num_layers = 5;
        config
    };
    vec![
        ("fox, window, gated delta net", of(&["fox", "window:4", "gated-delta-net", "fox"])),
        ("mamba2, attention, mamba1", of(&["mamba2", "attention", "mamba1"])),
        ("path, kda, path-fox", of(&["path", "kda", "path-fox"])),
    ]
}

/// Variants that between them have every option of the recurrent layers.
fn recurrent_variants() -> Vec<(&'static str, ModelConfig)> {
    let delta = DeltaConfig::delta_net(2, 16);
    let hgrn2 = Hgrn2Config {
        heads: 4,
        expand_ratio: 8,
        lower_bounds: LowerBounds::Used,
        output_norm_eps: 1e-5,
    };
    let mamba2 = Mamba2Config {
        heads: 8,
        head_dim: 8,
        state_size: 12,
        groups: 1,
        conv_size: 4,
        time_step_limit: (0.0, f64::INFINITY),
        time_step_init: (0.01, 0.5, 1e-4),
        norm_before_gate: false,
    };
    vec![
        ("delta net", small_of(delta.clone())),
        (
            "delta net, narrow keys, gate, turning",
            small_of(DeltaConfig {
                key_dim: 8,
                conv_size: 2,
                output_gate: true,
                negative_eigenvalues: true,
                ..delta
            }),
        ),
        ("gated delta net", small_of(DeltaConfig::gated(3, 8))),
        (
            "gated delta net, grouped values",
            small_of(DeltaConfig { value_heads: 4, ..DeltaConfig::gated(2, 8) }),
        ),
        ("hgrn2 with bounds", small_of(hgrn2.clone())),
        (
            "hgrn2 official",
            small_of(Hgrn2Config { lower_bounds: LowerBounds::Stored, ..hgrn2.clone() }),
        ),
        (
            "hgrn2 without bounds, narrow",
            small_of(Hgrn2Config { lower_bounds: LowerBounds::None, expand_ratio: 4, ..hgrn2 }),
        ),
        ("mamba2", small_of(mamba2.clone())),
        (
            "mamba2, groups, norm before gate, limits",
            small_of(Mamba2Config {
                groups: 2,
                norm_before_gate: true,
                time_step_limit: (0.02, 0.6),
                ..mamba2
            }),
        ),
    ]
}

pub fn tokens(len: usize, seed: usize) -> Vec<i32> {
    (0..len).map(|t| ((t * t * 7 + t * 3 + seed * 11) % VOCAB) as i32).collect()
}

/// Logits `[R * V]` of rows arranged as `segments` say.
fn full(model: &Model, ids: &[i32], segments: &Segments) -> Vec<f64> {
    let ids = model.device().from_i32(ids, [ids.len()]).unwrap();
    let mut tape = Tape::inference(model.device());
    let hidden =
        model.forward(&mut tape, &ids, segments, None, &ForwardOptions::default()).unwrap();
    model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap()
}

pub fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "{what}, element {i}: {g} {w}");
    }
}

pub fn steps_chunks_and_one_pass_agree(device: &Device, tolerance: f64) {
    for (name, config) in variants() {
        let model = Model::init(&config, 3, device).unwrap();
        let sequences = [tokens(23, 1), tokens(14, 2), tokens(1, 3)];
        let alone: Vec<Vec<f64>> = sequences
            .iter()
            .map(|ids| full(&model, ids, &Segments::uniform(1, ids.len())))
            .collect();
        for chunk in [1, 2, 5, 23] {
            // A capacity of one token, so that the cache must grow on the way.
            let mut cache = model.new_cache(3, 1).unwrap();
            while cache.lens()[0] < 23 {
                let seen = cache.lens().to_vec();
                let new: Vec<&[i32]> = sequences
                    .iter()
                    .zip(&seen)
                    .map(|(ids, &n)| &ids[n..ids.len().min(n + chunk)])
                    .collect();
                let got = model.decode(&new, &mut cache, &ForwardOptions::default()).unwrap();
                let got = got.to_f64().unwrap();
                for b in 0..3 {
                    let row = &got[b * VOCAB..][..VOCAB];
                    if new[b].is_empty() {
                        assert!(row.iter().all(|&x| x == 0.0));
                        continue;
                    }
                    let last = seen[b] + new[b].len() - 1;
                    let want = &alone[b][last * VOCAB..][..VOCAB];
                    assert_close(
                        row,
                        want,
                        tolerance,
                        &format!("{name}, chunk {chunk}, sequence {b}"),
                    );
                }
            }
            assert_eq!(cache.lens(), [23, 14, 1]);
        }
    }
}

pub fn left_padding_has_no_effect(device: &Device, tolerance: f64) {
    for (name, config) in variants() {
        let model = Model::init(&config, 5, device).unwrap();
        let (time, pads) = (12, [4, 0, 11]);
        let mut ids = vec![0; 3 * time];
        let sequences: Vec<Vec<i32>> =
            pads.iter().enumerate().map(|(b, pad)| tokens(time - pad, b)).collect();
        for b in 0..3 {
            ids[b * time + pads[b]..(b + 1) * time].copy_from_slice(&sequences[b]);
        }
        let segments = Segments::left_padded(time, &pads).unwrap();
        let padded = full(&model, &ids, &segments);
        let mut cache = model.new_cache(3, 4).unwrap();
        let mut tape = Tape::inference(device);
        let rows = device.from_i32(&ids, [3 * time]).unwrap();
        let options = ForwardOptions::default();
        let hidden =
            model.forward(&mut tape, &rows, &segments, Some(&mut cache), &options).unwrap();
        let cached = model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap();
        assert_eq!(cache.lens(), [8, 12, 1]);
        let next = model.decode(&[&[7], &[7], &[7]], &mut cache, &options).unwrap();
        let next = next.to_f64().unwrap();
        for b in 0..3 {
            let mut longer = sequences[b].clone();
            longer.push(7);
            let alone = full(&model, &longer, &Segments::uniform(1, longer.len()));
            let real = (b * time + pads[b]) * VOCAB..(b + 1) * time * VOCAB;
            let want = &alone[..sequences[b].len() * VOCAB];
            assert_close(&padded[real.clone()], want, tolerance, &format!("{name}, padded {b}"));
            assert_close(&cached[real], want, tolerance, &format!("{name}, padded and cached {b}"));
            let want = &alone[sequences[b].len() * VOCAB..];
            assert_close(
                &next[b * VOCAB..][..VOCAB],
                want,
                tolerance,
                &format!("{name}, next token {b}"),
            );
        }
    }
}

pub fn failed_steps_leave_the_cache_unchanged(device: &Device) {
    for (name, config) in variants() {
        one_failed_step(name, &config, device);
    }
}

fn one_failed_step(name: &str, config: &ModelConfig, device: &Device) {
    let model = Model::init(config, 3, device).unwrap();
    let ids = tokens(9, 1);
    let options = ForwardOptions::default();
    let (mut disturbed, mut calm) =
        (model.new_cache(1, 1).unwrap(), model.new_cache(1, 1).unwrap());
    for cache in [&mut disturbed, &mut calm] {
        model.decode(&[&ids[..4]], cache, &options).unwrap();
    }
    let error = model.decode(&[&[1, 2, VOCAB as i32]], &mut disturbed, &options).unwrap_err();
    assert!(error.to_string().contains("37"), "{error}");
    let error = model.decode(&[&[1], &[2]], &mut disturbed, &options).unwrap_err();
    assert!(error.to_string().contains("2 sequences"), "{error}");
    assert!(model.decode(&[&[]], &mut disturbed, &options).is_err());
    let after = |cache| model.decode(&[&ids[4..]], cache, &options).unwrap().to_f64().unwrap();
    assert_eq!(after(&mut disturbed), after(&mut calm), "{name}");
}

/// Tiles visited and in all, by attention layer and head.
pub type Tiles = Vec<Vec<[u64; 2]>>;

/// Losses and all gradients of one step.
pub fn step(model: &Model, options: &ForwardOptions) -> (Vec<f64>, Vec<Vec<f64>>, Tiles) {
    let device = model.device();
    let rows = 34;
    let ids = device.from_i32(&tokens(rows, 1), [rows]).unwrap();
    let labels = device.from_i32(&tokens(rows, 4), [rows]).unwrap();
    let weights = device.full([rows], 1.0 / rows as f32).unwrap();
    let segments = Segments::packed(&[0, 20, 34]).unwrap();
    let mut tape = Tape::recording(device);
    let loss = model.loss(&mut tape, &ids, &labels, &weights, &segments, options).unwrap();
    let mut gradients = Gradients::default();
    tape.backward(&mut gradients).unwrap();
    let grads = gradients.iter().map(|(_, g)| g.to_f64().unwrap()).collect();
    let tiles = loss.tiles.iter().map(|b| fox_tensor::tile_counts(b).unwrap()).collect();
    (loss.per_token.to_f64().unwrap(), grads, tiles)
}

pub fn recomputed_blocks_give_the_same_gradients(device: &Device) {
    for (name, config) in variants() {
        let model = Model::init(&config, 9, device).unwrap();
        let kept = step(&model, &ForwardOptions::default());
        let again = step(&model, &ForwardOptions { recompute: true, ..Default::default() });
        assert_eq!(kept, again, "{name}");
        let trained = model.params().iter().filter(|(_, spec, _)| spec.trainable).count();
        assert_eq!(kept.1.len(), trained, "{name}");
        let is_attention = |l: &usize| {
            let state = config.mixer_of(*l).state(&config);
            !matches!(state, fox_model::mixers::StateSpec::Recurrent(_))
        };
        let attention = (0..config.num_layers).filter(is_attention).count();
        assert_eq!(kept.2.len(), attention, "{name}: one count of tiles per attention layer");
    }
}
