//! Which checkpoints are kept, and which one a run goes on from.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::Path;

use fox_data::LoaderState;
use fox_model::{Model, ModelConfig};
use fox_train::checkpoint::{CheckpointStore, RunState};
use fox_train::recipe::CheckpointRecipe;
use fox_train::{Optimizer, OptimizerSettings};

struct Bench {
    store: CheckpointStore,
    model: Model,
    optimizer: Optimizer,
}

impl Bench {
    fn new(folder: &Path, keep: usize, keep_every: u64) -> Bench {
        let mut config = ModelConfig::fox_llama(16, 1, 2);
        config.vocab_size = 8;
        let model = Model::init(&config, 3, &fox_cpu::device()).unwrap();
        let optimizer =
            Optimizer::new(OptimizerSettings::default(), model.params(), model.device()).unwrap();
        let keep = CheckpointRecipe { every: 1, keep, keep_every };
        Bench { store: CheckpointStore::new(folder.to_path_buf(), keep), model, optimizer }
    }

    fn write(&self, step: u64) {
        let state = RunState {
            step,
            tokens: step * 10,
            ..RunState::start(LoaderState { next_batch: step, fingerprint: 7 })
        };
        self.store.write(&self.model, &self.optimizer, &state).unwrap();
    }

    fn resume(&self) -> (u64, Vec<String>) {
        let resumed =
            self.store.resume(OptimizerSettings::default(), self.model.device()).unwrap().unwrap();
        let weights = |model: &Model| -> Vec<f32> {
            model.params().iter().flat_map(|(_, _, value)| value.to_f32().unwrap()).collect()
        };
        assert_eq!(weights(&resumed.model), weights(&self.model));
        assert_eq!(resumed.state.loader.next_batch, resumed.state.step);
        (resumed.state.step, resumed.notices)
    }
}

#[test]
fn the_newest_and_every_fourth_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 4);
    (1..=10).for_each(|step| bench.write(step));
    assert_eq!(bench.store.steps().unwrap(), [4, 8, 9, 10]);
    assert_eq!(bench.resume(), (10, Vec::new()));
}

#[test]
fn whatever_is_wrong_with_the_newest_the_one_before_is_used() {
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
fn pieces_are_removed_and_nothing_but_damage_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path(), 2, 0);
    let resume = || bench.store.resume(OptimizerSettings::default(), bench.model.device());
    assert!(resume().unwrap().is_none());
    bench.write(1);
    let piece = dir.path().join("step-00000002.partial");
    fs::create_dir(&piece).unwrap();
    fs::write(piece.join("state.json"), "half").unwrap();
    assert_eq!(bench.resume().0, 1);
    assert!(!piece.exists());
    fs::remove_file(bench.store.path(1).join("manifest.json")).unwrap();
    let error = resume().unwrap_err().to_string();
    assert!(error.contains("no checkpoint in") && error.contains("start again"), "{error}");
    assert!(bench.store.path(1).exists(), "nothing is thrown away");
}
