//! config.json of the recurrent families.

use super::fields::Fields;
use super::{DeltaConfig, Hgrn2Config, LowerBounds, Mamba2Config, ModelType};
use crate::Result;

/// Epsilon of HGRN2's output norm in flash-linear-attention, whatever `norm_eps` says.
const FLA_HGRN2_EPS: f64 = 1e-5;

/// `width * factor / parts`, when that is whole.
fn share(
    fields: &Fields<'_>,
    field: &str,
    width: usize,
    factor: f64,
    parts: usize,
) -> Result<usize> {
    let exact = width as f64 * factor / parts.max(1) as f64;
    if !(1.0..=1e9).contains(&exact) || exact.fract() != 0.0 {
        let detail = format!("is {factor}, which gives heads of width {exact}");
        return Err(fields.error(field, detail));
    }
    Ok(exact as usize)
}

/// `delta_net` of both references. Variants that no published model has are refused by name.
pub(super) fn delta_net(fields: &Fields<'_>) -> Result<DeltaConfig> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields.require_true("use_short_conv", "the layer without convolutions is not supported")?;
    fields.require_true("use_beta", "writes of full strength are not supported")?;
    fields.require_false("norm_first", "that variant drops a residual in the reference")?;
    fields.word("qk_norm", (), &[("l2", ())])?;
    fields.word("qk_activation", (), &[("silu", ())])?;
    let (hidden, heads) = (fields.size("hidden_size", 2048)?, fields.size("num_heads", 16)?);
    let (expand_k, expand_v) = (fields.real("expand_k", 1.0)?, fields.real("expand_v", 1.0)?);
    Ok(DeltaConfig {
        key_dim: share(fields, "expand_k", hidden, expand_k, heads)?,
        value_dim: share(fields, "expand_v", hidden, expand_v, heads)?,
        conv_size: fields.size("conv_size", 4)?,
        output_gate: fields.flag("use_gate", false)?,
        negative_eigenvalues: fields.flag("allow_neg_eigval", false)?,
        ..DeltaConfig::delta_net(heads, 1)
    })
}

/// `gated_deltanet`.
pub(super) fn gated_delta_net(fields: &Fields<'_>) -> Result<DeltaConfig> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields.require_true("use_short_conv", "the layer without convolutions is not supported")?;
    let (heads, key_dim) = (fields.size("num_heads", 6)?, fields.size("head_dim", 256)?);
    let expand_v = fields.real("expand_v", 2.0)?;
    Ok(DeltaConfig {
        value_heads: fields.optional_size("num_v_heads", None)?.unwrap_or(heads),
        value_dim: share(fields, "expand_v", key_dim, expand_v, 1)?,
        conv_size: fields.size("conv_size", 4)?,
        output_gate: fields.flag("use_gate", true)?,
        negative_eigenvalues: fields.flag("allow_neg_eigval", false)?,
        ..DeltaConfig::gated(heads, key_dim)
    })
}

/// `hgrn2` of both references: they differ in what the lower bounds do and in one epsilon.
pub(super) fn hgrn2(fields: &Fields<'_>, model_type: ModelType) -> Result<Hgrn2Config> {
    fields.require_null("attn", "hybrid layers are not supported")?;
    fields.require_false("use_short_conv", "the layer with convolutions is not supported")?;
    let hidden = fields.size("hidden_size", 2048)?;
    let (given, expand) = (
        fields.optional_size("num_heads", None)?,
        fields.optional_size("expand_ratio", Some(128))?,
    );
    let official = model_type == ModelType::OfficialHgrn2;
    // Official: heads if given; flash-linear-attention lets `expand_ratio` override them.
    let (heads, expand_ratio) = match (given, expand) {
        (Some(heads), Some(expand)) if official => (heads, expand),
        (_, Some(expand)) => (hidden / expand.max(1), expand),
        (Some(heads), None) => (heads, hidden / heads.max(1)),
        (None, None) => return Err(fields.error("num_heads", "or `expand_ratio` must be given")),
    };
    let lower_bounds = match (fields.flag("use_lower_bound", true)?, official) {
        (false, _) => LowerBounds::None,
        (true, true) => LowerBounds::Stored,
        (true, false) => LowerBounds::Used,
    };
    let norm_eps = fields.real("norm_eps", 1e-6)?;
    let output_norm_eps = if official { norm_eps } else { FLA_HGRN2_EPS };
    Ok(Hgrn2Config { heads, expand_ratio, lower_bounds, output_norm_eps })
}

/// `mamba2` of both references: the same fields under other names.
pub(super) fn mamba2(fields: &Fields<'_>, model_type: ModelType) -> Result<Mamba2Config> {
    let official = model_type == ModelType::OfficialMamba2;
    fields.require_false("use_bias", "projections with a bias are not supported")?;
    fields.require_true("use_conv_bias", "a convolution without bias is not supported")?;
    fields.require_true(if official { "rms_norm" } else { "rmsnorm" }, "the norm must be there")?;
    fields.require_false("D_has_hdim", "a skip per channel is not supported")?;
    let hidden = fields.size("hidden_size", 2048)?;
    let (head_dim, expand) = (fields.size("head_dim", 64)?, fields.real("expand", 2.0)?);
    let heads = share(fields, "expand", hidden, expand, head_dim)?;
    if let Some(given) = fields.optional_size("num_heads", None)?
        && given != heads
    {
        let detail = format!("is {given}, but `expand` and `head_dim` make {heads} heads");
        return Err(fields.error("num_heads", detail));
    }
    let names = match official {
        true => ["time_step_min", "time_step_max", "time_step_floor", "time_step_limit"],
        false => ["dt_min", "dt_max", "dt_init_floor", "dt_limit"],
    };
    Ok(Mamba2Config {
        heads,
        head_dim,
        state_size: fields.size("state_size", if official { 64 } else { 128 })?,
        groups: fields.size("n_groups", if official { 8 } else { 1 })?,
        conv_size: fields.size("conv_kernel", 4)?,
        time_step_limit: fields.real_pair(names[3], (0.0, f64::INFINITY))?,
        time_step_init: (
            fields.real(names[0], 0.001)?,
            fields.real(names[1], 0.1)?,
            fields.real(names[2], 1e-4)?,
        ),
        norm_before_gate: !official && fields.flag("norm_before_gate", true)?,
    })
}
