//! Files of the delta rule: `delta_net` of both references, and flash-linear-attention's `gated_deltanet`.

use serde_json::{Map, Value, json};

use super::DeltaConfig;
use crate::Result;
use crate::checkpoint::split_mlp;
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::{CheckpointLayout, CommonFields, FileFormat, Format, enabled};

pub(super) static FORMATS: [&dyn FileFormat; 3] = [&OFFICIAL, &FLA, &FLA_GATED];

static OFFICIAL: Format<DeltaConfig> = Format {
    suits: |mixer, _| !mixer.decay,
    lacks: |mixer, _| {
        enabled(&[
            (mixer.decay, "Gated DeltaNet"),
            (mixer.negative_eigenvalues, "allow_neg_eigval"),
        ])
    },
    ..Format::new(
        "delta_net-project_fox",
        CheckpointLayout::OFFICIAL,
        "DeltaNetForCausalLM",
        read_delta_net,
        write_delta_net,
    )
};

static FLA: Format<DeltaConfig> = Format {
    suits: |mixer, _| !mixer.decay,
    lacks: |mixer, _| enabled(&[(mixer.decay, "Gated DeltaNet")]),
    tensors: split_mlp,
    ..Format::new(
        "delta_net",
        CheckpointLayout::FLA,
        "DeltaNetForCausalLM",
        read_delta_net,
        write_delta_net,
    )
};

static FLA_GATED: Format<DeltaConfig> = Format {
    common: CommonFields { layers: 21, ..CommonFields::DEFAULT },
    suits: |mixer, _| mixer.decay,
    lacks: |mixer, _| enabled(&[(!mixer.decay, "DeltaNet")]),
    tensors: split_mlp,
    ..Format::new(
        "gated_deltanet",
        CheckpointLayout::FLA,
        "GatedDeltaNetForCausalLM",
        read_gated,
        write_gated,
    )
};

/// Variants that no published model has are refused by name.
fn read_delta_net(fields: &Fields<'_>) -> Result<DeltaConfig> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields.require_true("use_short_conv", "the layer without convolutions is not supported")?;
    fields.require_true("use_beta", "writes of full strength are not supported")?;
    fields.require_false("norm_first", "that variant drops a residual in the reference")?;
    fields.choice("qk_norm", (), &[("l2", ())])?;
    fields.choice("qk_activation", (), &[("silu", ())])?;
    let (hidden, heads) = (fields.size("hidden_size", 2048)?, fields.size("num_heads", 16)?);
    let (expand_k, expand_v) = (fields.real("expand_k", 1.0)?, fields.real("expand_v", 1.0)?);
    Ok(DeltaConfig {
        key_dim: fields.scaled_width("expand_k", hidden, expand_k, heads)?,
        value_dim: fields.scaled_width("expand_v", hidden, expand_v, heads)?,
        conv_size: fields.size("conv_size", 4)?,
        output_gate: fields.flag("use_gate", false)?,
        negative_eigenvalues: fields.flag("allow_neg_eigval", false)?,
        ..DeltaConfig::delta_net(heads, 1)
    })
}

fn read_gated(fields: &Fields<'_>) -> Result<DeltaConfig> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields.require_true("use_short_conv", "the layer without convolutions is not supported")?;
    let (heads, key_dim) = (fields.size("num_heads", 6)?, fields.size("head_dim", 256)?);
    let expand_v = fields.real("expand_v", 2.0)?;
    Ok(DeltaConfig {
        value_heads: fields.optional_size("num_v_heads", None)?.unwrap_or(heads),
        value_dim: fields.scaled_width("expand_v", key_dim, expand_v, 1)?,
        conv_size: fields.size("conv_size", 4)?,
        output_gate: fields.flag("use_gate", true)?,
        negative_eigenvalues: fields.flag("allow_neg_eigval", false)?,
        ..DeltaConfig::gated(heads, key_dim)
    })
}

fn write_delta_net(mixer: &DeltaConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, map);
    let expand = |dim: usize| (mixer.heads * dim) as f64 / model.hidden_size as f64;
    map.extend(object(json!({
        "expand_k": expand(mixer.key_dim),
        "expand_v": expand(mixer.value_dim),
        "use_beta": true,
        "use_output_norm": true,
        "qk_norm": "l2",
        "qk_activation": "silu",
    })));
}

fn write_gated(mixer: &DeltaConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, map);
    map.extend(object(json!({
        "head_dim": mixer.key_dim,
        "num_v_heads": mixer.value_heads,
        "expand_v": mixer.value_dim as f64 / mixer.key_dim as f64,
    })));
}

fn write_layer(mixer: &DeltaConfig, map: &mut Map<String, Value>) {
    map.extend(object(json!({
        "attn_mode": "chunk",
        "num_heads": mixer.heads,
        "conv_size": mixer.conv_size,
        "use_gate": mixer.output_gate,
        "use_short_conv": true,
        "allow_neg_eigval": mixer.negative_eigenvalues,
        "attn": null,
    })));
}
