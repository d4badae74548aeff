//! What is seen of whole models, against the definition.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::cell::RefCell;

use common::{fill, says_not_finite, subject};
use fox_eval::inspect::{InspectOptions, Inspection, inspect};
use fox_model::mixers::hybrid::LayerConfigs;
use fox_model::{
    AttentionView, ForgettingConfig, ForwardOptions, HybridConfig, LayerKind, Model, ModelConfig,
    Observer,
};
use fox_tensor::{Result as TensorResult, Segments};

/// Four query heads on two key heads, gates that differ from head to head.
fn grouped() -> Model {
    let mut config = ModelConfig::fox_pro(32, 2, 4).with_vocab(64).with_mlp_width(48);
    let mixer = config.mixer.forgetting_mut().unwrap();
    *mixer = ForgettingConfig { kv_heads: 2, ..mixer.clone() };
    let mut model = Model::init(&config, 9, &fox_cpu::device()).unwrap();
    // Weights so large that heads look at different places.
    let ids: Vec<_> = model.params().iter().map(|(id, _, value)| (id, value.clone())).collect();
    for (id, value) in ids.into_iter().filter(|(_, value)| value.dims().len() == 2) {
        let scaled: Vec<f32> = value.to_f32().unwrap().iter().map(|x| 25.0 * x).collect();
        let scaled = value.device().from_f32(&scaled, value.shape()).unwrap();
        model.params_mut().set(id, scaled).unwrap();
    }
    model
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 3 + i) % 20).collect()
}

fn look(model: &Model, tokens: &[u32]) -> Inspection {
    let options = InspectOptions {
        heads: (0..2).flat_map(|l| (0..4).map(move |h| (l, h))).collect(),
        queries_per_pixel: usize::MAX,
        ..InspectOptions::default()
    };
    inspect(&subject(model), tokens, &options).unwrap()
}

/// Queries `[T, 4 * d]`, keys `[T, 2 * d]` and log gates `[T, 4]` of every layer.
struct Raw(RefCell<Vec<[Vec<f32>; 3]>>);

impl Observer for Raw {
    fn attention(&self, view: &AttentionView<'_>) -> TensorResult<()> {
        let gates = view.log_gates.unwrap().to_f32()?;
        self.0.borrow_mut().push([view.q.to_f32()?, view.k.to_f32()?, gates]);
        Ok(())
    }
}

fn raw(model: &Model, tokens: &[u32]) -> Vec<[Vec<f32>; 3]> {
    let ids: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
    let ids = model.device().from_i32(&ids, [tokens.len()]).unwrap();
    let (seen, options) = (Raw(RefCell::new(Vec::new())), ForwardOptions::default());
    model.observe(&ids, &Segments::uniform(1, tokens.len()), &options, &seen).unwrap();
    seen.0.into_inner()
}

/// Layers keep their numbers where some are no attention.
#[test]
fn heads_of_hybrids_are_named_by_their_layer() {
    let pattern = [LayerKind::GatedDeltaNet, LayerKind::Fox, LayerKind::Window(8)].to_vec();
    let mixer = HybridConfig::new(pattern, LayerConfigs::standard(32, 4));
    let config = ModelConfig::with_mixer(32, 5, mixer, 4.0).with_vocab(64).with_mlp_width(48);
    let model = Model::init(&config, 9, &fox_cpu::device()).unwrap();
    let options = InspectOptions { heads: vec![(4, 3)], ..InspectOptions::default() };
    let seen = inspect(&subject(&model), &tokens(40), &options).unwrap();
    let layers: Vec<usize> = seen.heads.iter().map(|head| head.layer).collect();
    assert_eq!(layers, [[1; 4], [2; 4], [4; 4]].concat());
    assert_eq!(seen.pictures[0].place, (4, 3));
    // Only FoX has gates.
    let gated: Vec<bool> = seen.heads.iter().map(|head| head.half_life.is_some()).collect();
    assert_eq!(gated, [[true; 4], [false; 4], [true; 4]].concat());
    let options = InspectOptions { heads: vec![(0, 0)], ..InspectOptions::default() };
    let error = inspect(&subject(&model), &tokens(40), &options).unwrap_err().to_string();
    assert!(error.starts_with("there is no head 0 in layer 0"), "{error}");
}

/// Heads 0 and 1 share key head 0, heads 2 and 3 share key head 1; gates are those of the query head.
#[test]
fn grouped_attention_matches_definition() {
    const D: usize = 8;
    let (model, text) = (grouped(), tokens(40));
    let seen = look(&model, &text);
    let mut maps = Vec::new();
    for (layer, [q, k, gates]) in raw(&model, &text).into_iter().enumerate() {
        for head in 0..4 {
            let picture = &seen.pictures[layer * 4 + head];
            assert_eq!(picture.place, (layer, head));
            let gate = |t: usize| f64::from(gates[t * 4 + head]);
            let mut entropy = 0.0;
            for i in 0..40 {
                let weight = |j: usize| -> f64 {
                    let a = &q[i * 4 * D + head * D..][..D];
                    let b = &k[j * 2 * D + head / 2 * D..][..D];
                    let score: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    let decay: f64 = (j + 1..=i).map(gate).sum();
                    (f64::from(score) / (D as f64).sqrt() + decay).exp()
                };
                let norm: f64 = (0..=i).map(weight).sum();
                for j in 0..=i {
                    let (found, want) =
                        (picture.attention.map.values[i * 40 + j], weight(j) / norm);
                    assert!(
                        (found - want).abs() < 1e-4,
                        "L{layer} H{head} {i} {j}: {found} {want}"
                    );
                    entropy -= want * want.ln() / 40.0;
                    let decay: f64 = (j + 1..=i).map(gate).sum();
                    let forget = picture.forget.as_ref().unwrap().values[i * 40 + j];
                    assert!((forget - decay.exp()).abs() < 1e-5, "L{layer} H{head} {i} {j}");
                }
            }
            let summary = &seen.heads[layer * 4 + head];
            assert_eq!((summary.layer, summary.head), (layer, head));
            assert!((summary.entropy - entropy).abs() < 1e-3, "{} {entropy}", summary.entropy);
            let mean = (0..40).map(|t| gate(t).exp()).sum::<f64>() / 40.0;
            assert!((summary.mean_gate.unwrap() - mean).abs() < 1e-6);
            assert!((f64::from(picture.gates[7]) - gate(7).exp()).abs() < 1e-6);
            assert!((seen.gate_strips[layer].values[head * 40 + 7] - gate(7).exp()).abs() < 1e-6);
            maps.push(picture.attention.map.values.clone());
        }
    }
    // The heads differ, so that one in the place of another would have been noticed.
    for a in 0..maps.len() {
        for b in 0..a {
            let differs = maps[a].iter().zip(&maps[b]).any(|(x, y)| (x - y).abs() > 0.05);
            assert!(differs, "{a} {b}");
        }
    }
}

#[test]
fn tokens_are_sorted_by_mean_gate() {
    let (model, text) = (grouped(), tokens(40));
    let layers = raw(&model, &text);
    let seen = look(&model, &text);
    assert!(seen.token_gates.len() > 3);
    assert!(seen.token_gates.windows(2).all(|w| w[0].mean_gate <= w[1].mean_gate));
    for listed in &seen.token_gates {
        let places: Vec<usize> = (0..40).filter(|t| text[*t] == listed.id).collect();
        assert!(listed.count > 1 && listed.count == places.len());
        let gates = places.iter().flat_map(|t| layers.iter().map(move |l| &l[2][t * 4..t * 4 + 4]));
        let sum: f64 = gates.flatten().map(|g| f64::from(*g).exp()).sum();
        let mean = sum / (8 * places.len()) as f64;
        assert!((listed.mean_gate - mean).abs() < 1e-6, "{listed:?} {mean}");
    }
}

#[test]
fn nan_in_an_observed_parameter_is_reported() {
    let text = tokens(20);
    let (model, options) = (grouped(), InspectOptions::default());
    let ids: Vec<_> = model.params().iter().map(|(id, spec, _)| (id, spec.name.clone())).collect();
    for (id, name) in ids {
        let mut model = grouped();
        fill(&mut model, id, f32::NAN);
        match inspect(&subject(&model), &text, &options) {
            // The projection to logits is not part of what is looked at.
            Ok(_) => assert_eq!(name, "lm_head.weight"),
            Err(error) => assert!(says_not_finite(&error.to_string()), "{name}: {error}"),
        }
    }
}

#[test]
fn rejects_tolerance_that_prunes_everything() {
    let (model, text) = (grouped(), tokens(20));
    for tolerance in [0.0, 10_000.0, f32::INFINITY, f32::NAN] {
        let options = InspectOptions { log_pruning_tolerance: tolerance, ..Default::default() };
        let said = inspect(&subject(&model), &text, &options).unwrap_err().to_string();
        assert_eq!(
            said,
            format!(
                "a pruning tolerance is the natural log of a fraction, so negative; not {tolerance}"
            )
        );
    }
}
