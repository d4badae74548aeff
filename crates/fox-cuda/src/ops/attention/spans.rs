//! The Hopper kernels on queries that each see all keys of one span: the older spans of PaTH attention.

use super::forward::ForwardPlan;
use fox_tensor::Mask;

use super::rows::dq_scratch_len;
use super::tiles::hopper_backward;
use super::tiling::{SpanTables, Tiling};
use super::{Attention, AttentionInputs};
use crate::{Buffer, Error, Float, Result};

/// Queries and the keys that all of them see.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Span {
    /// First row of the queries, a multiple of 128, and their number.
    pub(in crate::ops) row: usize,
    pub(in crate::ops) rows: usize,
    /// First row of the keys, and their number, a multiple of 128.
    pub(in crate::ops) k_row: usize,
    pub(in crate::ops) keys: usize,
    /// Position of the first key in the gate prefixes.
    pub(in crate::ops) gates: usize,
}

/// Tables of both kernels.
pub(in crate::ops) struct SpanTiles {
    forward: ForwardPlan,
    backward: SpanTables,
}

/// Gradients that [`Attention::spans_backward`] writes, and the statistics of queries that it reads.
pub(in crate::ops) struct SpanGradients<'a, T> {
    /// Gate prefix hi and lo, delta, log2(e) lse: `[heads][rows][4]`; rows without weight have an infinite lse.
    pub(in crate::ops) rows: &'a Buffer<f32>,
    /// `[heads][gate_stride][2]`.
    pub(in crate::ops) gates: Option<&'a Buffer<f32>>,
    pub(in crate::ops) gate_stride: usize,
    /// dQ in the order of accumulators, without the scale; [`dq_len`] elements.
    pub(in crate::ops) dq: &'a Buffer<f32>,
    /// Without the scale, `[R_k, H_kv * d]` like `dv`; rows outside spans are not written.
    pub(in crate::ops) dk: &'a Buffer<T>,
    pub(in crate::ops) dv: &'a Buffer<T>,
    /// `[heads][gate_stride]`.
    pub(in crate::ops) column_sums: &'a Buffer<f32>,
}

/// Elements of [`SpanGradients::dq`] for `rows` queries of all heads.
pub(in crate::ops) fn dq_len(head_dim: usize, rows: usize) -> usize {
    // Two halves of 64 x 64 are 128 queries of up to 64 columns, or 64 queries.
    rows / if head_dim <= 64 { 128 } else { 64 } * dq_scratch_len(head_dim, Mask::Causal)
}

impl<T: Float> Attention<'_, T> {
    /// Whether there are kernels for spans: their callers know the layout of dQ for head dims to 128 only.
    pub(in crate::ops) fn has_span_kernels(&self) -> bool {
        let backward = hopper_backward(self.spec.head_dim, self.features());
        let narrow = self.spec.head_dim <= 128;
        self.uses_wgmma() && self.spec.window.is_none() && narrow && backward.is_some()
    }

    /// Tables for spans of these heads.
    pub(in crate::ops) fn span_tiles(&self, spans: &[Span]) -> Result<SpanTiles> {
        let (heads, group) = (self.spec.heads, self.spec.heads / self.spec.kv_heads);
        let [forward, backward] = [true, false].map(|forward| self.tile(self.tile_key(forward)));
        Ok(SpanTiles {
            forward: ForwardPlan::of_spans(self.gpu, spans, (heads, group), &*forward?)?,
            backward: SpanTables::new(self.gpu, spans, heads, &*backward?)?,
        })
    }

    /// Attention of the spans' queries `[rows, H * d]` over keys and values `[R_k, H_kv * d]`: `o` of the
    /// shape of `q` and `lse` `[rows, H]`, with the gate prefix of a span's last key in place of the query's.
    pub(in crate::ops) fn spans_forward(
        &self,
        tables: &SpanTiles,
        operands @ (q, ..): (&Buffer<T>, &Buffer<T>, &Buffer<T>),
        (tiling, gates): (&Tiling, Option<&Buffer<f32>>),
        (o, lse): (&Buffer<T>, &Buffer<f32>),
    ) -> Result<()> {
        let spans = self.over_spans(operands)?;
        if o.len() != q.len() || lse.len() != spans.q_rows * self.spec.heads {
            return Err(Error::argument("attention over spans", "outputs unlike the queries"));
        }
        let key = spans.tile_key(true);
        let tile = spans.tile(key)?;
        spans.forward_bf16(tiling, (key, &tile), &tables.forward, gates, (o, lse))
    }

    /// Gradients of [`spans_forward`](Attention::spans_forward); `d_out` is that of its output.
    pub(in crate::ops) fn spans_backward(
        &self,
        tables: &SpanTiles,
        operands: (&Buffer<T>, &Buffer<T>, &Buffer<T>),
        d_out: &Buffer<T>,
        gradients: &SpanGradients<'_, T>,
    ) -> Result<()> {
        self.over_spans(operands)?.backward_spans(&tables.backward, d_out, gradients)
    }

    fn over_spans<'b>(
        &'b self,
        (q, k, v): (&'b Buffer<T>, &'b Buffer<T>, &'b Buffer<T>),
    ) -> Result<Attention<'b, T>> {
        let q_rows = q.len() / (self.spec.heads * self.spec.head_dim);
        if k.len() != v.len() {
            return Err(Error::argument("attention over spans", "values unlike the keys"));
        }
        Ok(Attention { inputs: AttentionInputs { q, k, v, ..self.inputs }, q_rows, ..*self })
    }
}
