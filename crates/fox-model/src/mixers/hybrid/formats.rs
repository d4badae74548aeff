//! Files of hybrids: Samba of the official repository, and fox's native format, which names every layer.

use fox_tensor::{ParamId, Rope};
use serde_json::{Map, Value, json};

use super::config::{HybridConfig, LayerConfigs, MlpRatios};
use super::kind::LayerKind;
use crate::Result;
use crate::checkpoint::{FileTensor, single_tensor};
use crate::config::{Fields, ModelConfig, Validator, object, whole_or_real};
use crate::mixers::delta::DeltaConfig;
use crate::mixers::forgetting::{ForgetGate, ForgettingConfig, native};
use crate::mixers::kda::KdaConfig;
use crate::mixers::mamba1::Mamba1Config;
use crate::mixers::mamba2::Mamba2Config;
use crate::mixers::wall::WallConfig;
use crate::mixers::{CheckpointLayout, CommonFields, FileFormat, Format, MlpWidthFields};
use crate::params::ParamSpec;

pub(super) static FORMATS: [&dyn FileFormat; 2] = [&SAMBA, &NATIVE];

/// `fox_hybrid`: the fields of `fox` for attention, `mixers` for the pattern, and a few fields for the other kinds.
static NATIVE: Format<HybridConfig> = Format {
    common: CommonFields { sigmoid_mlp: true, ..CommonFields::DEFAULT },
    ..Format::new(
        "fox_hybrid",
        CheckpointLayout::NATIVE,
        "FoxHybridForCausalLM",
        read_native,
        write_native,
    )
};

/// Mamba-1 in even layers, attention over a window in odd ones.
static SAMBA: Format<HybridConfig> = Format {
    common: CommonFields {
        norm_eps: 1e-5,
        mlp_width: MlpWidthFields::PerLayer,
        ..CommonFields::DEFAULT
    },
    suits: |mixer, _| window_of_samba(mixer).is_some(),
    lacks: |mixer, model| {
        let channels = mixer.layers().mamba1.inner;
        let plain = model.mlp.intermediate_size.is_none_or(|width| width == channels);
        let whole = window_of_samba(mixer).is_some() && mixer.mlp_ratios().is_some() && plain;
        if whole { Vec::new() } else { vec!["layers other than Samba's"] }
    },
    tensors: samba_tensors,
    ..Format::new(
        "samba-project_fox",
        CheckpointLayout::OFFICIAL,
        "SambaForCausalLM",
        read_samba,
        write_samba,
    )
};

/// The window of the attention, if everything else is as in Samba.
fn window_of_samba(mixer: &HybridConfig) -> Option<usize> {
    let [LayerKind::Mamba1, LayerKind::Window(window)] = *mixer.pattern() else { return None };
    let (attention, usual) = (&mixer.layers().attention, LayerConfigs::standard(1, 1).attention);
    let like = ForgettingConfig {
        heads: usual.heads,
        kv_heads: usual.kv_heads,
        rope: None,
        ..attention.clone()
    };
    let scaled = attention.rope.is_some_and(|rope| rope != Rope::new(rope.base));
    (like == usual && !scaled).then_some(window)
}

fn samba_tensors(id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
    let mut tensors = single_tensor(id, spec);
    for tensor in &mut tensors {
        tensor.name = tensor
            .name
            .replace("model.norm.", "backbone.norm_f.")
            .replace("model.", "backbone.")
            .replace(".attn_norm.", ".mixer_norm.")
            .replace(".attn.", ".mixer.");
    }
    tensors
}

fn read_native(fields: &Fields<'_>) -> Result<HybridConfig> {
    let words = fields.strings("mixers")?.unwrap_or(vec!["fox"]);
    let unknown = |word: &str| {
        let word: String = word.chars().take(60).collect();
        let detail =
            format!("names `{word}`, which is not a mixer; the mixers are {}", LayerKind::NAMES);
        fields.error("mixers", detail)
    };
    let kind = |word: &&str| LayerKind::parse(word).ok_or_else(|| unknown(word));
    let pattern = words.iter().map(kind).collect::<Result<Vec<_>>>()?;
    fields.require_null("window_size", "the pattern `mixers` names windows, as in window:512")?;
    let (hidden, attention) = (fields.size("hidden_size", 2048)?, native::read(fields)?);
    let usual = LayerConfigs::standard(hidden, attention.heads);
    let heads = fields.size("delta_heads", usual.delta.heads)?;
    let key_dim = fields.size(
        "delta_head_dim",
        3 * hidden.min(Validator::MAX_WIDTH) / (4 * heads.clamp(1, Validator::MAX_WIDTH)),
    )?;
    let layers = LayerConfigs {
        delta: DeltaConfig {
            value_dim: fields.scaled_width(
                "delta_expand_v",
                key_dim,
                fields.real("delta_expand_v", 2.0)?,
                1,
            )?,
            negative_eigenvalues: fields.flag("delta_neg_eigval", false)?,
            ..DeltaConfig::gated(heads, key_dim)
        },
        kda: KdaConfig {
            decay_bound: fields.optional_real("kda_lower_bound")?,
            ..KdaConfig::square(
                fields.size("kda_heads", usual.kda.heads)?,
                fields.size("kda_head_dim", usual.kda.key_dim)?,
            )
        },
        wall: WallConfig {
            scalar_gate: fields.flag("wall_scalar_gate", false)?,
            ..WallConfig::new(fields.size("wall_heads", usual.wall.heads)?)
        },
        mamba2: Mamba2Config {
            heads: fields.size("mamba_heads", usual.mamba2.heads)?,
            head_dim: fields.size("mamba_head_dim", usual.mamba2.head_dim)?,
            state_size: fields.size("mamba_state_size", usual.mamba2.state_size)?,
            ..usual.mamba2
        },
        mamba1: Mamba1Config {
            inner: fields.size("mamba1_channels", usual.mamba1.inner)?,
            state_size: fields.size("mamba1_state_size", usual.mamba1.state_size)?,
            rank: fields.size("mamba1_rank", usual.mamba1.rank)?,
            ..usual.mamba1
        },
        attention,
    };
    let recurrent = fields.optional_real("mamba_hidden_ratio")?;
    let ratios = recurrent.zip(fields.optional_real("attn_hidden_ratio")?);
    let mlp_ratios = ratios.map(|(recurrent, attention)| MlpRatios { recurrent, attention });
    Ok(HybridConfig::new(pattern, layers).with_mlp_ratios(mlp_ratios))
}

fn write_native(mixer: &HybridConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    let LayerConfigs { attention, delta, kda, wall, mamba2, mamba1 } = mixer.layers();
    native::write(attention, model, map);
    let words: Vec<String> = mixer.pattern().iter().map(LayerKind::to_string).collect();
    map.extend(object(json!({
        "mixers": words,
        "window_size": null,
        "delta_heads": delta.heads,
        "delta_head_dim": delta.key_dim,
        "delta_expand_v": delta.value_dim as f64 / delta.key_dim.max(1) as f64,
        "delta_neg_eigval": delta.negative_eigenvalues,
        "kda_heads": kda.heads,
        "kda_head_dim": kda.key_dim,
        "kda_lower_bound": kda.decay_bound,
        "wall_heads": wall.heads,
        "wall_scalar_gate": wall.scalar_gate,
        "mamba_heads": mamba2.heads,
        "mamba_head_dim": mamba2.head_dim,
        "mamba_state_size": mamba2.state_size,
        "mamba1_channels": mamba1.inner,
        "mamba1_state_size": mamba1.state_size,
        "mamba1_rank": mamba1.rank,
        "mamba_hidden_ratio": mixer.mlp_ratios().map(|ratios| ratios.recurrent),
        "attn_hidden_ratio": mixer.mlp_ratios().map(|ratios| ratios.attention),
    })));
}

/// `intermediate_size` of this format are the channels of Mamba-1.
fn read_samba(fields: &Fields<'_>) -> Result<HybridConfig> {
    fields.require_false("use_bias", "projections with a bias are not supported")?;
    fields.require_true("use_conv_bias", "a convolution without bias is not supported")?;
    let attn = fields.table("attn")?;
    let of_attn = |field: &str, default: Option<usize>| match &attn {
        Some(attn) => attn.optional_size(field, default),
        None => Ok(default),
    };
    if let Some(attn) = &attn {
        attn.require_null("layers", "attention must be in every second layer")?;
    }
    let hidden = fields.size("hidden_size", 2048)?;
    let heads = of_attn("num_heads", Some(32))?.unwrap_or(32);
    let usual = Mamba1Config::published(hidden.min(Validator::MAX_WIDTH));
    let inner = fields.scaled_width("expand", hidden, fields.real("expand", 2.0)?, 1)?;
    if fields.optional_size("intermediate_size", None)?.is_some_and(|width| width != inner) {
        let detail = format!("must be `expand` times `hidden_size`, {inner}");
        return Err(fields.error("intermediate_size", detail));
    }
    let rank =
        match fields.choice("time_step_rank", Some(usual.rank), &[("auto", Some(usual.rank))]) {
            Ok(rank) => rank,
            Err(_) => fields.optional_size("time_step_rank", None)?,
        };
    let layers = LayerConfigs {
        attention: ForgettingConfig {
            gate: ForgetGate::Full,
            kv_heads: of_attn("num_kv_heads", None)?.unwrap_or(heads),
            rope: Some(Rope::new(fields.real("rope_base", 500_000.0)?)),
            ..ForgettingConfig::fox_llama(heads)
        },
        mamba1: Mamba1Config {
            inner,
            state_size: fields.size("state_size", usual.state_size)?,
            rank: rank.unwrap_or(usual.rank),
            conv_size: fields.size("conv_kernel", usual.conv_size)?,
            time_step_init: (
                fields.real("time_step_min", usual.time_step_init.0)?,
                fields.real("time_step_max", usual.time_step_init.1)?,
                fields.real("time_step_floor", usual.time_step_init.2)?,
            ),
        },
        ..LayerConfigs::standard(hidden, heads)
    };
    let window = of_attn("window_size", Some(2048))?.unwrap_or(2048);
    let pattern = vec![LayerKind::Mamba1, LayerKind::Window(window)];
    let mlp_ratios = Some(MlpRatios {
        recurrent: fields.real("mamba_hidden_ratio", 3.0)?,
        attention: fields.real("attn_hidden_ratio", 4.0)?,
    });
    Ok(HybridConfig::new(pattern, layers).with_mlp_ratios(mlp_ratios))
}

fn write_samba(mixer: &HybridConfig, model: &ModelConfig, map: &mut Map<String, Value>) {
    let LayerConfigs { attention, mamba1, .. } = mixer.layers();
    let kv_heads = (attention.kv_heads != attention.heads).then_some(attention.kv_heads);
    let expand = mamba1.inner as f64 / model.hidden_size as f64;
    let ratios = mixer.mlp_ratios().unwrap_or(MlpRatios { recurrent: 3.0, attention: 4.0 });
    map.remove("hidden_ratio");
    map.extend(object(json!({
        "attn": {
            "layers": null,
            "num_heads": attention.heads,
            "num_kv_heads": kv_heads,
            "window_size": window_of_samba(mixer),
        },
        "attn_hidden_ratio": whole_or_real(ratios.attention),
        "mamba_hidden_ratio": whole_or_real(ratios.recurrent),
        "rope_base": attention.rope.map_or(500_000.0, |rope| rope.base),
        "hidden_act": "silu",
        "state_size": mamba1.state_size,
        "expand": whole_or_real(expand),
        "intermediate_size": model.mlp.intermediate_size,
        "conv_kernel": mamba1.conv_size,
        "time_step_rank": mamba1.rank,
        "time_step_min": mamba1.time_step_init.0,
        "time_step_max": mamba1.time_step_init.1,
        "time_step_floor": mamba1.time_step_init.2,
        "use_bias": false,
        "use_conv_bias": true,
        "rescale_prenorm_residual": true,
        "residual_in_fp32": false,
    })));
}
