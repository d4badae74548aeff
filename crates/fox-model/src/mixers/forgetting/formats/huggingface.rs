//! Transformers as Hugging Face's library stores them: `llama`, `mistral`, `qwen2` and `qwen3`.
//!
//! Version 5 of the library has `rope_parameters` and `layer_types`, version 4 `rope_theta`, `rope_scaling` and
//! `use_sliding_window`. Both are read, and both are written.

use fox_tensor::{AttentionWeights, ParamId, Rope, RopeScaling};
use serde_json::{Map, Value, json};

use super::{both_ways, faded, fox_only, gate_name};
use crate::Result;
use crate::checkpoint::{FileTensor, split_mlp};
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::forgetting::{ForgetGate, ForgettingConfig, QkNorm};
use crate::mixers::{CheckpointLayout, CommonFields, Format, MlpWidthFields, enabled};
use crate::params::ParamSpec;

const COMMON: CommonFields = CommonFields {
    layers: 32,
    norm_eps_field: "rms_norm_eps",
    hidden_size: 4096,
    mlp_width: MlpWidthFields::Width,
    ..CommonFields::DEFAULT
};

type Hf = Format<ForgettingConfig>;

/// Neither biases nor norms nor a window.
pub(super) static LLAMA: Hf = Format {
    lacks: |mixer, model| {
        lacks(mixer, model, &[BIAS(mixer), NORM(mixer), (mixer.window.is_some(), "sliding_window")])
    },
    ..format("llama", "LlamaForCausalLM", read_llama, write_llama)
};

/// A sliding window.
pub(super) static MISTRAL: Hf = Format {
    suits: |mixer, _| mixer.window.is_some(),
    lacks: |mixer, model| lacks(mixer, model, &[BIAS(mixer), NORM(mixer)]),
    ..format("mistral", "MistralForCausalLM", read_mistral, write_mistral)
};

/// Biases of queries, keys and values.
pub(super) static QWEN2: Hf = Format {
    suits: |mixer, _| mixer.qkv_bias,
    lacks: |mixer, model| {
        let more = [(!mixer.qkv_bias, "projections without bias"), NORM(mixer)];
        lacks(mixer, model, &more)
    },
    ..format("qwen2", "Qwen2ForCausalLM", read_qwen2, write_qwen2)
};

/// QK-norms with one weight vector for all heads.
pub(super) static QWEN3: Hf = Format {
    suits: |mixer, _| mixer.qk_norm.is_some(),
    lacks: |mixer, model| {
        let more = [
            BIAS(mixer),
            (mixer.qk_norm != Some(QkNorm::Shared), "anything but a shared QK-norm"),
            (mixer.qk_norm_eps != model.norm_eps, "a qk_norm_eps that is not norm_eps"),
        ];
        lacks(mixer, model, &more)
    },
    ..format("qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3)
};

type Lacking = fn(&ForgettingConfig) -> (bool, &'static str);
const BIAS: Lacking = |mixer| (mixer.qkv_bias, "qkv_bias");
const NORM: Lacking = |mixer| (mixer.qk_norm.is_some(), "qk_norm");

const fn format(
    model_type: &'static str,
    architecture: &'static str,
    read: fn(&Fields<'_>) -> Result<ForgettingConfig>,
    write: fn(&ForgettingConfig, &ModelConfig, &mut Map<String, Value>),
) -> Hf {
    Format {
        common: COMMON,
        tensors,
        may_hold,
        ..Format::new(model_type, CheckpointLayout::HUGGING_FACE, architecture, read, write)
    }
}

/// Options that no format of this library can express, and `more`.
fn lacks(
    mixer: &ForgettingConfig,
    _: &ModelConfig,
    more: &[(bool, &'static str)],
) -> Vec<&'static str> {
    let stick = mixer.weights == AttentionWeights::StickBreaking;
    let mut found = vec![
        both_ways(mixer),
        (stick, "attention_weights \"stick_breaking\""),
        (mixer.gate != ForgetGate::None, gate_name(mixer.gate)),
        (mixer.rope.is_none(), "use_rope false"),
        (faded(mixer), "rope_strength"),
        (mixer.sink, "use_sink"),
        (mixer.output_gate.is_some(), "use_output_gate"),
    ];
    found.extend(fox_only(mixer));
    found.extend_from_slice(more);
    enabled(&found)
}

/// The library's names.
fn tensors(id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
    let mut tensors = split_mlp(id, spec);
    for tensor in &mut tensors {
        tensor.name = tensor
            .name
            .replace("model.embeddings.", "model.embed_tokens.")
            .replace(".attn_norm.", ".input_layernorm.")
            .replace(".mlp_norm.", ".post_attention_layernorm.")
            .replace(".attn.", ".self_attn.");
    }
    tensors
}

/// Some files repeat the embedding as the output projection it is tied to; old ones hold RoPE's frequencies.
fn may_hold(name: &str) -> bool {
    name == "lm_head.weight" || name.ends_with(".rotary_emb.inv_freq")
}

fn read_llama(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    const BIAS: &str = "biases of the output projection and of the MLP are not supported";
    fields.require_false("attention_bias", BIAS)?;
    fields.require_false("mlp_bias", BIAS)?;
    let heads = fields.size("num_attention_heads", 32)?;
    read_layer(fields, heads)
}

fn read_mistral(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let window = fields.optional_size("sliding_window", Some(4096))?;
    Ok(ForgettingConfig { window, ..read_layer(fields, 8)? })
}

fn read_qwen2(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let window = read_window(fields)?;
    Ok(ForgettingConfig { qkv_bias: true, window, ..read_layer(fields, 32)? })
}

fn read_qwen3(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    fields.require_false("attention_bias", "biases beside QK-norms are not supported")?;
    let (hidden, window) = (fields.size("hidden_size", COMMON.hidden_size)?, read_window(fields)?);
    let head_dim = fields.optional_size("head_dim", Some(128))?;
    let layer = ForgettingConfig {
        qk_norm: Some(QkNorm::Shared),
        qk_norm_eps: fields.real(COMMON.norm_eps_field, COMMON.norm_eps)?,
        window,
        ..read_layer(fields, 32)?
    };
    Ok(layer.with_head_dim(hidden, head_dim))
}

/// Fields of all formats; `kv_heads` is the default.
fn read_layer(fields: &Fields<'_>, kv_heads: usize) -> Result<ForgettingConfig> {
    let (hidden, heads) =
        (fields.size("hidden_size", COMMON.hidden_size)?, fields.size("num_attention_heads", 32)?);
    let layer = ForgettingConfig {
        gate: ForgetGate::None,
        kv_heads: fields.optional_size("num_key_value_heads", Some(kv_heads))?.unwrap_or(heads),
        rope: Some(read_rope(fields)?),
        ..ForgettingConfig::fox_llama(heads)
    };
    Ok(layer.with_head_dim(hidden, fields.optional_size("head_dim", None)?))
}

/// The window of `qwen2` and `qwen3`, which must be that of all layers or of none.
fn read_window(fields: &Fields<'_>) -> Result<Option<usize>> {
    let window = fields.optional_size("sliding_window", Some(4096))?;
    let layers = fields.size("num_hidden_layers", COMMON.layers)?;
    let sliding = match fields.strings("layer_types")? {
        Some(types) => types.iter().filter(|kind| **kind == "sliding_attention").count(),
        None if !fields.flag("use_sliding_window", false)? => 0,
        None => layers.saturating_sub(fields.size("max_window_layers", 28)?),
    };
    match sliding {
        0 => Ok(None),
        n if n >= layers => Ok(window),
        n => Err(fields.error(
            "sliding_window",
            format!("holds for {n} of {layers} layers; it must hold for all of them or for none"),
        )),
    }
}

/// RoPE in the fields of version 5 or version 4 of the library.
fn read_rope(fields: &Fields<'_>) -> Result<Rope> {
    let within = fields.table("rope_parameters")?;
    let base = match &within {
        Some(table) => table.real("rope_theta", 10_000.0)?,
        None => fields.real("rope_theta", 10_000.0)?,
    };
    for table in within.iter().chain([fields]) {
        if table.real("partial_rotary_factor", 1.0)? != 1.0 {
            return Err(table.error("partial_rotary_factor", "must be 1: heads rotate as a whole"));
        }
    }
    let scaling = match &within {
        Some(table) => scaling_in(table)?,
        None => read_scaling(fields)?,
    };
    Ok(Rope { scaling, ..Rope::new(base) })
}

/// The table `rope_scaling`, if there is one.
pub(super) fn read_scaling(fields: &Fields<'_>) -> Result<Option<RopeScaling>> {
    fields.table("rope_scaling")?.map_or(Ok(None), |table| scaling_in(&table))
}

fn scaling_in(table: &Fields<'_>) -> Result<Option<RopeScaling>> {
    const TYPES: [(&str, bool); 2] = [("default", false), ("llama3", true)];
    // An old name of the field.
    let old = table.choice("type", false, &TYPES)?;
    if !table.choice("rope_type", old, &TYPES)? {
        return Ok(None);
    }
    Ok(Some(RopeScaling {
        factor: table.real("factor", 8.0)?,
        low_freq_factor: table.real("low_freq_factor", 1.0)?,
        high_freq_factor: table.real("high_freq_factor", 4.0)?,
        original_length: table.size("original_max_position_embeddings", 8192)?,
    }))
}

/// The table that [`read_scaling`] reads.
pub(super) fn write_scaling(scaling: RopeScaling) -> Value {
    json!({
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    })
}

fn write_llama(mixer: &ForgettingConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, model, map);
    map.insert("attention_bias".into(), json!(false));
    map.insert("mlp_bias".into(), json!(false));
}

fn write_mistral(mixer: &ForgettingConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, model, map);
    map.insert("sliding_window".into(), json!(mixer.window));
}

fn write_qwen2(mixer: &ForgettingConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, model, map);
    write_window(mixer, model, map);
    // Its reader knows the field, but its files usually have none.
    if mixer.head_dim.is_none() {
        map.remove("head_dim");
    }
}

fn write_qwen3(mixer: &ForgettingConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, model, map);
    write_window(mixer, model, map);
    map.insert("attention_bias".into(), json!(false));
}

fn write_window(mixer: &ForgettingConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    let kind = if mixer.window.is_some() { "sliding_attention" } else { "full_attention" };
    map.extend(object(json!({
        "sliding_window": mixer.window,
        "use_sliding_window": mixer.window.is_some(),
        "max_window_layers": if mixer.window.is_some() { 0 } else { model.num_layers },
        "layer_types": vec![kind; model.num_layers],
    })));
}

/// Fields of all formats, instead of those of the other references.
fn write_layer(mixer: &ForgettingConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    for foreign in
        ["hidden_ratio", "norm_eps", "elementwise_affine", "fuse_norm", "fuse_cross_entropy"]
    {
        map.remove(foreign);
    }
    let rope = mixer.rope.unwrap_or(Rope::new(10_000.0));
    let mut parameters = match rope.scaling.map(write_scaling) {
        Some(Value::Object(scaling)) => scaling,
        _ => object(json!({ "rope_type": "default" })),
    };
    parameters.insert("rope_theta".into(), json!(rope.base));
    map.extend(object(json!({
        "intermediate_size": model.mlp_width(),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_width(model.hidden_size),
        "attention_dropout": 0.0,
        "rope_theta": rope.base,
        "rope_scaling": rope.scaling.map(write_scaling),
        "rope_parameters": parameters,
    })));
}
