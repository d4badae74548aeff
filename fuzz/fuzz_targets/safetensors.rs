//! A safetensors file: opened and read tensor by tensor, alone and as the weights of a model.
#![no_main]

use std::fs;
use std::sync::LazyLock;

use fox_fuzz::{check_sentence, folder};
use fox_model::{CheckpointReader, ModelConfig, SafetensorsFile};
use fox_tensor::ParamId;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = folder();
    let mut config = ModelConfig::fox_llama(2, 1, 1).with_vocab(2).with_mlp_width(2);
    let json = config.to_json(config.storage_type()).expect("a valid configuration");
    fs::write(folder.path().join("config.json"), json.to_string()).expect("memory");
    folder
});

fuzz_target!(|bytes: &[u8]| {
    let path = FOLDER.path().join("model.safetensors");
    fs::write(&path, bytes).expect("memory");
    match SafetensorsFile::open(&path) {
        Ok(mut file) => {
            let names: Vec<String> = file.names().map(str::to_owned).collect();
            for name in names {
                let count: usize = file.dims(&name).expect("a name of the file").iter().product();
                match file.read_f32(&name) {
                    Ok(values) => assert_eq!(values.len(), count),
                    Err(error) => check_sentence(&error),
                }
                match file.read_i32(&name) {
                    Ok(values) => assert_eq!(values.len(), count),
                    Err(error) => check_sentence(&error),
                }
            }
        }
        Err(error) => check_sentence(&error),
    }
    match CheckpointReader::open(FOLDER.path()) {
        Ok(mut reader) => {
            for id in 0..reader.specs().len() {
                reader
                    .read(ParamId(id))
                    .expect("a checkpoint that was compared with its configuration");
            }
        }
        Err(error) => check_sentence(&error),
    }
});
