//! Encoders: attention in both directions, the loss of masked tokens, files, and what they refuse.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_model::{
    DecayTime, ForgetGate, ForgettingConfig, ForwardOptions, Model, ModelConfig, Pooling, Pruning,
    WriteOptions,
};
use fox_tensor::{Device, Segments, Tape};

const VOCAB: usize = 19;
const MASK: i32 = 18;
const ROWS: usize = 70;

fn config(mixer: ForgettingConfig) -> ModelConfig {
    let mut config = ModelConfig::with_mixer(32, 2, mixer, 3.5).with_vocab(VOCAB);
    config.tokens.mask = Some(MASK as usize);
    config.mlp.intermediate_size = Some(24);
    config.initializer_range = 0.3;
    config
}

fn encoder(device: &Device) -> Model {
    Model::init(&config(ForgettingConfig::fox_pro(4).bidirectional()), 3, device).unwrap()
}

fn tokens() -> Vec<i32> {
    (0..ROWS).map(|t| ((t * t * 3 + t) % (VOCAB - 1)) as i32).collect()
}

/// Logits `[ROWS, VOCAB]` of one sequence.
fn logits(model: &Model, tokens: &[i32], options: &ForwardOptions) -> Vec<Vec<f64>> {
    let device = model.device();
    let mut tape = Tape::inference(device);
    let ids = device.from_i32(tokens, [tokens.len()]).unwrap();
    let segments = Segments::uniform(1, tokens.len());
    let hidden = model.forward(&mut tape, &ids, &segments, None, options).unwrap();
    let logits = model.logits(&mut tape, &hidden.states).unwrap();
    logits.value().to_f64().unwrap().chunks(VOCAB).map(<[f64]>::to_vec).collect()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn later_tokens_change_earlier_logits() {
    let (device, options) = (Device::naive(), ForwardOptions::default());
    let mut changed = tokens();
    changed[60] = MASK;
    for (mixer, sees_later) in [
        (ForgettingConfig::fox_pro(4), false),
        (ForgettingConfig::fox_pro(4).bidirectional(), true),
        (ForgettingConfig::fox_llama(4).bidirectional(), true),
        (ForgettingConfig::fox_pro(4).without_forgetting().bidirectional(), true),
    ] {
        let model = Model::init(&config(mixer.clone()), 3, &device).unwrap();
        let (before, after) =
            (logits(&model, &tokens(), &options), logits(&model, &changed, &options));
        let moved = distance(&before[58], &after[58]);
        assert_eq!(moved > 1e-4, sees_later, "{moved} {mixer:?}");
        assert!(distance(&before[61], &after[61]) > 1e-4, "{mixer:?}");
    }
}

/// Constant gates decay equally on both sides, so that the model cannot distinguish left from right. The key and
/// value shift, which mixes a position with its predecessor, and RoPE can.
#[test]
fn constant_gates_are_blind_to_direction() {
    let device = Device::naive();
    let gate = ForgetGate::Fixed { decay_time: Some(DecayTime { min: 2.0, max: 30.0 }) };
    let plain = ForgettingConfig { gate, ..ForgettingConfig::fox_llama(4) }.bidirectional();
    let shifted = ForgettingConfig { k_shift: true, v_shift: true, ..plain.clone() };
    let rotated = ForgettingConfig::fox_llama(4).without_forgetting().bidirectional();
    let backwards: Vec<i32> = tokens().into_iter().rev().collect();
    for (mixer, blind) in [(plain, true), (shifted, false), (rotated, false)] {
        let model = Model::init(&config(mixer), 3, &device).unwrap();
        let options = ForwardOptions::default();
        let (forth, mut back) =
            (logits(&model, &tokens(), &options), logits(&model, &backwards, &options));
        back.reverse();
        let worst = forth.iter().zip(&back).map(|(a, b)| distance(a, b)).fold(0.0, f64::max);
        assert_eq!(worst < 1e-9, blind, "{worst}");
    }
}

#[test]
fn pruned_attention_is_close() {
    let model = encoder(&Device::naive());
    let options = |pruning| ForwardOptions { pruning, ..ForwardOptions::default() };
    let whole = logits(&model, &tokens(), &options(Pruning::Off));
    let pruned = logits(&model, &tokens(), &options(Pruning::Tolerance(-14.0)));
    let worst = whole.iter().zip(&pruned).map(|(a, b)| distance(a, b)).fold(0.0, f64::max);
    assert!(worst < 1e-3, "{worst}");
}

#[test]
fn encoders_refuse_to_decode() {
    let model = encoder(&Device::naive());
    let error = model.new_cache(1, 8).unwrap_err().to_string();
    assert_eq!(
        error,
        "the model is an encoder: it predicts masked tokens from both sides and cannot generate text; name a causal \
         model instead"
    );
    let policy = model.page_policy(None, 0).unwrap();
    assert_eq!(model.new_paged_cache(&policy).unwrap_err().to_string(), error);
    let stick = ForgettingConfig::fox_llama(4).stick_breaking().bidirectional();
    let error = Model::init(&config(stick), 3, model.device()).unwrap_err().to_string();
    assert!(error.contains("`attention_weights` must be \"softmax\" in an encoder"), "{error}");
}

#[test]
fn checkpoints_keep_the_direction() {
    let (device, folder) = (Device::naive(), tempfile::tempdir().unwrap());
    let (model, to) = (encoder(&device), folder.path().join("encoder"));
    model.save(&to, &WriteOptions::for_model(model.config())).unwrap();
    let text = std::fs::read_to_string(to.join("config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["model_type"], "fox_encoder");
    assert_eq!(json["architectures"][0], "FoxForMaskedLM");
    assert_eq!(json["mask_token_id"], MASK);
    let again = Model::from_checkpoint(&to, &device).unwrap();
    assert_eq!(again.config(), model.config());
    let options = ForwardOptions::default();
    assert_eq!(logits(&again, &tokens(), &options), logits(&model, &tokens(), &options));
}

#[test]
fn embeddings_pool_the_states_of_tokens() {
    let model = encoder(&Device::naive());
    let options = ForwardOptions::default();
    let embed =
        |start, tokens: &[i32], pooling| model.embed(start, tokens, pooling, &options).unwrap();
    let ids = tokens();
    let mut tape = Tape::inference(model.device());
    let segments = Segments::uniform(1, ROWS);
    let rows = model.device().from_i32(&ids, [ROWS]).unwrap();
    let hidden = model.forward(&mut tape, &rows, &segments, None, &options).unwrap();
    let states = hidden.states.value().to_f32().unwrap();
    let column = |c: usize| states.iter().skip(c).step_by(32).copied();
    for c in 0..32 {
        let mean = column(c).map(f64::from).sum::<f64>() / ROWS as f64;
        assert_eq!(embed(None, &ids, Pooling::Mean)[c], mean as f32);
        assert_eq!(embed(None, &ids, Pooling::Max)[c], column(c).fold(f32::MIN, f32::max));
        assert_eq!(embed(None, &ids, Pooling::First)[c], states[c]);
        assert_eq!(embed(None, &ids, Pooling::Last)[c], states[(ROWS - 1) * 32 + c]);
        // The start marker is read, but not pooled.
        assert_eq!(embed(Some(ids[0]), &ids[1..], Pooling::First)[c], states[32 + c]);
    }
    let error = model.embed(None, &[], Pooling::Mean, &options).unwrap_err().to_string();
    assert_eq!(error, "a text without tokens has no embedding");
}
