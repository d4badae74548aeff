//! Files of Wall attention: flash-linear-attention's `wall_transformer`.

use serde_json::{Map, Value, json};

use super::WallConfig;
use crate::Result;
use crate::checkpoint::split_mlp;
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::{CheckpointLayout, FileFormat, Format};

pub(super) static FORMATS: [&dyn FileFormat; 1] = [&FLA];

static FLA: Format<WallConfig> = Format {
    tensors: split_mlp,
    ..Format::new(
        "wall_transformer",
        CheckpointLayout::FLA,
        "WallTransformerForCausalLM",
        read,
        write,
    )
};

fn read(fields: &Fields<'_>) -> Result<WallConfig> {
    fields
        .require_null("attnres_block_size", "residuals over attention blocks are not supported")?;
    fields.require_false("use_l2warp", "that penalty of the logits is not supported")?;
    let heads = fields.size("num_heads", 32)?;
    Ok(WallConfig {
        kv_heads: fields.optional_size("num_kv_heads", None)?.unwrap_or(heads),
        qkv_bias: fields.flag("qkv_bias", false)?,
        qk_norm: fields.flag("qk_norm", false)?,
        window: fields.optional_size("window_size", None)?,
        output_gate: fields.flag("use_output_gate", false)?,
        scalar_gate: fields.flag("use_scalar_gate", false)?,
        gate_init_bias: fields.real("gate_init_bias", 8.0)?,
        ..WallConfig::new(heads)
    })
}

fn write(mixer: &WallConfig, _: &ModelConfig, map: &mut Map<String, Value>) {
    map.extend(object(json!({
        "num_heads": mixer.heads,
        "num_kv_heads": (mixer.kv_heads != mixer.heads).then_some(mixer.kv_heads),
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm,
        "window_size": mixer.window,
        "use_output_gate": mixer.output_gate,
        "use_scalar_gate": mixer.scalar_gate,
        "gate_init_bias": mixer.gate_init_bias,
    })));
}
