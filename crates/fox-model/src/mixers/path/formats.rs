//! Files of PaTH attention: flash-linear-attention's `path_attn`.

use serde_json::{Map, Value, json};

use super::{PathConfig, PathConv};
use crate::Result;
use crate::checkpoint::split_mlp;
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::{CheckpointLayout, FileFormat, Format};

pub(super) static FORMATS: [&dyn FileFormat; 1] = [&FLA];

static FLA: Format<PathConfig> = Format {
    tensors: split_mlp,
    ..Format::new("path_attn", CheckpointLayout::FLA, "PaTHAttentionForCausalLM", read, write)
};

fn read(fields: &Fields<'_>) -> Result<PathConfig> {
    fields
        .require_null("attnres_block_size", "residuals over attention blocks are not supported")?;
    fields.require_false("use_l2warp", "that penalty of the logits is not supported")?;
    let heads = fields.size("num_heads", 32)?;
    let convolved = fields.flag("use_w_shortconv", true)?;
    if !convolved {
        fields.require_false("conv_bias", "it needs `use_w_shortconv` true")?;
    }
    let conv = PathConv {
        taps: fields.size("conv_size", PathConv::TAPS)?,
        bias: fields.flag("conv_bias", false)?,
    };
    Ok(PathConfig {
        heads,
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        low_rank: fields.flag("use_low_rank_w", true)?,
        conv: convolved.then_some(conv),
        qk_norm: fields.flag("use_qk_norm", false)?,
        forget_gate: fields.flag("use_forget_gate", false)?,
        log_pruning_tolerance: fields.optional_real("log_pruning_tolerance")?,
    })
}

fn write(mixer: &PathConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    map.extend(object(json!({
        "num_heads": mixer.heads,
        "num_kv_heads": mixer.kv_heads,
        "use_low_rank_w": mixer.low_rank,
        "use_w_shortconv": mixer.conv.is_some(),
        "conv_size": mixer.conv.map_or(PathConv::TAPS, |conv| conv.taps),
        "conv_bias": mixer.conv.is_some_and(|conv| conv.bias),
        "use_qk_norm": mixer.qk_norm,
        "use_forget_gate": mixer.forget_gate,
        "log_pruning_tolerance": mixer.log_pruning_tolerance,
    })));
}
