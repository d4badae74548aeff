//! Files of Mamba-2: both references have the same fields, under other names and with other defaults.

use serde_json::{Map, Value, json};

use super::Mamba2Config;
use crate::Result;
use crate::config::{Fields, ModelConfig, object, whole_or_real};
use crate::mixers::{CheckpointLayout, CommonFields, FileFormat, Format, enabled};

pub(super) static FORMATS: [&dyn FileFormat; 2] = [&OFFICIAL, &FLA];

static OFFICIAL: Format<Mamba2Config> = Format {
    common: CommonFields {
        layers: 48,
        norm_eps_field: "layer_norm_epsilon",
        norm_eps: 1e-5,
        initializer_range: 0.1,
        ..CommonFields::DEFAULT
    },
    lacks: |mixer, _| {
        enabled(&[
            (mixer.norm_before_gate, "norm_before_gate"),
            (mixer.groups != 1, "n_groups above 1"),
        ])
    },
    old_name,
    ..Format::new(
        "mamba2-project_fox",
        CheckpointLayout::OFFICIAL,
        "Mamba2ForCausalLM",
        read_official,
        write_official,
    )
};

static FLA: Format<Mamba2Config> = Format {
    common: CommonFields { layers: 48, norm_eps: 1e-5, ..CommonFields::DEFAULT },
    old_name,
    ..Format::new("mamba2", CheckpointLayout::FLA, "Mamba2ForCausalLM", read_fla, write_fla)
};

/// Early files call the token table `backbone.embedding.weight`.
fn old_name(name: &str) -> Option<String> {
    Some(format!("backbone.embedding.{}", name.strip_prefix("backbone.embeddings.")?))
}

/// Field names of the time steps: smallest, largest and floor at initialization, and their limits.
type TimeSteps = [&'static str; 4];

const OFFICIAL_STEPS: TimeSteps =
    ["time_step_min", "time_step_max", "time_step_floor", "time_step_limit"];
const FLA_STEPS: TimeSteps = ["dt_min", "dt_max", "dt_init_floor", "dt_limit"];

fn read_official(fields: &Fields<'_>) -> Result<Mamba2Config> {
    Ok(Mamba2Config {
        state_size: fields.size("state_size", 64)?,
        groups: fields.size("n_groups", 8)?,
        norm_before_gate: false,
        ..read(fields, "rms_norm", OFFICIAL_STEPS)?
    })
}

fn read_fla(fields: &Fields<'_>) -> Result<Mamba2Config> {
    let mixer = read(fields, "rmsnorm", FLA_STEPS)?;
    Ok(Mamba2Config { norm_before_gate: fields.flag("norm_before_gate", true)?, ..mixer })
}

/// Fields that both references read; defaults are those of flash-linear-attention.
fn read(fields: &Fields<'_>, norm: &str, steps: TimeSteps) -> Result<Mamba2Config> {
    fields.require_false("use_bias", "projections with a bias are not supported")?;
    fields.require_true("use_conv_bias", "a convolution without bias is not supported")?;
    fields.require_true(norm, "the norm must be there")?;
    fields.require_false("D_has_hdim", "a skip per channel is not supported")?;
    let hidden = fields.size("hidden_size", 2048)?;
    let (head_dim, expand) = (fields.size("head_dim", 64)?, fields.real("expand", 2.0)?);
    let heads = fields.scaled_width("expand", hidden, expand, head_dim)?;
    if let Some(given) = fields.optional_size("num_heads", None)?
        && given != heads
    {
        let detail = format!("is {given}, but `expand` and `head_dim` make {heads} heads");
        return Err(fields.error("num_heads", detail));
    }
    let [min, max, floor, limit] = steps;
    Ok(Mamba2Config {
        heads,
        head_dim,
        state_size: fields.size("state_size", 128)?,
        groups: fields.size("n_groups", 1)?,
        conv_size: fields.size("conv_kernel", 4)?,
        time_step_limit: fields.real_pair(limit, (0.0, f64::INFINITY))?,
        time_step_init: (
            fields.real(min, 0.001)?,
            fields.real(max, 0.1)?,
            fields.real(floor, 1e-4)?,
        ),
        norm_before_gate: true,
    })
}

fn write_official(mixer: &Mamba2Config, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, model, map);
    map.insert("layer_norm_epsilon".into(), json!(model.norm_eps));
    map.insert("rms_norm".into(), json!(true));
    write_steps(mixer, OFFICIAL_STEPS, map);
}

fn write_fla(mixer: &Mamba2Config, model: &ModelConfig, map: &mut Map<String, Value>) {
    write_layer(mixer, model, map);
    map.extend(object(json!({
        "norm_eps": model.norm_eps,
        "rmsnorm": true,
        "norm_before_gate": mixer.norm_before_gate,
        "D_has_hdim": false,
    })));
    write_steps(mixer, FLA_STEPS, map);
}

/// Fields that both references write, without those of an MLP.
fn write_layer(mixer: &Mamba2Config, model: &ModelConfig, map: &mut Map<String, Value>) {
    for foreign in ["hidden_ratio", "intermediate_size", "norm_eps"] {
        map.remove(foreign);
    }
    let expand = mixer.inner() as f64 / model.hidden_size as f64;
    map.extend(object(json!({
        "num_heads": mixer.heads,
        "head_dim": mixer.head_dim,
        "state_size": mixer.state_size,
        "expand": whole_or_real(expand),
        "n_groups": mixer.groups,
        "conv_kernel": mixer.conv_size,
        "use_bias": false,
        "use_conv_bias": true,
        "hidden_act": "silu",
        "chunk_size": 256,
        "residual_in_fp32": true,
        "rescale_prenorm_residual": true,
    })));
}

fn write_steps(mixer: &Mamba2Config, names: TimeSteps, map: &mut Map<String, Value>) {
    // Python's bare literal, as the references write it; the writer takes off the quotes.
    let real = |x: f64| if x.is_infinite() { json!("Infinity") } else { json!(x) };
    let (min, max, floor) = mixer.time_step_init;
    let limit = json!([real(mixer.time_step_limit.0), real(mixer.time_step_limit.1)]);
    for (name, value) in names.into_iter().zip([json!(min), json!(max), json!(floor), limit]) {
        map.insert(name.into(), value);
    }
}
