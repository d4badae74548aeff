//! Gather and scatter between the interleaved rows of tensors and the contiguous, padded rows of the kernels.

use fox_tensor::{Result, Segment};

use super::BLOCK;
use super::backward::{NO_QUERY, Queries};
use super::call::{Attention, Unit};
use super::forward::transpose_panels;
use crate::pool::Buffer;
use crate::shared::Shared;
use crate::simd::{Kernel, Level, Simd};

/// Keys and values of a unit, `[k_len up to a block, padded_dim]`, padding zero.
pub struct GatheredKeys {
    pub k: Buffer,
    pub v: Buffer,
}

impl GatheredKeys {
    pub fn new(call: &Attention<'_>, unit: &Unit) -> Result<Self> {
        let (segment, d) = (&unit.segment, call.spec.head_dim);
        let (stride, column) = (call.spec.kv_heads * d, unit.kv_head * d);
        let rows = segment.k_len.next_multiple_of(BLOCK);
        let gather = |x: &[f32]| -> Result<Buffer> {
            let mut out = call.pool.take(rows * call.padded_dim)?;
            let source = &x[segment.k_start * stride + column..];
            gather_rows(source, stride, segment.k_len, d, call.padded_dim, 1.0, &mut out);
            Ok(out)
        };
        Ok(GatheredKeys { k: gather(call.k)?, v: gather(call.v)? })
    }
}

/// A head's queries and output gradients, as rows and as panels, with their statistics.
pub struct GatheredQueries {
    q: Buffer,
    q_panels: Buffer,
    d_out: Buffer,
    d_out_panels: Buffer,
    lse: Buffer,
    delta: Buffer,
}

impl GatheredQueries {
    pub fn new(
        call: &Attention<'_>,
        segment: &Segment,
        head: usize,
        d_out: &[f32],
        o: &[f32],
        lse: Option<&[f32]>,
    ) -> Result<Self> {
        let (d, dp, heads, n) =
            (call.spec.head_dim, call.padded_dim, call.spec.heads, segment.q_len);
        let (rows, stride) = (n.next_multiple_of(BLOCK), heads * d);
        let at = segment.q_start * stride + head * d;
        let width = panel_width(call.level);
        let gather = |x: &[f32], scale: f32| -> Result<(Buffer, Buffer)> {
            let (mut out, mut panels) = (call.pool.take(rows * dp)?, call.pool.take(rows * d)?);
            gather_rows(&x[at..], stride, n, d, dp, scale, &mut out);
            transpose_panels(&out, dp, n, d, width, 1.0, &mut panels);
            Ok((out, panels))
        };
        let (q, q_panels) = gather(call.q, call.spec.scale)?;
        let (d_out_rows, d_out_panels) = gather(d_out, 1.0)?;
        let (mut lse_rows, mut delta) = (call.pool.take(rows)?, call.pool.zeros(rows)?);
        lse_rows.fill(NO_QUERY);
        for i in 0..n {
            let row = at + i * stride;
            delta[i] = d_out[row..][..d].iter().zip(&o[row..][..d]).map(|(a, b)| a * b).sum();
            if let Some(lse) = lse {
                lse_rows[i] = lse[(segment.q_start + i) * heads + head];
            }
        }
        Ok(GatheredQueries { q, q_panels, d_out: d_out_rows, d_out_panels, lse: lse_rows, delta })
    }

    pub fn view(&self) -> Queries<'_> {
        Queries {
            q: &self.q,
            q_panels: &self.q_panels,
            d_out: &self.d_out,
            d_out_panels: &self.d_out_panels,
            lse: &self.lse,
            delta: &self.delta,
        }
    }
}

/// Adds the partial query gradients of a head in order and writes them, scaled, to `dq[R, H * d]`.
pub fn scatter_queries(
    call: &Attention<'_>,
    segment: &Segment,
    head: usize,
    partials: &[(Buffer, Buffer)],
    dq: Shared<'_>,
) {
    let (d, dp) = (call.spec.head_dim, call.padded_dim);
    for i in 0..segment.q_len {
        let row = segment.q_start + i;
        // SAFETY: no other task writes this row's columns of this head.
        let out = unsafe { dq.slice((row * call.spec.heads + head) * d, d) };
        for (part, _) in partials {
            out.iter_mut().zip(&part[i * dp..]).for_each(|(o, x)| *o += x);
        }
        out.iter_mut().for_each(|o| *o *= call.spec.scale);
    }
}

/// Writes a unit's key or value gradient to `[R, H_kv * d]`.
pub fn scatter_keys(call: &Attention<'_>, unit: &Unit, gradient: &[f32], out: Shared<'_>) {
    let (d, dp) = (call.spec.head_dim, call.padded_dim);
    for j in 0..unit.segment.k_len {
        let row = unit.segment.k_start + j;
        // SAFETY: no other task writes this row's columns of this key head.
        let out = unsafe { out.slice((row * call.spec.kv_heads + unit.kv_head) * d, d) };
        out.copy_from_slice(&gradient[j * dp..][..d]);
    }
}

/// Converts row and column sums of the score gradients to the gradient of the log gates:
/// `dc_t = rows_t - columns_t`, summed from the end, in f64.
///
/// With the causal mask the exact row sums are 0 (`sum_j P_ij dP_ij = delta_i`). They are used nevertheless: with both
/// sums the rounding errors of pairs on one side of `t` cancel instead of adding up along the sequence.
pub fn scatter_gates(
    call: &Attention<'_>,
    segment: &Segment,
    head: usize,
    columns: &[f32],
    partials: &[(Buffer, Buffer)],
    dgates: Shared<'_>,
) {
    let (heads, offset) = (call.spec.heads, segment.offset());
    let mut sum = 0.0f64;
    for j in (0..segment.k_len).rev() {
        sum -= columns[j] as f64;
        if j >= offset {
            sum += partials.iter().map(|(_, rows)| rows[j - offset] as f64).sum::<f64>();
        }
        // SAFETY: no other task writes this row's column of this head.
        unsafe { dgates.slice((segment.k_start + j) * heads + head, 1)[0] = sum as f32 };
    }
}

/// Copies `rows` rows of `d` values, `stride` apart, into rows of `padded` values, times `scale`. The
/// rest of `out` is set to zero.
pub fn gather_rows(
    source: &[f32],
    stride: usize,
    rows: usize,
    d: usize,
    padded: usize,
    scale: f32,
    out: &mut [f32],
) {
    for (r, out) in out.chunks_exact_mut(padded).enumerate() {
        if r < rows {
            let row = &source[r * stride..][..d];
            out.iter_mut().zip(row).for_each(|(o, x)| *o = x * scale);
            out[d..].fill(0.0);
        } else {
            out.fill(0.0);
        }
    }
}

/// Queries per panel of the backward kernel at this level: two vectors.
fn panel_width(level: Level) -> usize {
    struct Width;
    impl Kernel for Width {
        type Out = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            2 * S::LANES
        }
    }
    level.run(Width)
}
