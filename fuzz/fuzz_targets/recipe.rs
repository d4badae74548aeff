//! A recipe file and overrides: refused with a sentence, or the same after being written out and read again.
//!
//! The input is TOML; what stands behind a line `---` are overrides, one per line.
#![no_main]

use std::fs;
use std::sync::LazyLock;

use fox_fuzz::{check_sentence, folder};
use fox_train::recipe::load;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(folder);

fuzz_target!(|text: &str| {
    let (toml, overrides) = text.split_once("\n---\n").unwrap_or((text, ""));
    let overrides: Vec<String> = overrides.lines().map(str::to_owned).collect();
    let path = FOLDER.path().join("recipe.toml");
    fs::write(&path, toml).expect("memory");
    let recipe = match load(path.to_str().expect("a plain path"), &overrides) {
        Ok(recipe) => recipe,
        Err(error) => return check_sentence(&error),
    };
    let written = recipe.to_toml().expect("a recipe that was read");
    fs::write(&path, &written).expect("memory");
    let again = match load(path.to_str().expect("a plain path"), &[]) {
        Ok(again) => again,
        Err(error) => panic!("what was written cannot be read: {error}\n{written}"),
    };
    assert_eq!(again.to_toml().expect("a recipe that was read"), written);
    // What a run computes from it before anything else.
    let (steps, schedule) = (recipe.steps(), recipe.schedule());
    assert!(steps > 0 && recipe.micro_batch() > 0);
    for tokens in [0, recipe.training.tokens / 2, recipe.training.tokens] {
        let rate = schedule.lr(tokens);
        assert!(rate >= 0.0 && rate <= recipe.optimizer.peak_lr, "{rate} at {tokens}");
    }
    if let Err(error) = recipe.model_config(256) {
        check_sentence(&error);
    }
});
