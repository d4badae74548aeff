//! Files of HGRN2. The two references differ in what the lower bounds do and in one epsilon.

use serde_json::{Map, Value, json};

use super::{Hgrn2Config, LowerBounds};
use crate::Result;
use crate::checkpoint::split_mlp;
use crate::config::{Fields, ModelConfig, object};
use crate::mixers::{CheckpointLayout, FileFormat, Format, enabled};

/// Epsilon of the output norm in flash-linear-attention, independent of `norm_eps`.
const FLA_EPS: f64 = 1e-5;

pub(super) static FORMATS: [&dyn FileFormat; 2] = [&OFFICIAL, &FLA];

static OFFICIAL: Format<Hgrn2Config> = Format {
    lacks: |mixer, model| {
        enabled(&[
            (mixer.lower_bounds == LowerBounds::Used, "lower bounds that have an effect"),
            (mixer.output_norm_eps != model.norm_eps, "output_norm_eps other than norm_eps"),
        ])
    },
    ..Format::new(
        "hgrn2-project_fox",
        CheckpointLayout::OFFICIAL,
        "HGRN2ForCausalLM",
        read_official,
        write,
    )
};

static FLA: Format<Hgrn2Config> = Format {
    lacks: |mixer, model| {
        let gates = mixer.heads * mixer.expand_ratio;
        enabled(&[
            (mixer.lower_bounds == LowerBounds::Stored, "lower bounds without effect"),
            (mixer.output_norm_eps != FLA_EPS, "an output norm with another epsilon than 1e-5"),
            (gates != model.hidden_size, "num_heads beside expand_ratio"),
        ])
    },
    tensors: split_mlp,
    ..Format::new("hgrn2", CheckpointLayout::FLA, "HGRN2ForCausalLM", read_fla, write)
};

/// Heads are taken as given.
fn read_official(fields: &Fields<'_>) -> Result<Hgrn2Config> {
    let output_norm_eps = fields.real("norm_eps", 1e-6)?;
    read(fields, true, LowerBounds::Stored, output_norm_eps)
}

/// `expand_ratio` overrides the heads.
fn read_fla(fields: &Fields<'_>) -> Result<Hgrn2Config> {
    read(fields, false, LowerBounds::Used, FLA_EPS)
}

fn read(
    fields: &Fields<'_>,
    heads_count: bool,
    bounds: LowerBounds,
    output_norm_eps: f64,
) -> Result<Hgrn2Config> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields.require_false("use_short_conv", "the layer with convolutions is not supported")?;
    let hidden = fields.size("hidden_size", 2048)?;
    let given = fields.optional_size("num_heads", None)?;
    let (heads, expand_ratio) = match (given, fields.optional_size("expand_ratio", Some(128))?) {
        (Some(heads), Some(expand)) if heads_count => (heads, expand),
        (_, Some(expand)) => (hidden / expand.max(1), expand),
        (Some(heads), None) => (heads, hidden / heads.max(1)),
        (None, None) => return Err(fields.error("num_heads", "or `expand_ratio` must be given")),
    };
    let bounded = fields.flag("use_lower_bound", true)?;
    let lower_bounds = if bounded { bounds } else { LowerBounds::None };
    Ok(Hgrn2Config { heads, expand_ratio, lower_bounds, output_norm_eps })
}

fn write(mixer: &Hgrn2Config, _: &ModelConfig, map: &mut Map<String, Value>) {
    map.extend(object(json!({
        "attn_mode": "chunk",
        "num_heads": mixer.heads,
        "expand_ratio": mixer.expand_ratio,
        "use_short_conv": false,
        "conv_size": 4,
        "use_lower_bound": mixer.lower_bounds != LowerBounds::None,
        "attn": null,
    })));
}
