//! Masked-token training of encoders: against the f64 oracle, interrupted and divided, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::ops::ControlFlow;
use std::path::Path;

use fox_data::{Batch, IGNORED_LABEL};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Device, Gradients};
use fox_train::checkpoint::RunState;
use fox_train::data::RunData;
use fox_train::recipe::{self, Reduction};
use fox_train::{Event, Outcome, RankShard, Recipe, RunSpec, Stepper, Updater, gradient, train};

/// A model that steps in milliseconds, for 8 steps.
fn recipe(extra: &[&str]) -> Recipe {
    let set = [
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        "model.num_heads=2",
        "model.intermediate_size=48",
        "data.sequence_length=64",
        "training.batch=4",
        "training.tokens=2048",
        "schedule.warmup_tokens=256",
        "checkpoints.every=2",
        "evaluation.sequences=4",
    ];
    let set: Vec<String> = set.iter().chain(extra).map(|text| text.to_string()).collect();
    recipe::load("tiny-encoder", &set).unwrap()
}

fn stepper(recipe: &Recipe, device: &Device) -> (Stepper, Batch) {
    let data = RunData::open(recipe).unwrap();
    let loader = data.loader(recipe).unwrap();
    let config = recipe.model_config(data.train.vocab_size()).unwrap();
    let model = recipe.initial_model(&config, device).unwrap();
    let updater = Updater::new(&recipe.optimizer, None, model.params(), device).unwrap();
    let state = RunState::start(loader.state_at(0));
    (Stepper::new(recipe, model, updater, state).unwrap(), loader.batch(0).unwrap())
}

fn run(recipe: &Recipe, out: &Path, last: u64) -> Outcome {
    let (recipe, out) = (recipe.clone(), out.to_path_buf());
    let spec = RunSpec { recipe, out, device: fox_cpu::device(), command: Vec::new() };
    train(&spec, &mut |event| match event {
        Event::Step(record) if record.step == last => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
    .unwrap()
}

fn bits(model: &Model) -> Vec<u32> {
    let values = model.params().iter().flat_map(|(_, _, value)| value.to_f32().unwrap());
    values.map(f32::to_bits).collect()
}

#[test]
fn interrupted_run_resumes_bit_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(&[]);
    let whole = run(&recipe, &dir.path().join("whole"), u64::MAX);
    let torn = dir.path().join("torn");
    assert_eq!(run(&recipe, &torn, 3).summary.steps, 3);
    let torn = run(&recipe, &torn, u64::MAX);
    assert!(bits(&whole.model) == bits(&torn.model));
    let evaluation = whole.summary.evaluation.unwrap();
    assert_eq!(Some(&evaluation), torn.summary.evaluation.as_ref());
    assert!(evaluation.masked && evaluation.predictions < 4 * 64 / 3, "{evaluation:?}");
    assert!(evaluation.name().ends_with(" masked tokens)"), "{}", evaluation.name());
}

/// The mean loss of the masked tokens of a batch, and its gradient.
fn masked_gradient(recipe: &Recipe, device: &Device) -> (Model, Batch, f64, Gradients) {
    let (stepper, batch) = stepper(recipe, device);
    let masking = recipe.masking(stepper.model.config()).unwrap().unwrap();
    let batch = masking.batch(&batch, 0);
    let shard =
        RankShard { rows: 0..4, context: None, micro_batch: 4, reduction: Reduction::Running };
    let options = ForwardOptions::default();
    let (gradients, loss) = gradient(&stepper.model, &batch, &shard, &options).unwrap();
    let mean = loss.sums.iter().sum::<f64>() / batch.labelled() as f64;
    (stepper.model, batch, mean, gradients)
}

#[test]
fn masked_gradient_matches_the_oracle() {
    let recipe = recipe(&["model.initializer_range=0.2"]);
    let (model, batch, want, exact) = masked_gradient(&recipe, &Device::naive());
    let (_, _, got, fast) = masked_gradient(&recipe, &fox_cpu::device());
    let mask = model.config().tokens.mask.unwrap() as i32;
    assert_eq!(mask as usize + 1, model.config().vocab_size);
    let hidden = |i: &usize| batch.inputs[*i] == mask;
    assert!((0..256).filter(hidden).all(|i| batch.labels[i] != IGNORED_LABEL));
    assert!((0..256).filter(hidden).count() > 10);
    assert!((want - got).abs() < 1e-5, "{want} {got}");
    for (id, spec, _) in model.params().iter() {
        let values = |gradients: &Gradients| gradients.get(id).unwrap().to_f64().unwrap();
        let (want, got) = (values(&exact), values(&fast));
        let scale = want.iter().fold(1e-9, |a: f64, b| a.max(b.abs()));
        let worst = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 5e-4 * scale, "{}: {worst} of {scale}", spec.name);
    }
}

#[test]
fn masks_are_independent_of_micro_batch() {
    let loss = |micro: usize| {
        let recipe = recipe(&[&format!("training.micro_batch={micro}")]);
        let (mut stepper, batch) = stepper(&recipe, &fox_cpu::device());
        let losses = (0..2).map(|_| stepper.step(&batch).unwrap().loss);
        losses.map(|loss| (loss.labelled, loss.mean)).collect::<Vec<_>>()
    };
    let whole = loss(4);
    // The same batch has other masks in another step.
    assert_ne!(whole[0].0, whole[1].0);
    for micro in [1, 2, 3] {
        for (a, b) in whole.iter().zip(loss(micro)) {
            assert_eq!(a.0, b.0);
            assert!((a.1 / b.1 - 1.0).abs() < 1e-5, "{micro}: {} {}", a.1, b.1);
        }
    }
}

#[test]
fn masked_words_are_learned() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["training.tokens=61440", "optimizer.peak_lr=1e-2", "checkpoints.every=0"];
    let recipe = recipe(&set);
    let outcome = run(&recipe, &dir.path().join("run"), u64::MAX);
    let uniform = (outcome.model.config().vocab_size as f64).ln();
    let loss = outcome.summary.evaluation.unwrap().loss;
    assert!(loss < uniform - 1.0, "{loss} {uniform}");
    let heads = outcome.model.params().find("model.layers.0.attn.fgate_proj.bias");
    assert!(heads.is_some());
}

#[test]
fn rejects_data_and_models_without_masks() {
    let error = |name: &str, set: &[&str]| {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let made = recipe::load(name, &set).and_then(|recipe| {
            let config = recipe.model_config(256)?;
            recipe.masking(&config)
        });
        made.unwrap_err().to_string()
    };
    assert_eq!(
        error("tiny-fox-pro", &["training.masking.fraction=0.2"]),
        "tiny-fox-pro: `training.masking` is for encoders; remove it, or set model.model_type to \"fox_encoder\""
    );
    // A variant that makes it a causal model must not be trained with masks.
    let text = error("tiny-encoder+window-64", &[]);
    assert!(text.contains("`training.masking` is for encoders"), "{text}");
    let text = error("tiny-encoder", &["data.layout=padded-windows"]);
    assert!(
        text.ends_with("an encoder would read the padding; use \"windows\" or \"packed\""),
        "{text}"
    );
    let text = error("tiny-encoder", &["training.masking.fraction=0"]);
    assert!(text.ends_with("`training.masking.fraction` must be above 0 and at most 1"), "{text}");
    let text = error("tiny-encoder", &["training.masking.random=0.3"]);
    assert!(text.contains("at most 1 together with training.masking.masked"), "{text}");
    let text = error("tiny-encoder", &["training.masking.fractoin=0.1"]);
    assert!(text.ends_with("did you mean `training.masking.fraction`?"), "{text}");
    let text = error("tiny-encoder", &["model.vocab_size=256"]);
    assert!(text.contains("`mask_token_id` is 256, but the vocabulary has 256 entries"), "{text}");
}
