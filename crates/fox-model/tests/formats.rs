//! A file format from outside: another layout for a mixer that is built in.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::PathBuf;

use fox_model::mixers::{FileFormat, Format, MixerFamily, register};
use fox_model::{
    CheckpointLayout, CheckpointReader, DeltaConfig, FileTensor, Model, ModelConfig, ModelType,
    ParamSpec, SafetensorsFile, WriteOptions, split_mlp,
};
use fox_tensor::{Device, ParamId};
use serde_json::json;

const OTHER: CheckpointLayout = CheckpointLayout { name: "other", owner: "another project's" };

static FORMAT: Format<DeltaConfig> = Format {
    suits: |mixer, _| !mixer.decay,
    lacks: |mixer, _| if mixer.output_gate { vec!["an output gate"] } else { Vec::new() },
    tensors: renamed,
    old_name: |name| Some(name.replace("decoder.", "dec.")),
    ..Format::new(
        "other_delta",
        OTHER,
        "OtherForCausalLM",
        |fields| Ok(DeltaConfig::delta_net(fields.size("n_head", 2)?, fields.size("d_head", 16)?)),
        |mixer, _, map| {
            map.insert("n_head".into(), json!(mixer.heads));
            map.insert("d_head".into(), json!(mixer.key_dim));
        },
    )
};

static FAMILY: MixerFamily = MixerFamily {
    name: "the other layout",
    formats: &[&FORMAT as &dyn FileFormat],
    architectures: &[],
};

fn renamed(id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
    let mut tensors = split_mlp(id, spec);
    for tensor in &mut tensors {
        tensor.name = tensor.name.replace("model.layers.", "decoder.");
    }
    tensors
}

#[test]
fn registered_layouts_round_trip() {
    register(&FAMILY).unwrap();
    register(&FAMILY).unwrap();
    let layouts: Vec<&str> = CheckpointLayout::foreign().iter().map(|layout| layout.name).collect();
    assert_eq!(layouts, ["official", "fla", "hf", "other"]);
    let device = Device::naive();
    let dump = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/delta_net");
    let model = Model::from_checkpoint(&dump, &device).unwrap();
    let model_type = model.config().default_model_type(OTHER);
    assert_eq!(model_type.as_str(), "other_delta");
    // Without a requested format the first one is written.
    assert_eq!(model.config().storage_type().as_str(), "delta_net-project_fox");
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("other");
    let options = WriteOptions { model_type, ..WriteOptions::for_model(model.config()) };
    model.save(&to, &options).unwrap();
    let file = to.join("model.safetensors");
    let names = SafetensorsFile::open(&file).unwrap();
    assert!(names.names().any(|name| name == "decoder.1.mlp.up_proj.weight"));
    assert_same(&to, &model);
    // The same file under its old names; blanks keep the length.
    let text = std::fs::read(&file).unwrap();
    let length = 8 + u64::from_le_bytes(text[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&text[8..length]).unwrap();
    let old = header.replace("\"decoder.", "    \"dec.");
    std::fs::write(&file, [&text[..8], old.as_bytes(), &text[length..]].concat()).unwrap();
    assert_same(&to, &model);
}

fn assert_same(dir: &std::path::Path, model: &Model) {
    let mut reader = CheckpointReader::open(dir).unwrap();
    assert_eq!(reader.model_type(), ModelType::by_name("other_delta").unwrap());
    assert_eq!(reader.config(), model.config());
    for (id, spec, value) in model.params().iter() {
        assert_eq!(reader.read(id).unwrap(), value.to_f32().unwrap(), "{}", spec.name);
    }
}

#[test]
fn names_what_a_registered_format_lacks() {
    register(&FAMILY).unwrap();
    let kind = ModelType::by_name("other_delta").unwrap();
    let message = |config: &ModelConfig| config.to_json(kind).unwrap_err().to_string();
    let mixer = DeltaConfig { output_gate: true, ..DeltaConfig::delta_net(2, 16) };
    let gated = ModelConfig::with_mixer(32, 2, mixer, 4.0);
    assert_eq!(message(&gated), "model_type `other_delta` cannot express an output gate");
    let hgrn2 = ModelConfig::hgrn2(32, 2, 2);
    assert_eq!(message(&hgrn2), "model_type `other_delta` cannot express HGRN2");
    assert_eq!(hgrn2.default_model_type(OTHER).as_str(), "hgrn2-project_fox");
}
