//! Formats of the official FoX repository.

use fox_tensor::{Activation, AttentionWeights, Mask, Rope};
use serde_json::{Map, Value, json};

use super::{fox_only, gate_name, native_only, write_heads};
use crate::Result;
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::forgetting::{DecayTime, ForgetGate, ForgettingConfig, QK_NORM_EPS, QkNorm};
use crate::mixers::{CheckpointLayout, CommonFields, Format, enabled};

/// FoX with every published option.
pub(super) static FOX: Format<ForgettingConfig> = Format {
    common: CommonFields { sigmoid_mlp: true, ..CommonFields::DEFAULT },
    lacks: |mixer, _| {
        let mut found = native_only(mixer).to_vec();
        found.extend([
            (mixer.kv_heads != mixer.heads, "num_kv_heads below num_heads"),
            (mixer.window.is_some(), "window_size"),
            (mixer.qkv_bias, "qkv_bias"),
            (native_gate(mixer.gate).is_some(), gate_name(mixer.gate)),
        ]);
        enabled(&found)
    },
    ..Format::new(
        "forgetting_transformer-project_fox",
        CheckpointLayout::OFFICIAL,
        "ForgettingTransformerForCausalLM",
        read_fox,
        write_fox,
    )
};

/// The LLaMA-style baseline, with window and grouped heads.
pub(super) static TRANSFORMER: Format<ForgettingConfig> = Format {
    suits: |mixer, _| mixer.gate == ForgetGate::None,
    lacks: |mixer, _| {
        let mut found = native_only(mixer).to_vec();
        found.extend(fox_only(mixer));
        found.extend([
            (mixer.gate != ForgetGate::None, gate_name(mixer.gate)),
            (mixer.qk_norm.is_some(), "qk_norm"),
            (mixer.output_gate.is_some(), "use_output_gate"),
            (mixer.qkv_bias, "qkv_bias"),
        ]);
        enabled(&found)
    },
    ..Format::new(
        "transformer-project_fox",
        CheckpointLayout::OFFICIAL,
        "TransformerForCausalLM",
        read_transformer,
        write_transformer,
    )
};

/// The `fgate_type` of gates that only the native format has.
fn native_gate(gate: ForgetGate) -> Option<&'static str> {
    match gate {
        ForgetGate::Shared => Some("shared"),
        ForgetGate::KeyScale => Some("key_scale"),
        _ => None,
    }
}

/// The reference ignores `window_size`.
fn read_fox(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    let layer = read_layer(fields)?;
    if let Some(name) = native_gate(layer.gate) {
        return Err(fields.error("fgate_type", format!("\"{name}\" needs `model_type` \"fox\"")));
    }
    match fields.optional_size("num_kv_heads", None)? {
        Some(n) if n != layer.heads => Err(fields.error(
            "num_kv_heads",
            format!("must be null or equal to `num_heads` ({}) for this model_type", layer.heads),
        )),
        _ => Ok(layer),
    }
}

fn read_transformer(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    fields.require_false("qk_norm", "the layer of this model_type has no QK-norm")?;
    let heads = fields.size("num_heads", 32)?;
    let rope_base = fields.real("rope_base", 500_000.0)?;
    Ok(ForgettingConfig {
        gate: ForgetGate::None,
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        window: fields.optional_size("window_size", None)?,
        rope: fields.flag("use_rope", true)?.then_some(Rope::new(rope_base)),
        ..ForgettingConfig::fox_llama(heads)
    })
}

/// The fields of the FoX layer. `num_kv_heads` and `window_size` are left to the caller.
pub(super) fn read_layer(fields: &Fields<'_>) -> Result<ForgettingConfig> {
    #[derive(Clone, Copy)]
    enum Gate {
        Full,
        Shared,
        BiasOnly,
        Fixed,
        KeyScale,
        None,
    }
    let gate = fields.choice(
        "fgate_type",
        Gate::Full,
        &[
            ("full", Gate::Full),
            ("shared", Gate::Shared),
            ("bias_only", Gate::BiasOnly),
            ("fixed", Gate::Fixed),
            ("key_scale", Gate::KeyScale),
            ("none", Gate::None),
        ],
    )?;
    let decay_time = decay_time(fields)?;
    if decay_time.is_some() && !matches!(gate, Gate::BiasOnly | Gate::Fixed) {
        return Err(fields.error(
            "fgate_bias_init",
            "needs `fgate_type` \"bias_only\" or \"fixed\": other gates have no bias to set",
        ));
    }
    let heads = fields.size("num_heads", 32)?;
    let shared = fields.flag("qk_norm_share_param_across_head", false)?;
    let qk_norm = match (fields.flag("qk_norm", false)?, shared) {
        (false, _) => None,
        (true, false) => Some(QkNorm::PerHead),
        (true, true) => Some(QkNorm::Shared),
    };
    let ogate_act = fields.choice(
        "ogate_act",
        Activation::Sigmoid,
        &[
            ("sigmoid", Activation::Sigmoid),
            ("silu", Activation::Silu),
            ("swish", Activation::Silu),
        ],
    )?;
    let rope_base = fields.real("rope_base", 500_000.0)?;
    Ok(ForgettingConfig {
        heads,
        kv_heads: heads,
        head_dim: None,
        mask: Mask::Causal,
        weights: AttentionWeights::Softmax,
        gate: match gate {
            Gate::Full => ForgetGate::Full,
            Gate::Shared => ForgetGate::Shared,
            Gate::BiasOnly => ForgetGate::BiasOnly { decay_time },
            Gate::Fixed => ForgetGate::Fixed { decay_time },
            Gate::KeyScale => ForgetGate::KeyScale,
            Gate::None => ForgetGate::None,
        },
        qkv_bias: false,
        k_shift: fields.flag("use_k_shift", false)?,
        v_shift: fields.flag("use_v_shift", false)?,
        qk_norm,
        qk_norm_eps: QK_NORM_EPS,
        rope: fields.flag("use_rope", false)?.then_some(Rope::new(rope_base)),
        window: None,
        sink: false,
        output_norm: fields.flag("use_output_norm", false)?,
        output_gate: fields.flag("use_output_gate", false)?.then_some(ogate_act),
        log_pruning_tolerance: fields.optional_real("log_pruning_tolerance")?,
    })
}

/// Written even without RoPE.
fn rope_base(mixer: &ForgettingConfig) -> f64 {
    mixer.rope.map_or(500_000.0, |rope| rope.base)
}

fn decay_time(fields: &Fields<'_>) -> Result<Option<DecayTime>> {
    let bounds = (fields.optional_real("decay_time_min")?, fields.optional_real("decay_time_max")?);
    if !fields.flag("fgate_bias_init", false)? {
        return Ok(None);
    }
    match bounds {
        (Some(min), Some(max)) => Ok(Some(DecayTime { min, max })),
        _ => Err(fields.error("fgate_bias_init", "needs `decay_time_min` and `decay_time_max`")),
    }
}

fn write_fox(mixer: &ForgettingConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_heads(mixer, map);
    write_layer(mixer, map);
}

fn write_transformer(mixer: &ForgettingConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_heads(mixer, map);
    map.insert("attention_bias".into(), json!(false));
    map.insert("use_rope".into(), json!(mixer.rope.is_some()));
    map.insert("rope_base".into(), json!(rope_base(mixer)));
    map.insert("qk_norm".into(), json!(false));
}

/// The fields of the FoX layer, without its heads.
pub(super) fn write_layer(mixer: &ForgettingConfig, map: &mut Map<String, Value>) {
    let (gate, decay_time) = match mixer.gate {
        ForgetGate::None => ("none", None),
        ForgetGate::Full => ("full", None),
        ForgetGate::Shared => ("shared", None),
        ForgetGate::BiasOnly { decay_time } => ("bias_only", decay_time),
        ForgetGate::Fixed { decay_time } => ("fixed", decay_time),
        ForgetGate::KeyScale => ("key_scale", None),
    };
    let ogate_act = match mixer.output_gate {
        Some(Activation::Silu) => "silu",
        Some(Activation::Sigmoid) | None => "sigmoid",
    };
    map.extend(object(json!({
        "attention_bias": false,
        "use_rope": mixer.rope.is_some(),
        "rope_base": rope_base(mixer),
        "fgate_type": gate,
        "fgate_bias_init": decay_time.is_some(),
        "decay_time_min": decay_time.map(|time: DecayTime| time.min),
        "decay_time_max": decay_time.map(|time: DecayTime| time.max),
        "use_output_gate": mixer.output_gate.is_some(),
        "ogate_act": ogate_act,
        "use_output_norm": mixer.output_norm,
        "qk_norm": mixer.qk_norm.is_some(),
        "qk_norm_share_param_across_head": mixer.qk_norm == Some(QkNorm::Shared),
        "use_k_shift": mixer.k_shift,
        "use_v_shift": mixer.v_shift,
        "log_pruning_tolerance": mixer.log_pruning_tolerance,
    })));
}
