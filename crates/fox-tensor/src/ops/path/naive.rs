//! PaTH attention, straight from its definition: every query is reflected token by token.

use super::{PATH_BLOCK, PathGrads, PathInputs, PathOps};
use crate::naive::{Matrix, Naive, axpy, dot, logsumexp, matrix, maybe_matrix, real};
use crate::ops::attention::naive::{Attention, Backward, Forward, prefix};
use crate::{
    AttentionOut, AttentionSpec, Result, Segment, Tensor, check_path_attention_bwd,
    check_path_attention_fwd,
};

impl PathOps for Naive {
    fn path_attention_fwd(
        &self,
        inputs: &PathInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_path_attention_fwd(self, inputs, spec)?;
        let out = Path::new(inputs, spec)?.forward();
        Ok(self.attention_out(out, &inputs.attention(), spec))
    }

    fn path_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &PathInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<PathGrads> {
        check_path_attention_bwd(self, d_out, inputs, out, spec)?;
        let (o, lse) = (matrix(&out.o)?, real(&out.lse)?);
        let (grads, du) = Path::new(inputs, spec)?.backward(matrix(d_out)?, o, lse);
        let grads = self.attention_grads(grads, &inputs.attention());
        Ok(PathGrads {
            dq: grads.dq,
            dk: grads.dk,
            dv: grads.dv,
            du: self.like(inputs.u, du),
            dlog_gates: grads.dlog_gates,
        })
    }
}

/// Operands as matrices.
struct Path<'a> {
    q: Matrix<'a>,
    k: Matrix<'a>,
    v: Matrix<'a>,
    u: Matrix<'a>,
    log_gates: Option<Matrix<'a>>,
    /// For the pruning rule.
    attention: Attention<'a>,
    spec: &'a AttentionSpec,
}

/// One head of one segment.
struct HeadSegment<'a> {
    head: usize,
    kv_head: usize,
    segment: &'a Segment,
    /// `c[j]`: sum of the log gates of the segment's keys up to and including `j`.
    c: Vec<f64>,
    /// The decay below which a pair may be dropped.
    delta: f64,
}

/// The way of one query from its own key back to key `first`.
struct Walk {
    first: usize,
    /// The query as key `first + n` meets it.
    x: Vec<Vec<f64>>,
    /// Scores of the keys from `first` on.
    scores: Vec<f64>,
}

impl HeadSegment<'_> {
    /// The first block of keys that the tile of queries of block `own` visits.
    fn first_block(&self, own: usize) -> usize {
        let query = (own * PATH_BLOCK).max(self.segment.offset());
        let decay = |block: usize| self.c[query] - self.c[(block + 1) * PATH_BLOCK - 1];
        (0..own).find(|&block| decay(block) >= self.delta).unwrap_or(own)
    }
}

impl<'a> Path<'a> {
    fn new(inputs: &PathInputs<'a>, spec: &'a AttentionSpec) -> Result<Self> {
        Ok(Path {
            q: matrix(inputs.q)?,
            k: matrix(inputs.k)?,
            v: matrix(inputs.v)?,
            u: matrix(inputs.u)?,
            log_gates: maybe_matrix(inputs.log_gates)?,
            attention: Attention::new(&inputs.attention(), spec)?,
            spec,
        })
    }

    fn units(&self) -> impl Iterator<Item = HeadSegment<'a>> {
        let spec = self.spec;
        spec.segments.as_slice().iter().enumerate().flat_map(move |(index, segment)| {
            (0..spec.heads).map(move |head| {
                let kv_head = head / (spec.heads / spec.kv_heads);
                let delta = match self.log_gates {
                    Some(_) => self.attention.delta((index, segment), head, kv_head),
                    None => f64::NEG_INFINITY,
                };
                let c = prefix(self.log_gates, segment, head);
                HeadSegment { head, kv_head, segment, c, delta }
            })
        })
    }

    /// Walks query `t` of the segment back.
    fn walk(&self, unit: &HeadSegment<'_>, t: usize) -> Walk {
        let (d, segment) = (self.spec.head_dim, unit.segment);
        let i = segment.offset() + t;
        let first = unit.first_block(i / PATH_BLOCK) * PATH_BLOCK;
        let mut walk =
            Walk { first, x: vec![Vec::new(); i + 1 - first], scores: vec![0.0; i + 1 - first] };
        let mut x = self.q.head(segment.q_start + t, unit.head, d).to_vec();
        for j in (first..=i).rev() {
            let key = segment.k_start + j;
            let k = self.k.head(key, unit.kv_head, d);
            walk.scores[j - first] =
                dot(&x, k) * f64::from(self.spec.scale) + unit.c[i] - unit.c[j];
            walk.x[j - first] = x.clone();
            let u = self.u.head(key, unit.kv_head, d);
            let along = dot(&x, u);
            axpy(&mut x, -along, u);
        }
        walk
    }

    fn forward(&self) -> Forward {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let mut out = Forward::zeros(&self.q, heads);
        for unit in self.units() {
            let segment = unit.segment;
            let blocks = segment.offset() / PATH_BLOCK..segment.k_len.div_ceil(PATH_BLOCK);
            for own in blocks.filter(|_| segment.q_len > 0) {
                out.tiles[unit.head][0] += (own + 1 - unit.first_block(own)) as u64;
                out.tiles[unit.head][1] += own as u64 + 1;
            }
            for t in 0..segment.q_len {
                let row = segment.q_start + t;
                let walk = self.walk(&unit, t);
                let lse = logsumexp(&walk.scores);
                out.lse[row * heads + unit.head] = lse;
                let o = &mut out.o[row * self.q.cols + unit.head * d..][..d];
                for (n, s) in walk.scores.iter().enumerate() {
                    let key = segment.k_start + walk.first + n;
                    axpy(o, (s - lse).exp(), self.v.head(key, unit.kv_head, d));
                }
            }
        }
        out
    }

    /// The walk again, from the oldest key to the newest. `x` is the query as key `j` meets it, `y = M_j x` the one that
    /// key `j - 1` meets, with gradient `dy`: `dx = ds scale k_j + M_j dy`, and `du = -((u.x) dy + (u.dy) x)`.
    fn backward(&self, d_out: Matrix<'_>, o: Matrix<'_>, lse: &[f64]) -> (Backward, Vec<f64>) {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let (scale, kv_width) = (f64::from(self.spec.scale), self.k.cols);
        let mut grads = Backward::zeros(&self.q, &self.k, heads);
        let mut du = vec![0.0; self.u.data.len()];
        for unit in self.units() {
            let segment = unit.segment;
            let mut dc = vec![0.0; segment.k_len];
            for t in 0..segment.q_len {
                let (row, i) = (segment.q_start + t, segment.offset() + t);
                let d_o = d_out.head(row, unit.head, d);
                let delta = dot(d_o, o.head(row, unit.head, d));
                let walk = self.walk(&unit, t);
                let mut dx = vec![0.0; d];
                for (n, s) in walk.scores.iter().enumerate() {
                    let (j, x) = (walk.first + n, &walk.x[n]);
                    let (key, p) = (segment.k_start + j, (s - lse[row * heads + unit.head]).exp());
                    let at = key * kv_width + unit.kv_head * d;
                    let u = self.u.head(key, unit.kv_head, d);
                    let (ux, udy) = (dot(u, x), dot(u, &dx));
                    axpy(&mut du[at..][..d], -ux, &dx);
                    axpy(&mut du[at..][..d], -udy, x);
                    axpy(&mut dx, -udy, u);
                    let ds = p * (dot(d_o, self.v.head(key, unit.kv_head, d)) - delta);
                    axpy(&mut grads.dv[at..][..d], p, d_o);
                    axpy(&mut grads.dk[at..][..d], ds * scale, x);
                    axpy(&mut dx, ds * scale, self.k.head(key, unit.kv_head, d));
                    dc[i] += ds;
                    dc[j] -= ds;
                }
                axpy(&mut grads.dq[row * self.q.cols + unit.head * d..][..d], 1.0, &dx);
            }
            grads.add_gates(&dc, segment, heads, unit.head);
        }
        (grads, du)
    }
}
