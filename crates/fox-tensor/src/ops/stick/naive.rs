//! Stick-breaking attention, key by key from the newest to the oldest, with the stopping rule per
//! block.

use crate::naive::{Matrix, Naive, axpy, dot, matrix, maybe_matrix};
use crate::ops::attention::naive::{BM, BN, Backward, Forward, prefix};
use crate::{
    AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, Result, Segment, StickOps,
    Tensor, check_stick_breaking_bwd, check_stick_breaking_fwd,
};

impl StickOps for Naive {
    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_stick_breaking_fwd(self, inputs, spec)?;
        let out = StickBreaking::new(inputs, spec)?.forward();
        Ok(self.attention_out(out, inputs, spec))
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        check_stick_breaking_bwd(self, d_out, inputs, out, spec)?;
        let grads = StickBreaking::new(inputs, spec)?.backward(matrix(d_out)?);
        Ok(self.attention_grads(grads, inputs))
    }
}

/// Operands as matrices.
struct StickBreaking<'a> {
    q: Matrix<'a>,
    k: Matrix<'a>,
    v: Matrix<'a>,
    log_gates: Option<Matrix<'a>>,
    spec: &'a AttentionSpec,
}

/// One head of one segment.
struct HeadSegment<'a> {
    head: usize,
    kv_head: usize,
    segment: &'a Segment,
    /// `c[j]`: sum of the log gates of the segment's keys up to and including `j`.
    c: Vec<f64>,
}

/// Fractions and weights of one query.
struct Row {
    /// Position of the query.
    position: usize,
    /// `b_ij`: the fraction of the remaining stick that key `j` takes; 0 for masked keys.
    fractions: Vec<f64>,
    /// `b_ij prod_{j < l < i} (1 - b_il) exp(c_i - c_j)`.
    weights: Vec<f64>,
    /// `sum ln(1 - b_il)` over the keys visited so far: log of the remaining stick.
    log_rest: f64,
}

/// Up to [`BM`] queries, and the number of visited and visible key blocks.
struct Block {
    rows: Vec<Row>,
    visited: u64,
    visible: u64,
}

impl<'a> StickBreaking<'a> {
    fn new(inputs: &AttentionInputs<'a>, spec: &'a AttentionSpec) -> Result<Self> {
        Ok(StickBreaking {
            q: matrix(inputs.q)?,
            k: matrix(inputs.k)?,
            v: matrix(inputs.v)?,
            log_gates: maybe_matrix(inputs.log_gates)?,
            spec,
        })
    }

    fn units(&self) -> impl Iterator<Item = HeadSegment<'a>> {
        let spec = self.spec;
        spec.segments.as_slice().iter().flat_map(move |segment| {
            (0..spec.heads).map(move |head| HeadSegment {
                head,
                kv_head: head / (spec.heads / spec.kv_heads),
                segment,
                c: prefix(self.log_gates, segment, head),
            })
        })
    }

    fn sees(&self, i: usize, j: usize) -> bool {
        j < i && self.spec.sees(i, j)
    }

    /// Computes the weights of the queries from `m0` on.
    fn block(&self, unit: &HeadSegment<'_>, m0: usize) -> Block {
        let segment = unit.segment;
        let row = |t: usize| Row {
            position: segment.offset() + t,
            fractions: vec![0.0; segment.k_len],
            weights: vec![0.0; segment.k_len],
            log_rest: 0.0,
        };
        let rows = (m0..(m0 + BM).min(segment.q_len)).map(row).collect();
        let mut block = Block { rows, visited: 0, visible: 0 };
        let (mut done, tolerance) = (false, f64::from(self.spec.stick_tolerance()));
        for n0 in (0..segment.k_len).step_by(BN).rev() {
            let keys = n0..(n0 + BN).min(segment.k_len);
            let seen = |row: &Row| keys.clone().any(|j| self.sees(row.position, j));
            if !block.rows.iter().any(seen) {
                continue;
            }
            block.visible += 1;
            if done {
                continue;
            }
            block.visited += 1;
            for row in &mut block.rows {
                let position = row.position;
                for j in keys.clone().rev().filter(|&j| self.sees(position, j)) {
                    self.take(unit, row, j);
                }
            }
            // The remaining stick for all older keys, and the decay of the newest of them.
            let little = |row: &Row| {
                row.log_rest + unit.c[row.position] - unit.c[n0.saturating_sub(1)] < tolerance
            };
            done = block.rows.iter().all(little);
        }
        block
    }

    /// Key `j` takes its fraction of the stick.
    fn take(&self, unit: &HeadSegment<'_>, row: &mut Row, j: usize) {
        let (d, i, segment) = (self.spec.head_dim, row.position, unit.segment);
        let query = segment.q_start + i - segment.offset();
        let (q, k) =
            (self.q.head(query, unit.head, d), self.k.head(segment.k_start + j, unit.kv_head, d));
        let score = dot(q, k) * f64::from(self.spec.scale);
        row.fractions[j] = 1.0 / (1.0 + (-score).exp());
        row.weights[j] = row.fractions[j] * (row.log_rest + unit.c[i] - unit.c[j]).exp();
        // ln(1 - sigmoid(s)) = -softplus(s).
        row.log_rest -= score.max(0.0) + (-score.abs()).exp().ln_1p();
    }

    fn forward(&self) -> Forward {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let mut out = Forward::zeros(&self.q, heads);
        for unit in self.units() {
            for m0 in (0..unit.segment.q_len).step_by(BM) {
                let block = self.block(&unit, m0);
                out.tiles[unit.head][0] += block.visited;
                out.tiles[unit.head][1] += block.visible;
                for (t, row) in block.rows.iter().enumerate() {
                    let query = unit.segment.q_start + m0 + t;
                    out.lse[query * heads + unit.head] = row.log_rest;
                    let o = &mut out.o[query * self.q.cols + unit.head * d..][..d];
                    for (j, &weight) in row.weights.iter().enumerate() {
                        axpy(o, weight, self.v.head(unit.segment.k_start + j, unit.kv_head, d));
                    }
                }
            }
        }
        out
    }

    /// With `g_j = w_j dw_j`, the gradient of `ln w_j`: a score is in the own weight and in those of
    /// all older keys, so `ds_j = (1 - b_j) g_j - b_j sum_{l < j} g_l`.
    fn backward(&self, d_out: Matrix<'_>) -> Backward {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let (scale, kv_width) = (f64::from(self.spec.scale), self.k.cols);
        let mut grads = Backward::zeros(&self.q, &self.k, heads);
        for unit in self.units() {
            let segment = unit.segment;
            let mut dc = vec![0.0; segment.k_len];
            let blocks = (0..segment.q_len).step_by(BM).map(|m0| self.block(&unit, m0));
            for row in blocks.flat_map(|block| block.rows) {
                let i = row.position;
                let query = segment.q_start + i - segment.offset();
                let (q, d_o) = (self.q.head(query, unit.head, d), d_out.head(query, unit.head, d));
                // The sum of `g` over older keys.
                let mut older = 0.0;
                for j in (0..segment.k_len).filter(|&j| row.fractions[j] > 0.0) {
                    let key = segment.k_start + j;
                    let (k, v) =
                        (self.k.head(key, unit.kv_head, d), self.v.head(key, unit.kv_head, d));
                    let g = row.weights[j] * dot(d_o, v);
                    let ds = (1.0 - row.fractions[j]) * g - row.fractions[j] * older;
                    older += g;
                    let at = key * kv_width + unit.kv_head * d;
                    axpy(&mut grads.dv[at..][..d], row.weights[j], d_o);
                    axpy(&mut grads.dk[at..][..d], ds * scale, q);
                    axpy(&mut grads.dq[query * self.q.cols + unit.head * d..][..d], ds * scale, k);
                    dc[i] += g;
                    dc[j] -= g;
                }
            }
            grads.add_gates(&dc, segment, heads, unit.head);
        }
        grads
    }
}
