//! Attention sinks: a learned logit `b` per query head that is in the denominator of the softmax only.
//!
//! ```text
//! p_ij = exp(s_ij) / (sum_j' exp(s_ij') + exp(b))      neither scaled nor decayed nor part of a window
//! ```
//!
//! With `o` and `lse` of attention without it, `o' = o sigmoid(lse - b)` and `lse' = log(exp(lse) + exp(b))`. The
//! backward pass of attention needs nothing but these two, because it computes the weights as `exp(s - lse')` and
//! their mean gradient as `o' . do`.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{
    AttentionGrads, AttentionInputs, AttentionOps, AttentionOut, AttentionSpec, Result, Tensor,
};

/// A device's attention sinks.
pub trait SinkOps: AttentionOps {
    /// `(o', lse')` of `o: [R, H * d]` and `lse: [R, H]` with `sinks: [H]`. Rows that see nothing, whose `lse` is
    /// `-inf`, stay as they are.
    fn sink_fwd(&self, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)>;

    /// Gradient of the sinks `[H]`: `-sum_r exp(b - lse'_r) (o'_r . d_out_r)`, from the gradient `d_out: [R, H * d]` of
    /// `o'`, and `o'` and `lse'` as [`SinkOps::sink_fwd`] gave them.
    fn sink_bwd(&self, d_out: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Tensor>;

    /// [`AttentionOps::attention_bwd`] of attention with sinks; `out` has `o'` and `lse'`. The difference is for devices
    /// that count on rows of dS adding up to zero: with a sink a row adds up to `exp(b - lse') (o' . d_out)`.
    fn sink_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        _sinks: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        self.attention_bwd(d_out, inputs, out, spec)
    }
}
