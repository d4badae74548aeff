//! Wall attention, one pair of query and key at a time. Pruning is ignored: the oracle is exact.

use super::{
    WALL_BLOCK, WallBlock, WallGrads, WallInputs, WallOps, check_wall_attention_bwd,
    check_wall_attention_fwd, check_wall_close_block,
};
use crate::naive::{Matrix, Naive, axpy, dot, logsumexp, matrix, maybe_matrix, real};
use crate::ops::attention::naive::{BM, BN, Backward, Forward};
use crate::{AttentionOut, AttentionSpec, Result, Segment, Tensor, clamp_log_gate};

impl WallOps for Naive {
    fn wall_attention_fwd(
        &self,
        inputs: &WallInputs<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_wall_attention_fwd(self, inputs, past, spec)?;
        let out = Wall::new(inputs, past, spec)?.forward()?;
        Ok(self.attention_out(out, &inputs.attention(), spec))
    }

    fn wall_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &WallInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<WallGrads> {
        check_wall_attention_bwd(self, d_out, inputs, out, spec)?;
        let wall = Wall::new(inputs, &[], spec)?;
        let (grads, decays) = wall.backward(matrix(d_out)?, matrix(&out.o)?, real(&out.lse)?)?;
        let grads = self.attention_grads(grads, &inputs.attention());
        Ok(WallGrads {
            dq: grads.dq,
            dk: grads.dk,
            dv: grads.dv,
            dlog_decays: self.like(inputs.log_decays, decays),
            dlog_gates: grads.dlog_gates,
        })
    }

    fn wall_close_block(
        &self,
        k: &Tensor,
        log_decays: &Tensor,
        head_dim: usize,
    ) -> Result<(Tensor, Tensor)> {
        check_wall_close_block(self, k, log_decays, head_dim)?;
        let (keys, decays) = (matrix(k)?, matrix(log_decays)?);
        let (width, group) = (decays.cols, decays.cols / keys.cols);
        let (mut closed, mut decay) = (vec![0.0; WALL_BLOCK * width], vec![1.0; width]);
        for j in (0..WALL_BLOCK).rev() {
            for n in 0..width {
                let channel = n / head_dim / group * head_dim + n % head_dim;
                closed[j * width + n] = decay[n] * keys.row(j)[channel];
                decay[n] *= decays.row(j)[n].exp();
            }
        }
        let device = k.device();
        Ok((
            self.tensor(device, closed, [WALL_BLOCK, width]),
            self.tensor(device, decay, [1, width]),
        ))
    }
}

/// Operands as matrices.
struct Wall<'a> {
    q: Matrix<'a>,
    k: Matrix<'a>,
    v: Matrix<'a>,
    log_decays: Matrix<'a>,
    log_gates: Option<Matrix<'a>>,
    past: &'a [Vec<WallBlock<'a>>],
    spec: &'a AttentionSpec,
}

/// One head of one segment: all keys it sees, those of past blocks first.
struct HeadSegment<'a> {
    head: usize,
    kv_head: usize,
    segment: &'a Segment,
    /// Number of past keys.
    past: usize,
    k: Vec<&'a [f64]>,
    v: Vec<&'a [f64]>,
    /// Factors that decay a query from key `j` to key `j - 1`. Past keys are decayed to the end of their
    /// block already, so the factor of a past block is at its first key.
    factors: Vec<Vec<f64>>,
    /// Sums of the log gates up to and including key `j`.
    c: Vec<f64>,
}

impl<'a> Wall<'a> {
    fn new(
        inputs: &WallInputs<'a>,
        past: &'a [Vec<WallBlock<'a>>],
        spec: &'a AttentionSpec,
    ) -> Result<Self> {
        Ok(Wall {
            q: matrix(inputs.q)?,
            k: matrix(inputs.k)?,
            v: matrix(inputs.v)?,
            log_decays: matrix(inputs.log_decays)?,
            log_gates: maybe_matrix(inputs.log_gates)?,
            past,
            spec,
        })
    }

    fn units(&self) -> Result<Vec<HeadSegment<'a>>> {
        let mut units = Vec::new();
        for (index, segment) in self.spec.segments.as_slice().iter().enumerate() {
            for head in 0..self.spec.heads {
                units.push(self.unit(index, segment, head)?);
            }
        }
        Ok(units)
    }

    fn unit(&self, index: usize, segment: &'a Segment, head: usize) -> Result<HeadSegment<'a>> {
        let (d, spec) = (self.spec.head_dim, self.spec);
        let kv_head = head / (spec.heads / spec.kv_heads);
        let (mut k, mut v, mut factors) = (Vec::new(), Vec::new(), Vec::new());
        let mut gates = Vec::new();
        let blocks = self.past.get(index).map_or(&[][..], |blocks| blocks);
        for block in blocks {
            let (keys, values) = (matrix(block.k)?, matrix(block.v)?);
            let log_gates = maybe_matrix(block.log_gates)?;
            for j in 0..WALL_BLOCK {
                k.push(keys.head(j, head, d));
                v.push(values.head(j, kv_head, d));
                let decay = matrix(block.decay)?.head(0, head, d);
                factors.push(if j == 0 { decay.to_vec() } else { vec![1.0; d] });
                gates.push(log_gates.map_or(0.0, |gates| gates.row(j)[head]));
            }
        }
        for row in segment.k_start..segment.k_start + segment.k_len {
            k.push(self.k.head(row, kv_head, d));
            v.push(self.v.head(row, kv_head, d));
            factors.push(self.log_decays.head(row, head, d).iter().map(|g| g.exp()).collect());
            gates.push(self.log_gates.map_or(0.0, |gates| gates.row(row)[head]));
        }
        let mut sum = 0.0;
        let c = gates.into_iter().map(|gate| {
            sum += clamp_log_gate(gate);
            sum
        });
        let (past, c) = (blocks.len() * WALL_BLOCK, c.collect());
        Ok(HeadSegment { head, kv_head, segment, past, k, v, factors, c })
    }

    /// Calls `f(j, decay)` for each visible key of position `i`, from `i` itself backwards; `decay: [d]` is the product
    /// of the factors between.
    fn visit(&self, unit: &HeadSegment<'_>, i: usize, mut f: impl FnMut(usize, &[f64])) {
        let mut decay = vec![1.0; self.spec.head_dim];
        for j in (0..=i).rev().filter(|&j| self.spec.sees(i, j)) {
            f(j, &decay);
            decay.iter_mut().zip(&unit.factors[j]).for_each(|(decay, factor)| *decay *= factor);
        }
    }

    /// Scores of query `t` of the segment; `-inf` where masked.
    fn scores(&self, unit: &HeadSegment<'_>, t: usize) -> Vec<f64> {
        let q = self.q.head(unit.segment.q_start + t, unit.head, self.spec.head_dim);
        let i = unit.past + unit.segment.offset() + t;
        let mut scores = vec![f64::NEG_INFINITY; unit.k.len()];
        self.visit(unit, i, |j, decay| {
            let products = q.iter().zip(unit.k[j]).zip(decay).map(|((q, k), decay)| q * k * decay);
            let sum: f64 = products.sum();
            scores[j] = sum * f64::from(self.spec.scale) + unit.c[i] - unit.c[j];
        });
        scores
    }

    /// Tiles with a visible pair, of blocks that are counted from the first key held.
    fn tiles(&self, unit: &HeadSegment<'_>) -> u64 {
        let first = unit.past + unit.segment.offset();
        let blocks = first / BM..(first + unit.segment.q_len).div_ceil(BM);
        let visible = |m: usize, n: usize| {
            let rows = (m * BM).max(first)..((m + 1) * BM).min(first + unit.segment.q_len);
            let keys = n * BN..((n + 1) * BN).min(unit.k.len());
            rows.clone().any(|i| keys.clone().any(|j| self.spec.sees(i, j)))
        };
        let pairs = blocks.flat_map(|m| (0..=m).map(move |n| (m, n)));
        pairs.filter(|&(m, n)| visible(m, n)).count() as u64
    }

    fn forward(&self) -> Result<Forward> {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let mut out = Forward::zeros(&self.q, heads);
        for unit in self.units()?.iter().filter(|unit| unit.segment.q_len > 0) {
            let tiles = self.tiles(unit);
            out.tiles[unit.head].iter_mut().for_each(|count| *count += tiles);
            for t in 0..unit.segment.q_len {
                let row = unit.segment.q_start + t;
                let s = self.scores(unit, t);
                let lse = logsumexp(&s);
                out.lse[row * heads + unit.head] = lse;
                let o = &mut out.o[row * self.q.cols + unit.head * d..][..d];
                s.iter().zip(&unit.v).for_each(|(s, v)| axpy(o, (s - lse).exp(), v));
            }
        }
        Ok(out)
    }

    /// With `D_ijn = dS_ij scale q_in k_jn decay_ijn`: `D` is the gradient of `G_in - G_jn`, and a decay is part of
    /// every later `G`.
    fn backward(
        &self,
        d_out: Matrix<'_>,
        o: Matrix<'_>,
        lse: &[f64],
    ) -> Result<(Backward, Vec<f64>)> {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let (scale, kv_width) = (f64::from(self.spec.scale), self.k.cols);
        let mut grads = Backward::zeros(&self.q, &self.k, heads);
        let mut decays = vec![0.0; self.log_decays.data.len()];
        for unit in self.units()? {
            let segment = unit.segment;
            let (mut dc, mut dg) = (vec![0.0; segment.k_len], vec![0.0; segment.k_len * d]);
            for t in 0..segment.q_len {
                let (row, i) = (segment.q_start + t, segment.offset() + t);
                let (q, d_o) = (self.q.head(row, unit.head, d), d_out.head(row, unit.head, d));
                let delta = dot(d_o, o.head(row, unit.head, d));
                let scores = self.scores(&unit, t);
                self.visit(&unit, i, |j, decay| {
                    let p = (scores[j] - lse[row * heads + unit.head]).exp();
                    let ds = p * (dot(d_o, unit.v[j]) - delta);
                    let at = (segment.k_start + j) * kv_width + unit.kv_head * d;
                    axpy(&mut grads.dv[at..][..d], p, d_o);
                    for n in 0..d {
                        let factor = ds * scale * decay[n];
                        grads.dk[at + n] += factor * q[n];
                        grads.dq[row * self.q.cols + unit.head * d + n] += factor * unit.k[j][n];
                        dg[i * d + n] += factor * q[n] * unit.k[j][n];
                        dg[j * d + n] -= factor * q[n] * unit.k[j][n];
                    }
                    dc[i] += ds;
                    dc[j] -= ds;
                });
            }
            grads.add_gates(&dc, segment, heads, unit.head);
            for n in 0..d {
                let mut sum = 0.0;
                for j in (0..segment.k_len).rev() {
                    sum += dg[j * d + n];
                    let row = segment.k_start + j;
                    decays[row * self.log_decays.cols + unit.head * d + n] = sum;
                }
            }
        }
        Ok((grads, decays))
    }
}
