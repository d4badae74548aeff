//! Files of Kimi Delta Attention: flash-linear-attention's `kda`.

use serde_json::{Map, Value, json};

use super::KdaConfig;
use crate::Result;
use crate::checkpoint::split_mlp;
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::{CheckpointLayout, FileFormat, Format};

pub(super) static FORMATS: [&dyn FileFormat; 1] = [&FLA];

static FLA: Format<KdaConfig> = Format {
    tensors: split_mlp,
    ..Format::new("kda", CheckpointLayout::FLA, "KDAForCausalLM", read, write)
};

fn read(fields: &Fields<'_>) -> Result<KdaConfig> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields
        .require_null("attnres_block_size", "residuals over attention blocks are not supported")?;
    fields.require_false("use_l2warp", "that penalty of the logits is not supported")?;
    let (heads, key_dim) = (fields.size("num_heads", 16)?, fields.size("head_dim", 128)?);
    let (expand_v, taps) = (fields.real("expand_v", 1.0)?, fields.size("conv_size", 4)?);
    Ok(KdaConfig {
        value_heads: fields.optional_size("num_v_heads", None)?.unwrap_or(heads),
        value_dim: fields.scaled_width("expand_v", key_dim, expand_v, 1)?,
        conv_size: fields.flag("use_short_conv", true)?.then_some(taps),
        negative_eigenvalues: fields.flag("allow_neg_eigval", false)?,
        decay_bound: fields.optional_real("lower_bound")?,
        safe_gate: fields.flag("safe_gate", false)?,
        ..KdaConfig::square(heads, key_dim)
    })
}

fn write(mixer: &KdaConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    map.extend(object(json!({
        "attn_mode": "chunk",
        "num_heads": mixer.heads,
        "num_v_heads": mixer.value_heads,
        "head_dim": mixer.key_dim,
        "expand_v": mixer.value_dim as f64 / mixer.key_dim as f64,
        "use_short_conv": mixer.conv_size.is_some(),
        "conv_size": mixer.conv_size.unwrap_or(4),
        "allow_neg_eigval": mixer.negative_eigenvalues,
        "lower_bound": mixer.decay_bound,
        "safe_gate": mixer.safe_gate,
        "attn": null,
    })));
}
