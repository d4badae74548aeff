//! The text of a config.json: rejected with a sentence, or a model that round-trips through a written file.
#![no_main]

use std::path::Path;

use fox_fuzz::check_sentence;
use fox_model::{Error, ModelConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let file = Path::new("config.json");
    let (config, model_type) = match ModelConfig::from_json(text, file) {
        Ok(read) => read,
        Err(error) => return check_sentence(&error),
    };
    let written = match config.to_json(model_type) {
        Ok(written) => written.to_string(),
        // Some formats read more than the references write.
        Err(error @ Error::NotExpressible { .. }) => return check_sentence(&error),
        Err(error) => panic!("a model read as {model_type:?} cannot be written: {error}"),
    };
    match ModelConfig::from_json(&written, file) {
        Ok(again) => assert_eq!(again, (config.clone(), model_type), "{written}"),
        Err(error) => panic!("a written file cannot be read: {error}\n{written}"),
    }
    // A valid configuration has parameters whose number can be counted.
    if config.num_layers <= 64 {
        let specs = config.param_specs();
        assert!(specs.iter().map(|spec| spec.count()).sum::<usize>() > 0);
    }
});
