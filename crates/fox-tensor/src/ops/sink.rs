//! Attention sinks: a learned logit `b` per query head that is in the denominator of the softmax only.
//!
//! ```text
//! p_ij = exp(s_ij) / (sum_j' exp(s_ij') + exp(b))      b is not scaled, not decayed and not subject to a window
//! ```
//!
//! With `o` and `lse` of attention without it, `o' = o sigmoid(lse - b)` and `lse' = log(exp(lse) + exp(b))`. The
//! backward pass of attention needs only these two, because it computes the weights as `exp(s - lse')` and their mean
//! gradient as `o' . do`.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Naive, real};
use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{
    AttentionGrads, AttentionInputs, AttentionOps, AttentionOut, AttentionSpec, Backend, Result,
    Segment, Segments, Tensor, check_attention_bwd,
};

/// Attention sinks on a device.
pub trait SinkOps: AttentionOps {
    /// `(o', lse')` of `o: [R, H * d]` and `lse: [R, H]` with `sinks: [H]`. Rows without a
    /// visible key, whose `lse` is `-inf`, are copied.
    fn sink_fwd(&self, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)>;

    /// Gradient of the sinks `[H]`: `-sum_r exp(b - lse'_r) (o'_r . d_out_r)`, from the gradient `d_out: [R, H * d]` of
    /// `o'`, and `o'` and `lse'` as [`SinkOps::sink_fwd`] gave them.
    fn sink_bwd(&self, d_out: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Tensor>;

    /// [`AttentionOps::attention_bwd`] of attention with sinks; `out` has `o'` and `lse'`. A device overrides
    /// it if its kernel relies on rows of dS that sum to zero: with a sink a row sums to `exp(b - lse') (o' . d_out)`.
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

/// Validates the operands of [`SinkOps::sink_fwd`].
pub fn check_sink_fwd(
    backend: &dyn Backend,
    o: &Tensor,
    lse: &Tensor,
    sinks: &Tensor,
) -> Result<()> {
    let operands = Operands::new("sink_attention", backend);
    let ((rows, width), heads) = (operands.matrix("o", o)?, sinks.len());
    operands.real("sinks", sinks, &[heads])?;
    operands.require(heads > 0 && width > 0 && width.is_multiple_of(heads), || {
        format!("{heads} sinks do not divide width {width}")
    })?;
    operands.real("lse", lse, &[rows, heads])
}

/// Validates the operands of [`SinkOps::sink_bwd`].
pub fn check_sink_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    sinks: &Tensor,
) -> Result<()> {
    check_sink_fwd(backend, o, lse, sinks)?;
    Operands::new("sink_bwd", backend).real("d_out", d_out, o.dims())
}

/// Validates the operands of [`SinkOps::sink_attention_bwd`].
pub fn check_sink_attention_bwd(
    backend: &dyn Backend,
    d_out: &Tensor,
    inputs: &AttentionInputs<'_>,
    out: &AttentionOut,
    sinks: &Tensor,
    spec: &AttentionSpec,
) -> Result<()> {
    check_attention_bwd(backend, d_out, inputs, out, spec)?;
    Operands::new("sink_attention_bwd", backend).real("sinks", sinks, &[spec.heads])
}

impl Tape<'_> {
    /// [`Tape::attention`] with sinks `[H]`: the output `[R_q, H * d]`, and tiles visited and in all.
    pub fn sink_attention(
        &mut self,
        [q, k, v]: [&Var; 3],
        log_gates: Option<&Var>,
        sinks: &Var,
        spec: &AttentionSpec,
    ) -> Result<(Var, Tensor)> {
        let gates = log_gates.map(Var::value);
        let inputs = AttentionInputs { q: q.value(), k: k.value(), v: v.value(), log_gates: gates };
        let backend = self.device.backend();
        let plain = backend.attention_fwd(&inputs, spec)?;
        let (o, lse) = backend.sink_fwd(&plain.o, &plain.lse, sinks.value())?;
        let result = AttentionOut { o, lse, tiles: plain.tiles };
        let needs_grad = [q, k, v, sinks].iter().any(|var| var.needs_grad()) || wants(log_gates);
        let tiles = result.tiles.clone();
        let out = self.output(result.o.clone(), needs_grad);
        let slots = (q.slot, k.slot, v.slot, slot_of(log_gates), sinks.slot);
        let (out_slot, device, spec) = (out.slot, self.device.clone(), spec.clone());
        let (q, k, v, gates) = (q.saved(), k.saved(), v.saved(), value_of(log_gates));
        let sinks = sinks.value.clone();
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
            let (q, k, v) = (q.get()?, k.get()?, v.get()?);
            let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: gates.as_ref() };
            let backend = device.backend();
            flow.add(slots.4, backend.sink_bwd(&d_out, &result.o, &result.lse, &sinks)?)?;
            let grads = backend.sink_attention_bwd(&d_out, &inputs, &result, &sinks, &spec)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dk)?;
            flow.add(slots.2, grads.dv)?;
            flow.add_some(slots.3, grads.dlog_gates)
        });
        Ok((out, tiles))
    }
}

impl SinkOps for Naive {
    fn sink_fwd(&self, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
        check_sink_fwd(self, o, lse, sinks)?;
        let (mut new_o, mut new_lse) = (real(o)?.to_vec(), real(lse)?.to_vec());
        let (sinks, d) = (real(sinks)?, o.cols() / sinks.len());
        for (i, (o, lse)) in new_o.chunks_mut(d).zip(&mut new_lse).enumerate() {
            let sink = sinks[i % sinks.len()];
            if *lse == f64::NEG_INFINITY {
                continue;
            }
            let fraction = 1.0 / (1.0 + (sink - *lse).exp());
            o.iter_mut().for_each(|x| *x *= fraction);
            *lse = lse.max(sink) + (-(*lse - sink).abs()).exp().ln_1p();
        }
        Ok((self.like(o, new_o), self.like(lse, new_lse)))
    }

    fn sink_bwd(&self, d_out: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Tensor> {
        check_sink_bwd(self, d_out, o, lse, sinks)?;
        let (b, d) = (real(sinks)?, o.cols() / sinks.len());
        let mut d_sinks = vec![0.0; b.len()];
        let rows = real(o)?.chunks(d).zip(real(d_out)?.chunks(d)).zip(real(lse)?);
        for (i, ((o, d_out), lse)) in rows.enumerate() {
            let (h, product) = (i % b.len(), o.iter().zip(d_out).map(|(o, g)| o * g).sum::<f64>());
            if *lse > f64::NEG_INFINITY {
                d_sinks[h] -= (b[h] - lse).exp() * product;
            }
        }
        Ok(self.like(sinks, d_sinks))
    }
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        sinks(1, (1, 1, 8), &[0, 1], [0.0; 2]),
        sinks(65, (2, 1, 24), &[0, 65], [0.5, -1.0]),
        sinks(130, (4, 2, 64), &[0, 3, 100, 130], [2.0, -2.0]),
        // Rows before the first sequence have no visible key.
        sinks(70, (2, 2, 16), &[9, 40, 70], [8.0, -40.0]),
        sinks(113, (3, 3, 40), &[0, 113], [30.0, 0.0]),
        sinks(203, (2, 2, 128), &[0, 203], [1.0, 3.0]),
    ]
}

/// Causal attention over packed sequences; the sinks of the heads have these two values in turn.
fn sinks(
    rows: usize,
    (heads, kv_heads, d): (usize, usize, usize),
    starts: &'static [usize],
    values: [f64; 2],
) -> Case {
    let name = format!("sink_attention/{values:?}/{rows}x{heads}:{kv_heads}/d{d}");
    let case = Case::new(name, move |tape, args| {
        let segment = |w: &[usize]| {
            let (start, len) = (w[0], w[1] - w[0]);
            Segment { q_start: start, q_len: len, k_start: start, k_len: len }
        };
        let segments = Segments::new(starts.windows(2).map(segment).collect())?;
        let spec = AttentionSpec { kv_heads, ..AttentionSpec::causal(heads, d, segments) };
        let keys = [args.var("q")?, args.var("k")?, args.var("v")?];
        let (gates, sinks) = (args.var("log_gates")?, args.var("sinks")?);
        let (o, _) = tape.sink_attention(keys, Some(gates), sinks, &spec)?;
        Ok(vec![Output::Var("o", o)])
    });
    let gates: Vec<f64> =
        case.rng("gates").normals(rows * heads).iter().map(|x| -x.abs() / 8.0).collect();
    let gates = gates.into_iter().map(crate::cases::round).collect();
    case.normal("q", &[rows, heads * d])
        .normal("k", &[rows, kv_heads * d])
        .normal("v", &[rows, kv_heads * d])
        .real("log_gates", &[rows, heads], gates)
        .real("sinks", &[heads], (0..heads).map(|h| values[h % 2]).collect())
}
