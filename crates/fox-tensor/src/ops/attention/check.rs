//! Validation of the operands of softmax and stick-breaking attention.

use super::{Acp, AttentionInputs, AttentionOut, AttentionSpec, FullSequence, LogitBound, Mask};
use crate::check::Operands;
use crate::{Backend, Result, Tensor};

/// Validates the operands of [`AttentionOps::attention_fwd`](crate::AttentionOps::attention_fwd).
pub fn check_attention_fwd(
    backend: &dyn Backend,
    inputs: &AttentionInputs<'_>,
    spec: &AttentionSpec,
) -> Result<()> {
    let operands = Operands::new("attention", backend);
    let (heads, kv_heads, d) = (spec.heads, spec.kv_heads, spec.head_dim);
    operands.require(d > 0 && d <= 256 && d.is_multiple_of(8), || {
        format!("head dim {d} is not a multiple of 8 up to 256")
    })?;
    operands.require(heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
        format!("{heads} query heads are not a multiple of {kv_heads} key heads")
    })?;
    operands.require(spec.window != Some(0), || "a window of 0 keys; use 1 or more".into())?;
    let AttentionInputs { q, k, v, log_gates } = *inputs;
    let (width, kv_width) = (heads.saturating_mul(d), kv_heads.saturating_mul(d));
    operands.real("q", q, &[q.rows(), width])?;
    operands.real("k", k, &[k.rows(), kv_width])?;
    operands.real("v", v, &[k.rows(), kv_width])?;
    operands.maybe("log_gates", log_gates, &[k.rows(), heads])?;
    if let Acp::On { log_tolerance, bound } = &spec.acp {
        // A tolerance above 1 would prune where nothing is forgotten; NaN compares as false.
        operands.require(*log_tolerance <= 0.0, || {
            format!("log_tolerance is {log_tolerance}, but must be at most 0")
        })?;
        match bound {
            LogitBound::Norms => {}
            LogitBound::QkNorm { q, k } => {
                operands.head_weights("q_norm weights", q, d, width)?;
                operands.head_weights("k_norm weights", k, d, kv_width)?;
            }
            LogitBound::Given(bounds) => {
                operands.real("logit bounds", bounds, &[spec.segments.len(), heads])?;
            }
        }
    }
    if let Some(full) = &spec.full_sequence {
        let FullSequence { gate_sums, keys, bounds } = &**full;
        let (n, per_head) = (spec.segments.len(), spec.segments.len() * heads);
        let sums_fit = gate_sums.len() == per_head || log_gates.is_none();
        let bounds_fit = bounds.len() == per_head || bounds.is_empty();
        operands.require(sums_fit && bounds_fit && keys.len() == n, || {
            format!("the full sequences do not describe {n} segments of {heads} heads")
        })?;
    }
    operands.segments(&spec.segments, q.rows(), k.rows())
}

/// Validates the operands of [`AttentionOps::attention_bwd`](crate::AttentionOps::attention_bwd).
pub fn check_attention_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    inputs: &AttentionInputs<'_>,
    out: &AttentionOut,
    spec: &AttentionSpec,
) -> Result<()> {
    check_attention_fwd(backend, inputs, spec)?;
    let operands = Operands::new("attention_bwd", backend);
    operands.real("d_out", d_out, inputs.q.dims())?;
    operands.real("o", &out.o, inputs.q.dims())?;
    operands.real("lse", &out.lse, &[inputs.q.rows(), spec.heads])?;
    operands.ints("tiles", &out.tiles, &[spec.heads, 4])
}

/// Validates the operands of [`StickOps::stick_breaking_fwd`](crate::StickOps::stick_breaking_fwd).
pub fn check_stick_breaking_fwd(
    backend: &dyn Backend,
    inputs: &AttentionInputs<'_>,
    spec: &AttentionSpec,
) -> Result<()> {
    check_mask(backend, spec)?;
    check_attention_fwd(backend, inputs, spec)
}

/// Validates the operands of [`StickOps::stick_breaking_bwd`](crate::StickOps::stick_breaking_bwd).
pub fn check_stick_breaking_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    inputs: &AttentionInputs<'_>,
    out: &AttentionOut,
    spec: &AttentionSpec,
) -> Result<()> {
    check_mask(backend, spec)?;
    check_attention_bwd(backend, d_out, inputs, out, spec)
}

fn check_mask(backend: &dyn Backend, spec: &AttentionSpec) -> Result<()> {
    Operands::new("attention", backend).require(spec.mask == Mask::Causal, || {
        "stick-breaking attention is causal; use the causal mask".into()
    })
}
