//! Decoding in slots of the oracle against a forward pass.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_cache::Slots;
use fox_model::{ForwardOptions, Model, ModelConfig};
use fox_tensor::{DecodeRow, Device, Rope, RopeScaling, RowToken, Segments, Tape};

const VOCAB: usize = 23;

fn model(config: ModelConfig) -> Model {
    Model::init(&ModelConfig { vocab_size: VOCAB, ..config }, 3, &Device::naive()).unwrap()
}

fn ids(len: usize) -> Vec<i32> {
    (0..len).map(|i| ((i * i * 7 + i) % VOCAB) as i32).collect()
}

/// Logits `[T, V]` of one forward pass.
fn forward(model: &Model, ids: &[i32]) -> Vec<f64> {
    let mut tape = Tape::inference(model.device());
    let tokens = model.device().from_i32(ids, [ids.len()]).unwrap();
    let (segments, options) = (Segments::uniform(1, ids.len()), ForwardOptions::default());
    let hidden = model.forward(&mut tape, &tokens, &segments, None, &options).unwrap();
    model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap()
}

/// The largest difference between the logits of `steps` tokens in a slot after a prefill and those of a forward pass.
fn slot_error(model: &Model, prompt: usize, steps: usize, log_tolerance: Option<f32>) -> f64 {
    let ids = ids(prompt + steps);
    let want = forward(model, &ids);
    let policy = model.page_policy(log_tolerance, ids.len()).unwrap();
    let mut slots = model.open_slots(2, ids.len(), &policy).unwrap().expect("the oracle has slots");
    let mut cache = model.new_paged_cache(&policy).unwrap();
    model.decode(&[&ids[..prompt]], &mut cache, &ForwardOptions::default()).unwrap();
    let mut sequence = slots.enter(cache).unwrap();
    let mut worst = 0.0f64;
    for position in prompt..prompt + steps {
        let row = slots.row(&mut sequence, RowToken::Id(ids[position]), None).unwrap();
        slots.begin(&[row]).unwrap();
        sequence.advance();
        let ends = slots.finish().unwrap().page_ends;
        for (got, want) in slots.logits(0).unwrap().iter().zip(&want[position * VOCAB..]) {
            worst = worst.max((f64::from(*got) - want).abs());
        }
        ends.iter().for_each(|(_, sums)| sequence.seal_page(sums));
    }
    worst
}

#[test]
fn slots_rotate_by_scaled_and_faded_angles() {
    let scaling = RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_length: 32,
    };
    let plain = Rope::new(10_000.0);
    let ropes = [
        plain,
        Rope { scaling: Some(scaling), ..plain },
        Rope { strength: 0.25, ..plain },
        Rope { strength: 0.0, scaling: Some(scaling), ..plain },
    ];
    for rope in ropes {
        let mut config = ModelConfig::transformer_llama(32, 2, 2);
        config.mixer.forgetting_mut().unwrap().rope = Some(rope);
        let error = slot_error(&model(config), 40, 30, None);
        assert!(error < 1e-6, "{rope:?} is off by {error}");
    }
}

#[test]
fn slots_match_forward_pass_for_every_option() {
    let mut grouped = ModelConfig::fox_pro(64, 2, 4);
    let mixer = grouped.mixer.forgetting_mut().unwrap();
    (mixer.kv_heads, mixer.window) = (2, Some(90));
    let mut sinks = ModelConfig::fox_llama(32, 2, 2);
    sinks.mixer.forgetting_mut().unwrap().sink = true;
    let configs = [
        ("sinks", sinks),
        ("pro", ModelConfig::fox_pro(32, 2, 2)),
        ("llama", ModelConfig::fox_llama(32, 2, 2)),
        ("without gates", ModelConfig::transformer_pro(32, 2, 2)),
        ("grouped heads in a window", grouped),
    ];
    for (name, config) in configs {
        let model = model(config);
        for log_tolerance in [None, Some(-20.0)] {
            let error = slot_error(&model, 100, 70, log_tolerance);
            assert!(error < 1e-6, "{name} with tolerance {log_tolerance:?} is off by {error}");
        }
    }
}

#[test]
fn slots_reject_wrong_rows() {
    let model = model(ModelConfig::fox_llama(32, 1, 2));
    let policy = model.page_policy(None, 64).unwrap();
    let mut slots = model.open_slots(2, 64, &policy).unwrap().unwrap();
    let row = |slot| DecodeRow { slot, token: RowToken::Id(0), position: 0, draw: None };
    let error = |slots: &mut Slots, rows: &[DecodeRow]| slots.begin(rows).unwrap_err().to_string();
    assert!(error(&mut slots, &[row(2)]).ends_with("slot 2 is out of range (2 slots)"));
    assert!(error(&mut slots, &[row(1), row(1)]).ends_with("two rows for slot 1"));
    assert!(error(&mut slots, &[DecodeRow { position: 5, ..row(0) }]).contains("position 5"));
    assert!(slots.logits(9).is_err());
    let mut own = slots.enter(model.new_paged_cache(&policy).unwrap()).unwrap();
    let mut others = model.open_slots(1, 64, &policy).unwrap().unwrap();
    let error = others.row(&mut own, RowToken::Id(0), None).unwrap_err();
    assert_eq!(error.to_string(), "the sequence is in a slot of another model");
}
