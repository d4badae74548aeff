//! Checkpoints: round trips, conversion, shards, and damaged or hostile files.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::fs;
use std::path::{Path, PathBuf};

use fox_model::{
    CheckpointLayout, CheckpointReader, Error, FileDtype, Model, ModelConfig, ModelType,
    SafetensorsFile, TensorMismatch, WriteOptions, write_checkpoint,
};
use fox_tensor::{Device, ParamId};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn options(model_type: ModelType) -> WriteOptions {
    WriteOptions { model_type, dtype: FileDtype::F32, max_shard_bytes: None }
}

fn convert(from: &Path, to: &Path, layout: CheckpointLayout) -> fox_model::Result<()> {
    let mut reader = CheckpointReader::open(from)?;
    let config = reader.config().clone();
    write_checkpoint(to, &config, &options(config.default_model_type(layout)), |id| reader.read(id))
}

fn all_bits(dir: &Path) -> (ModelConfig, Vec<Vec<u32>>) {
    let mut reader = CheckpointReader::open(dir).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let count = reader.specs().len();
    let tensors = (0..count).map(|i| bits(reader.read(ParamId(i)).unwrap())).collect();
    (reader.config().clone(), tensors)
}

#[test]
fn official_to_fla_and_back_is_the_identity() {
    let temp = tempdir().unwrap();
    for name in
        ["fox_llama", "fox_llama_qknorm", "fox_llama_qknorm_ogate", "transformer_llama_as_fox"]
    {
        let (fla, back) = (temp.path().join(name), temp.path().join(format!("{name}_back")));
        convert(&dump(name), &fla, CheckpointLayout::FLA).unwrap();
        convert(&fla, &back, CheckpointLayout::OFFICIAL).unwrap();
        let names = SafetensorsFile::open(&fla.join("model.safetensors")).unwrap();
        let names: Vec<&str> = names.names().collect();
        assert!(names.contains(&"model.layers.1.mlp.up_proj.weight"), "{names:?}");
        assert!(!names.iter().any(|n| n.contains("fgate") || n.contains("ogate")), "{names:?}");
        assert_eq!(all_bits(&dump(name)), all_bits(&fla), "{name}");
        assert_eq!(all_bits(&dump(name)), all_bits(&back), "{name}");
    }
    let back = temp.path().join("fla_fox_official");
    convert(&dump("fla_fox"), &back, CheckpointLayout::OFFICIAL).unwrap();
    assert_eq!(all_bits(&dump("fla_fox")), all_bits(&back));
    let error =
        convert(&dump("fox_pro"), &temp.path().join("no"), CheckpointLayout::FLA).unwrap_err();
    assert!(matches!(error, Error::NotExpressible { .. }), "{error}");
    assert!(!temp.path().join("no").exists());
}

#[test]
fn saved_models_load_bit_exact() {
    let temp = tempdir().unwrap();
    let config = ModelConfig::fox_pro(32, 2, 2).with_vocab(50);
    let model = Model::init(&config, 7, &Device::naive()).unwrap();
    let whole = temp.path().join("deep/er/whole");
    model.save(&whole, &WriteOptions::for_model(&config)).unwrap();
    for limit in [1, 5000, 30_000, u64::MAX] {
        let dir = temp.path().join(format!("shards_{limit}"));
        let options =
            WriteOptions { max_shard_bytes: Some(limit), ..WriteOptions::for_model(&config) };
        model.save(&dir, &options).unwrap();
        assert_eq!(all_bits(&whole), all_bits(&dir), "{limit}");
        let index = dir.join("model.safetensors.index.json");
        assert_eq!(index.exists(), limit != u64::MAX, "{limit}");
        let again = Model::from_checkpoint(&dir, &Device::naive()).unwrap();
        for ((_, _, a), (_, _, b)) in model.params().iter().zip(again.params().iter()) {
            assert_eq!(a.to_f32().unwrap(), b.to_f32().unwrap());
        }
    }
    assert_eq!(all_bits(&whole).0, config);
    // The format's own library reads the files, too.
    let bytes = fs::read(whole.join("model.safetensors")).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let table = theirs.tensor("model.embeddings.weight").unwrap();
    assert_eq!(table.shape(), [50, 32]);
    assert_eq!(theirs.len(), model.params().len());
    // Nothing is left over beside the finished folders.
    let names = |dir: &Path| fs::read_dir(dir).unwrap().count();
    assert_eq!((names(temp.path()), names(whole.parent().unwrap())), (5, 1));
}

/// Early Mamba-2 files call the table `backbone.embedding.weight`.
#[test]
fn old_names_are_read() {
    let folder = copy("mamba2");
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    // A blank keeps the length.
    let old = header.replace("\"backbone.embeddings.weight\"", "\"backbone.embedding.weight\" ");
    assert_ne!(old, header);
    fs::write(&file, [&bytes[..8], old.as_bytes(), &bytes[8 + length..]].concat()).unwrap();
    assert_eq!(all_bits(folder.path()), all_bits(&dump("mamba2")));
    // A table that is missing is missed under today's name.
    let none = header.replace("\"backbone.embeddings.weight\"", "\"backbone.embedding.height\" ");
    fs::write(&file, [&bytes[..8], none.as_bytes(), &bytes[8 + length..]].concat()).unwrap();
    let error = CheckpointReader::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("missing: backbone.embeddings.weight"), "{error}");
}

#[test]
fn half_precision_rounds_to_nearest_even() {
    let temp = tempdir().unwrap();
    let config = ModelConfig::fox_llama(8, 1, 1).with_vocab(2).with_mlp_width(1);
    // 1 + 2^-8 lies halfway between two bf16 values, 1 + 3 * 2^-8 as well; ties go to even.
    let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5e-8, 65504.0, 0.1, f32::INFINITY];
    let source = |specs: &[fox_model::ParamSpec], id: ParamId| -> Vec<f32> {
        (0..specs[id.0].count()).map(|i| values[i % values.len()]).collect()
    };
    let specs = config.param_specs();
    for (dtype, want) in [
        (FileDtype::Bf16, [1.0, 1.015625, -2.502929e-8, 65536.0, 205.0 / 2048.0, f32::INFINITY]),
        (
            FileDtype::F16,
            [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 0.0, 65504.0, 819.0 / 8192.0, f32::INFINITY],
        ),
    ] {
        let dir = temp.path().join(format!("{dtype:?}"));
        let options = WriteOptions { dtype, ..WriteOptions::for_model(&config) };
        write_checkpoint(&dir, &config, &options, |id| Ok(source(&specs, id))).unwrap();
        let got = CheckpointReader::open(&dir).unwrap().read(ParamId(0)).unwrap();
        for (g, w) in got.iter().zip(want) {
            assert!(g == &w || (g - w).abs() < 1e-13, "{dtype:?}: {g} {w}");
        }
    }
    let options = WriteOptions { dtype: FileDtype::F16, ..WriteOptions::for_model(&config) };
    let dir = temp.path().join("overflow");
    let error = write_checkpoint(&dir, &config, &options, |id| Ok(vec![1e6; specs[id.0].count()]))
        .unwrap_err();
    assert!(error.to_string().contains("beyond the range of f16"), "{error}");
    assert!(!dir.exists());
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 2, "no leftovers");
}

#[test]
fn occupied_folders_stay_untouched() {
    let temp = tempdir().unwrap();
    let config = ModelConfig::fox_llama(8, 1, 1);
    let write = |dir: &Path| {
        let specs = config.param_specs();
        let options = WriteOptions::for_model(&config);
        write_checkpoint(dir, &config, &options, |id| Ok(vec![0.0; specs[id.0].count()]))
    };
    let taken = temp.path().join("taken");
    fs::create_dir(&taken).unwrap();
    write(&taken).expect("an empty folder is free");
    assert!(matches!(write(&taken), Err(Error::Occupied { .. })));
    let file = temp.path().join("file");
    fs::write(&file, "precious").unwrap();
    assert!(matches!(write(&file), Err(Error::Occupied { .. })));
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

/// A copy of a dump's checkpoint to be spoiled.
fn copy(name: &str) -> TempDir {
    let temp = tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(dump(name).join(file), temp.path().join(file)).unwrap();
    }
    temp
}

#[test]
fn lists_all_tensor_mismatches() {
    let temp = copy("fox_pro");
    let config = temp.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let text = text
        .replace("\"use_k_shift\": true", "\"use_k_shift\": false")
        .replace("\"vocab_size\": 64", "\"vocab_size\": 65");
    fs::write(&config, text).unwrap();
    let error = CheckpointReader::open(temp.path()).unwrap_err();
    let Error::Mismatch { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 8, "{error}");
    let text = error.to_string();
    for line in [
        "misshapen: model.embeddings.weight, expected shape [65, 32], found [64, 32]",
        "misshapen: lm_head.weight, expected shape [65, 32], found [64, 32]",
        "missing: model.layers.0.attn.k_proj.weight, expected shape [32, 32]",
        "missing: model.layers.1.attn.k_proj.weight, expected shape [32, 32]",
        "unexpected: model.layers.1.attn.k_proj.shift_proj.weight, found shape [2, 32]",
        "unexpected: model.layers.0.attn.k_proj.linear.weight, found shape [32, 32]",
    ] {
        assert!(text.contains(line), "{text}\n  should contain {line}");
    }
}

#[test]
fn index_must_match_the_shards() {
    let temp = tempdir().unwrap();
    let config = ModelConfig::fox_llama(8, 1, 1);
    let specs = config.param_specs();
    let options = WriteOptions { max_shard_bytes: Some(1000), ..WriteOptions::for_model(&config) };
    let dir = temp.path().join("model");
    write_checkpoint(&dir, &config, &options, |id| Ok(vec![0.5; specs[id.0].count()])).unwrap();
    let index = dir.join("model.safetensors.index.json");
    let good = fs::read_to_string(&index).unwrap();
    let first = "model-00001-of";
    for (from, to, want) in [
        ("\"lm_head.weight\"", "\"lm_head.wait\"", "not in model-"),
        (first, "../model-00001-of", "is not the name of a file in this folder"),
        (first, "/etc/model-00001-of", "is not the name of a file in this folder"),
        (first, "model-00099-of", "cannot open"),
        ("weight_map", "weightmap", "not valid JSON"),
    ] {
        fs::write(&index, good.replace(from, to)).unwrap();
        let error = CheckpointReader::open(&dir).expect_err(to).to_string();
        assert!(error.contains(want), "{error}");
    }
    fs::write(&index, &good).unwrap();
    CheckpointReader::open(&dir).unwrap();
    // A tensor in two shards, whatever the index says.
    let shard = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).find(|name| {
        let name = name.to_string_lossy();
        name.starts_with("model-00001")
    });
    fs::copy(dir.join(shard.unwrap()), dir.join("twin.safetensors")).unwrap();
    let doubled = good.replacen("{", "{ \"extra\": 0,", 1);
    let doubled = doubled
        .replace("\"weight_map\": {", "\"weight_map\": { \"another\": \"twin.safetensors\",");
    fs::write(&index, doubled).unwrap();
    let error = CheckpointReader::open(&dir).unwrap_err().to_string();
    assert!(error.contains("in two shards: model.embeddings.weight"), "{error}");
    assert!(error.contains("not in twin.safetensors, where the index puts it: another"), "{error}");
}

#[test]
fn names_wrong_types_and_missing_files() {
    let temp = copy("fox_llama");
    let file = temp.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let at = bytes.windows(5).position(|w| w == b"\"F32\"").unwrap();
    let mut retyped = bytes.clone();
    retyped[at..at + 5].copy_from_slice(b"\"I32\"");
    fs::write(&file, &retyped).unwrap();
    let error = CheckpointReader::open(temp.path()).unwrap_err();
    assert!(
        matches!(&error, Error::Mismatch { problems, .. }
            if matches!(problems[..], [TensorMismatch::WrongType { .. }])),
        "{error}"
    );
    fs::remove_file(&file).unwrap();
    let error = CheckpointReader::open(temp.path()).unwrap_err().to_string();
    assert!(error.starts_with("cannot open") && error.contains("model.safetensors"), "{error}");
}

fn open_bytes(bytes: &[u8]) -> fox_model::Result<()> {
    let temp = tempdir().unwrap();
    fs::copy(dump("fox_llama").join("config.json"), temp.path().join("config.json")).unwrap();
    fs::write(temp.path().join("model.safetensors"), bytes).unwrap();
    let mut reader = CheckpointReader::open(temp.path())?;
    for i in 0..reader.specs().len() {
        reader.read(ParamId(i))?;
    }
    Ok(())
}

#[test]
fn announced_sizes_are_checked_before_allocation() {
    let bytes = fs::read(dump("fox_llama").join("model.safetensors")).unwrap();
    open_bytes(&bytes).unwrap();
    for size in [u64::MAX, 1 << 62, 100_000_001, bytes.len() as u64, bytes.len() as u64 - 7] {
        let mut bytes = bytes.clone();
        bytes[..8].copy_from_slice(&size.to_le_bytes());
        let error = open_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains("announces a header"), "{error}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(open_bytes(&longer).unwrap_err().to_string().contains("describes"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rejects_truncated_files(cut in 0usize..20_000) {
        let bytes = fs::read(dump("fox_llama").join("model.safetensors")).unwrap();
        let end = bytes.len().saturating_sub(1 + cut * bytes.len() / 20_000);
        prop_assert!(open_bytes(&bytes[..end]).is_err());
    }

    #[test]
    fn corrupted_headers_never_panic(
        edits in proptest::collection::vec((0usize..3000, any::<u8>()), 1..6)
    ) {
        let mut bytes = fs::read(dump("fox_llama").join("model.safetensors")).unwrap();
        for (at, byte) in edits {
            bytes[at] = byte;
        }
        let _ = open_bytes(&bytes);
    }

    #[test]
    fn arbitrary_headers_never_panic(
        json in prop_oneof![
            ".{0,100}",
            r#"\{"[a-c]":\{"dtype":"(F32|BF16|I64|F4)","shape":\[[0-9]{0,20}(,[0-9]{1,20})?\],"data_offsets":\[[0-9]{1,20},[0-9]{1,20}\]\}\}"#,
        ],
        tail in proptest::collection::vec(any::<u8>(), 0..64),
        announced in proptest::option::of(any::<u64>()),
    ) {
        let mut bytes = announced.unwrap_or(json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend(tail);
        prop_assert!(open_bytes(&bytes).is_err());
    }
}

#[test]
fn pickled_weights_name_the_conversion() {
    let folder = tempdir().unwrap();
    fs::copy(dump("hf_llama").join("config.json"), folder.path().join("config.json")).unwrap();
    for name in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        fs::write(folder.path().join(name), "x").unwrap();
        let error = CheckpointReader::open(folder.path()).unwrap_err();
        assert!(matches!(error, Error::PickledWeights { .. }), "{error}");
        assert!(error.to_string().contains(".save_pretrained("), "{error}");
        fs::remove_file(folder.path().join(name)).unwrap();
    }
}
