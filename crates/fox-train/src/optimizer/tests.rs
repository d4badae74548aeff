//! What all optimizers have in common, and AdamW.

use super::*;
use crate::RankShard;
use crate::recipe::Reduction;
use fox_data::{Batch, LoaderState};
use fox_model::{DecayTime, ForgetGate, ForgettingConfig, ForwardOptions, Model, ModelConfig};

/// A small model with buffers, vectors, tables and matrices, some of them stacked.
pub(super) fn model(device: &Device) -> Model {
    let mut config = ModelConfig::fox_pro(32, 1, 2).with_vocab(16);
    config.mixer = Box::new(ForgettingConfig {
        gate: ForgetGate::Fixed { decay_time: Some(DecayTime { min: 2.0, max: 64.0 }) },
        ..ForgettingConfig::fox_pro(2)
    });
    Model::init(&config, 0, device).unwrap()
}

pub(super) fn gradients(model: &Model) -> Gradients {
    let ids: Vec<i32> = (0..24).map(|i| i * 5 % 16).collect();
    let state = LoaderState { next_batch: 1, fingerprint: 0 };
    let labels = ids.iter().map(|id| (id + 1) % 16).collect();
    let batch = Batch { inputs: ids, labels, batch: 1, time: 24, boundaries: None, state };
    let (micro_batch, reduction) = (1, Reduction::Running);
    let portion = RankShard { rows: 0..1, context: None, micro_batch, reduction };
    crate::gradient(model, &batch, &portion, &ForwardOptions::default()).unwrap().0
}

pub(super) fn values(model: &Model) -> Vec<Vec<f32>> {
    model.params().iter().map(|(_, _, value)| value.to_f32().unwrap()).collect()
}

pub(super) fn updater(recipe: &OptimizerRecipe, model: &Model) -> Updater {
    Updater::new(recipe, None, model.params(), model.device()).unwrap()
}

fn adamw(weight_decay: f64, clip: f64) -> OptimizerRecipe {
    let rule = AdamW { weight_decay, ..AdamW::default() };
    OptimizerRecipe { clip, ..OptimizerRecipe::of(&rule).unwrap() }
}

/// The weights after one step.
fn stepped(recipe: &OptimizerRecipe, lr: f64) -> (Model, StepReport) {
    let mut model = model(&fox_cpu::device());
    let (mut updater, gradients) = (updater(recipe, &model), gradients(&model));
    let report = updater.step(model.params_mut(), gradients, lr).unwrap();
    (model, report)
}

#[test]
fn weight_decay_changes_only_its_group() {
    let (start, without, with) = (
        model(&fox_cpu::device()),
        stepped(&adamw(0.0, 1.0), 0.01).0,
        stepped(&OptimizerRecipe::default(), 0.01).0,
    );
    let all = [&start, &without, &with].map(values);
    let mut seen = [0, 0, 0];
    for (i, (_, spec, _)) in start.params().iter().enumerate() {
        let [p0, p1, p2] = [&all[0][i], &all[1][i], &all[2][i]];
        if !spec.trainable {
            assert_eq!((p0, p0), (p1, p2), "{} is a buffer", spec.name);
            seen[0] += 1;
        } else if !spec.decay {
            assert_ne!(p0, p1, "{}", spec.name);
            assert_eq!(p1, p2, "{} has no decay", spec.name);
            seen[1] += 1;
        } else {
            for ((p0, p1), p2) in p0.iter().zip(p1).zip(p2) {
                assert!((p1 - p2 - 0.01 * 0.1 * p0).abs() < 1e-7, "{}", spec.name);
            }
            seen[2] += 1;
        }
    }
    assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
}

#[test]
fn clips_gradient_to_norm() {
    let free = adamw(0.1, f64::INFINITY);
    let norm = stepped(&free, 0.0).1.grad_norm;
    let report = stepped(&adamw(0.1, norm / 4.0), 0.0).1;
    assert_eq!(report.grad_norm, norm);
    assert_eq!(report.clip_scale, norm / 4.0 / (norm + 1e-6));
    assert_eq!(stepped(&free, 0.0).1.clip_scale, 1.0);
}

/// A gradient of one element, a power of two, so that its norm is known exactly, through clipping to the state.
/// The norm is small: the 1e-6 in the factor then is one part in ten thousand.
#[test]
fn clip_factor_at_threshold() {
    let element = 1.0 / 128.0f32;
    let norm = f64::from(element);
    for (clip, factor) in [
        (norm * 1.001, 1.0),
        (norm + 1.001e-6, 1.0),
        (norm, norm / (norm + 1e-6)),
        (norm * 0.999, norm * 0.999 / (norm + 1e-6)),
        (norm * 0.5, norm * 0.5 / (norm + 1e-6)),
    ] {
        let mut model = model(&fox_cpu::device());
        let device = model.device().clone();
        let mut updater = updater(&adamw(0.1, clip), &model);
        let mut gradients = gradients(&model);
        let head = model.params().find("lm_head.weight").unwrap();
        for (id, grad) in gradients.iter_mut() {
            let mut values = vec![0.0; grad.len()];
            values[0] = if id == head { element } else { 0.0 };
            *grad = device.from_f32(&values, grad.shape()).unwrap();
        }
        let report = updater.step(model.params_mut(), gradients, 0.1).unwrap();
        assert_eq!((report.grad_norm, report.clip_scale), (norm, factor), "clip {clip}");
        let state = updater.state(head, model.params().spec(head));
        let first = |i: usize| f64::from(state[i].1.to_f32().unwrap()[0]);
        let scaled = norm * factor;
        assert!((first(0) / (0.1 * scaled) - 1.0).abs() < 1e-6, "clip {clip}: m");
        assert!((first(1) / (0.05 * scaled * scaled) - 1.0).abs() < 2e-6, "clip {clip}: v");
    }
}

#[test]
fn skips_non_finite_gradients() {
    for name in optimizer_names() {
        let mut model = model(&fox_cpu::device());
        let device = model.device().clone();
        let recipe = OptimizerRecipe::named(name).unwrap();
        let mut updater = Updater::new(&recipe, Some(0.9), model.params(), &device).unwrap();
        let head = model.params().find("lm_head.weight").unwrap();
        let healthy = model.params().value(head).clone();
        let broken = device.full(healthy.shape(), f32::NAN).unwrap();
        model.params_mut().set(head, broken).unwrap();
        let bad = gradients(&model);
        model.params_mut().set(head, healthy).unwrap();
        let before = (values(&model), states(&updater, &model));
        let report = updater.step(model.params_mut(), bad, 0.1).unwrap();
        assert!(report.skipped && !report.grad_norm.is_finite());
        assert!((values(&model), states(&updater, &model)) == before, "{name}");
        assert_eq!(updater.updates(), 0);
    }
}

/// Everything that is kept, by name.
fn states(updater: &Updater, model: &Model) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for (id, spec, _) in model.params().iter() {
        for (name, tensor) in updater.state(id, spec) {
            all.push((format!("{name}.{}", spec.name), tensor.to_f32().unwrap()));
        }
    }
    all
}

/// FNV-1a over the bits.
fn hash(values: impl Iterator<Item = f32>) -> u64 {
    values.flat_map(|x| x.to_bits().to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// AdamW to the bit, whatever is done to the code around it. The bits are the same on every machine: weights
/// and gradients are fractions of integers, the update of an element has only sums, products, quotients and
/// roots, and without clipping nothing depends on the order of a sum.
#[test]
fn adamw_matches_known_bits() {
    let mut model = model(&fox_cpu::device());
    let device = model.device().clone();
    let fraction = |i: usize, step: usize| {
        let word = ((i * 31 + step * 1009) as u32).wrapping_mul(2_654_435_761);
        (word >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let fill =
        |len: usize, step: usize| -> Vec<f32> { (0..len).map(|i| fraction(i, step)).collect() };
    let ids: Vec<(ParamId, Vec<usize>)> =
        model.params().iter().map(|(id, spec, _)| (id, spec.dims.clone())).collect();
    for (id, dims) in &ids {
        let len = dims.iter().product();
        let value = device.from_f32(&fill(len, id.0), &dims[..]).unwrap();
        model.params_mut().set(*id, value).unwrap();
    }
    let mut updater = updater(&adamw(0.1, f64::INFINITY), &model);
    for step in 1..=5 {
        let mut gradients = gradients(&model);
        for (id, grad) in gradients.iter_mut() {
            let values = fill(grad.len(), id.0 + 100 * step);
            *grad = device.from_f32(&values, grad.shape()).unwrap();
        }
        updater.step(model.params_mut(), gradients, 0.01 * step as f64).unwrap();
    }
    assert_eq!(format!("{:016x}", hash(values(&model).into_iter().flatten())), "b334c23a08d664a7");
    let states = states(&updater, &model).into_iter().flat_map(|(_, values)| values);
    assert_eq!(format!("{:016x}", hash(states)), "d78e056968b7dbba");
}
