//! Which checkpoints are kept, and which one a run resumes from.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::Path;

use fox_data::{Batch, LoaderState};
use fox_model::{Model, ModelConfig, SafetensorsFile};
use fox_tensor::Tensor;
use fox_train::checkpoint::{CheckpointStore, Resumed, RunState};
use fox_train::recipe::CheckpointRecipe;
use fox_train::{OptimizerRecipe, Stepper, Updater, optimizer_names, recipe};

struct Bench {
    store: CheckpointStore,
    model: Model,
    updater: Updater,
}

impl Bench {
    fn new(folder: &Path, keep: usize, keep_every: u64) -> Bench {
        let config = ModelConfig::fox_llama(16, 1, 2).with_vocab(8);
        let model = Model::init(&config, 3, &fox_cpu::device()).unwrap();
        let updater =
            Updater::new(&OptimizerRecipe::default(), None, model.params(), model.device())
                .unwrap();
        let keep = CheckpointRecipe { every: 1, keep, keep_every };
        Bench { store: CheckpointStore::new(folder.to_path_buf(), keep), model, updater }
    }

    fn write(&self, step: u64) {
        let state = RunState {
            step,
            tokens: step * 10,
            ..RunState::start(LoaderState { next_batch: step, fingerprint: 7 })
        };
        self.store.write(&self.model, &self.updater, &state).unwrap();
    }

    fn resume(&self) -> (u64, Vec<String>) {
        let optimizer = OptimizerRecipe::default();
        let resumed = self.store.resume(&optimizer, None, self.model.device()).unwrap().unwrap();
        let weights = |model: &Model| -> Vec<f32> {
            model.params().iter().flat_map(|(_, _, value)| value.to_f32().unwrap()).collect()
        };
        assert_eq!(weights(&resumed.model), weights(&self.model));
        assert_eq!(resumed.state.loader.next_batch, resumed.state.step);
        (resumed.state.step, resumed.notices)
    }
}

/// Every optimizer with and without an average and dropout: three steps, a checkpoint and three more are six steps to the bit.
#[test]
fn optimizer_state_resumes_bit_exactly() {
    let set = ["training.batch=2", "data.sequence_length=16", "training.tokens=1000000"];
    for name in optimizer_names() {
        for (ema, dropout) in [(None, "0.0"), (Some(0.8), "0.3")] {
            let dir = tempfile::tempdir().unwrap();
            let mut overrides = set.map(String::from).to_vec();
            overrides.push(format!("optimizer.name={name}"));
            overrides.push(format!("training.dropout={dropout}"));
            let recipe = recipe::load("tiny-fox-pro", &overrides).unwrap();
            let bench = Bench::new(dir.path(), 2, 0);
            let start = || {
                let Bench { model, .. } = Bench::new(dir.path(), 2, 0);
                let device = model.device().clone();
                let updater =
                    Updater::new(&recipe.optimizer, ema, model.params(), &device).unwrap();
                let state = RunState::start(LoaderState { next_batch: 0, fingerprint: 7 });
                Stepper::new(&recipe, model, updater, state).unwrap()
            };
            let (mut whole, mut torn) = (start(), start());
            (0..6).for_each(|step| made(&mut whole, step));
            (0..3).for_each(|step| made(&mut torn, step));
            bench.store.write(&torn.model, &torn.updater, &torn.state).unwrap();
            drop(torn);
            let device = fox_cpu::device();
            let resumed = bench.store.resume(&recipe.optimizer, ema, &device).unwrap().unwrap();
            let Resumed { model, updater, state, .. } = resumed;
            let mut torn = Stepper::new(&recipe, model, updater, state).unwrap();
            (3..6).for_each(|step| made(&mut torn, step));
            assert!(everything(&whole) == everything(&torn), "{name} {ema:?}");
            assert_eq!(whole.state, torn.state);
        }
    }
}

fn made(stepper: &mut Stepper, step: u64) {
    let ids = |shift: u64| (0..32).map(|i| ((i * i + step + shift) % 8) as i32).collect();
    let state = LoaderState { next_batch: step + 1, fingerprint: 7 };
    let batch =
        Batch { inputs: ids(0), labels: ids(1), batch: 2, time: 16, boundaries: None, state };
    assert!(!stepper.step(&batch).unwrap().report.skipped);
}

/// Weights and what the optimizer keeps of them, by name.
fn everything(stepper: &Stepper) -> Vec<(String, Vec<u32>)> {
    let bits = |x: &Tensor| x.to_f32().unwrap().into_iter().map(f32::to_bits).collect();
    let mut all = Vec::new();
    for (id, spec, value) in stepper.model.params().iter() {
        all.push((spec.name.clone(), bits(value)));
        for (state, tensor) in stepper.updater.state(id, spec) {
            all.push((format!("{state}.{}", spec.name), bits(tensor)));
        }
    }
    all
}

/// The bias correction of Adam counts updates, not steps: some may have been skipped.
#[test]
fn resume_restores_the_number_of_updates() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 0);
    let start = RunState::start(LoaderState { next_batch: 5, fingerprint: 7 });
    let state = RunState { step: 5, updates: 3, skips: 2, skips_in_a_row: 1, ..start };
    bench.store.write(&bench.model, &bench.updater, &state).unwrap();
    let optimizer = OptimizerRecipe::default();
    let resumed = bench.store.resume(&optimizer, None, bench.model.device()).unwrap().unwrap();
    assert_eq!((resumed.updater.updates(), resumed.state), (3, state));
}

/// The names by which checkpoints of earlier versions hold AdamW's moments.
#[test]
fn checkpoint_tensor_names_are_stable() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 0);
    bench.write(1);
    let file = bench.store.path(1).join("optimizer.safetensors");
    let file = SafetensorsFile::open(&file).unwrap();
    for (_, spec, _) in bench.model.params().iter() {
        for state in ["m", "v"] {
            let dims = file.dims(&format!("{state}.{}", spec.name));
            assert_eq!(dims, Some(&spec.dims[..]), "{state}.{}", spec.name);
        }
        assert_eq!(file.dims(&format!("ema.{}", spec.name)), None);
    }
}

#[test]
fn reports_missing_state_of_another_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 0);
    bench.write(1);
    let muon = OptimizerRecipe::named("muon").unwrap();
    let error = bench.store.resume(&muon, None, bench.model.device()).unwrap_err().to_string();
    assert!(error.contains("momentum.model.layers.0.attn.q_proj.weight is missing"), "{error}");
}

#[test]
fn retains_newest_and_every_fourth() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 4);
    (1..=10).for_each(|step| bench.write(step));
    assert_eq!(bench.store.steps().unwrap(), [4, 8, 9, 10]);
    assert_eq!(bench.resume(), (10, Vec::new()));
}

#[test]
fn falls_back_to_previous_checkpoint() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("it has no manifest", |p| fs::remove_file(p.join("manifest.json")).unwrap()),
        ("manifest.json is damaged", |p| fs::write(p.join("manifest.json"), "{").unwrap()),
        ("state.json is missing", |p| fs::remove_file(p.join("state.json")).unwrap()),
        ("optimizer.safetensors has 100 of", |p| {
            let file = fs::File::options().write(true).open(p.join("optimizer.safetensors"));
            file.unwrap().set_len(100).unwrap();
        }),
        ("the checksum of model/model.safetensors differs", |p| {
            let path = p.join("model/model.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("model/config.json is missing", |p| fs::remove_file(p.join("model/config.json")).unwrap()),
    ];
    for (words, damage) in damages {
        let dir = tempfile::tempdir().unwrap();
        let bench = Bench::new(dir.path(), 3, 0);
        (1..=3).for_each(|step| bench.write(step));
        damage(&bench.store.path(3));
        assert_eq!(bench.store.newest_whole().unwrap(), 2, "{words}");
        let (step, notices) = bench.resume();
        assert_eq!((step, notices.len()), (2, 1), "{words}");
        assert!(notices[0].contains(words) && !notices[0].contains('\n'), "{}", notices[0]);
        // The damaged one is set aside, so its step can be written again.
        assert_eq!(bench.store.steps().unwrap(), [1, 2]);
        bench.write(3);
        assert_eq!(bench.resume(), (3, Vec::new()));
    }
}

#[test]
fn reports_damaged_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 3, 0);
    let none = bench.store.newest_whole().unwrap_err().to_string();
    assert!(none.contains("holds no checkpoint yet"), "{none}");
    bench.write(1);
    fs::write(bench.store.path(1).join("manifest.json"), "{").unwrap();
    let said = bench.store.newest_whole().unwrap_err().to_string();
    assert!(said.contains("can be used") && said.contains("manifest.json is damaged"), "{said}");
}

#[test]
fn removes_partial_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 0);
    let optimizer = OptimizerRecipe::default();
    let resume = || bench.store.resume(&optimizer, None, bench.model.device());
    assert!(resume().unwrap().is_none());
    bench.write(1);
    let partial = dir.path().join("step-00000002.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("state.json"), "half").unwrap();
    assert_eq!(bench.resume().0, 1);
    assert!(!partial.exists());
    fs::remove_file(bench.store.path(1).join("manifest.json")).unwrap();
    let error = resume().unwrap_err().to_string();
    assert!(error.contains("no checkpoint in") && error.contains("start again"), "{error}");
    assert!(bench.store.path(1).exists(), "nothing is thrown away");
}
