//! Forgetting attention, one row of scores at a time, with the pruning rule per tile.

use crate::naive::{Matrix, Naive, axpy, dot, logsumexp, matrix, maybe_matrix, real};
use crate::{
    Acp, AttentionGrads, AttentionInputs, AttentionOps, AttentionOut, AttentionSpec, LogitBound,
    Mask, Result, Segment, Tensor, check_attention_bwd, check_attention_fwd, clamp_log_gate,
    tile_words,
};

impl AttentionOps for Naive {
    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_attention_fwd(self, inputs, spec)?;
        let out = Attention::new(inputs, spec)?.forward();
        Ok(self.attention_out(out, inputs, spec))
    }

    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        check_attention_bwd(self, d_out, inputs, out, spec)?;
        let (o, lse) = (matrix(&out.o)?, real(&out.lse)?);
        let grads = Attention::new(inputs, spec)?.backward(matrix(d_out)?, o, lse);
        Ok(self.attention_grads(grads, inputs))
    }
}

impl Naive {
    pub(crate) fn attention_out(
        &self,
        out: Forward,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> AttentionOut {
        let device = inputs.q.device();
        AttentionOut {
            o: self.like(inputs.q, out.o),
            lse: self.tensor(device, out.lse, [inputs.q.rows(), spec.heads]),
            tiles: self.ints(device, tile_words(&out.tiles), [spec.heads, 4]),
        }
    }

    pub(crate) fn attention_grads(
        &self,
        grads: Backward,
        inputs: &AttentionInputs<'_>,
    ) -> AttentionGrads {
        AttentionGrads {
            dq: self.like(inputs.q, grads.dq),
            dk: self.like(inputs.k, grads.dk),
            dv: self.like(inputs.v, grads.dv),
            dlog_gates: inputs.log_gates.map(|lf| self.like(lf, grads.dlog_gates)),
        }
    }
}

/// Rows of a query block: blocks are counted from a segment's first query.
pub const BM: usize = 64;
/// Rows of a key block: blocks are counted from a segment's first key.
pub const BN: usize = 64;

/// Operands as matrices.
pub(crate) struct Attention<'a> {
    q: Matrix<'a>,
    k: Matrix<'a>,
    v: Matrix<'a>,
    log_gates: Option<Matrix<'a>>,
    spec: &'a AttentionSpec,
    /// Weights of the query and the key norm, for the bound of [`LogitBound::QkNorm`].
    norms: Option<(&'a [f64], &'a [f64])>,
    /// The bounds of [`LogitBound::Given`].
    given: Option<&'a [f64]>,
}

/// One head of one segment, with the data that all its rows share.
struct HeadSegment<'a> {
    head: usize,
    kv_head: usize,
    segment: &'a Segment,
    /// `c[j]`: sum of the log gates of the segment's keys up to and including `j`.
    c: Vec<f64>,
    tiles: Tiles,
}

/// Which tiles of one head and segment are visited.
struct Tiles {
    /// `[query block][key block]`.
    visit: Vec<Vec<bool>>,
    /// Tiles with at least one pair that the mask lets through.
    visible: usize,
}

/// Results of the forward.
pub(crate) struct Forward {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    /// Visited and total `[H]`.
    pub tiles: Vec<[u64; 2]>,
}

impl Forward {
    pub(crate) fn zeros(q: &Matrix<'_>, heads: usize) -> Self {
        Forward {
            o: vec![0.0; q.data.len()],
            lse: vec![f64::NEG_INFINITY; q.rows * heads],
            tiles: vec![[0; 2]; heads],
        }
    }
}

/// Results of the backward.
pub(crate) struct Backward {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub dlog_gates: Vec<f64>,
}

impl Backward {
    pub(crate) fn zeros(q: &Matrix<'_>, k: &Matrix<'_>, heads: usize) -> Self {
        Backward {
            dq: vec![0.0; q.data.len()],
            dk: vec![0.0; k.data.len()],
            dv: vec![0.0; k.data.len()],
            dlog_gates: vec![0.0; k.rows * heads],
        }
    }

    /// A gate is part of every later `c`: `dlf_t = sum_{s >= t} dc_s`.
    pub(crate) fn add_gates(&mut self, dc: &[f64], segment: &Segment, heads: usize, head: usize) {
        let mut sum = 0.0;
        for j in (0..segment.k_len).rev() {
            sum += dc[j];
            self.dlog_gates[(segment.k_start + j) * heads + head] = sum;
        }
    }
}

impl<'a> Attention<'a> {
    pub(crate) fn new(inputs: &AttentionInputs<'a>, spec: &'a AttentionSpec) -> Result<Self> {
        let norms = match &spec.acp {
            Acp::On { bound: LogitBound::QkNorm { q, k }, .. } => Some((real(q)?, real(k)?)),
            _ => None,
        };
        let given = match &spec.acp {
            Acp::On { bound: LogitBound::Given(bounds), .. } => Some(real(bounds)?),
            _ => None,
        };
        Ok(Attention {
            q: matrix(inputs.q)?,
            k: matrix(inputs.k)?,
            v: matrix(inputs.v)?,
            log_gates: maybe_matrix(inputs.log_gates)?,
            spec,
            norms,
            given,
        })
    }

    fn units(&self) -> impl Iterator<Item = HeadSegment<'a>> {
        let spec = self.spec;
        spec.segments.as_slice().iter().enumerate().flat_map(move |(index, segment)| {
            (0..spec.heads).map(move |head| {
                let kv_head = head / (spec.heads / spec.kv_heads);
                // The start of the sums makes no difference in f64.
                let c = prefix(self.log_gates, segment, head);
                let delta = self.delta((index, segment), head, kv_head);
                let tiles = Tiles::new(spec, segment, &c, delta);
                HeadSegment { head, kv_head, segment, c, tiles }
            })
        })
    }

    /// The decay below which a pair may be dropped: `-(2 U + ln N) + log_tolerance`.
    pub(crate) fn delta(
        &self,
        (index, segment): (usize, &Segment),
        head: usize,
        kv_head: usize,
    ) -> f64 {
        let Acp::On { log_tolerance, .. } = self.spec.acp else { return f64::NEG_INFINITY };
        let (full, at) = (self.spec.full_sequence.as_deref(), index * self.spec.heads + head);
        let given = self.given.map(|bounds| bounds[at]);
        let known = given.or_else(|| full.and_then(|full| full.bounds.get(at).copied()));
        let bound = known.unwrap_or_else(|| self.logit_bound(segment, head, kv_head));
        let keys = full.map_or(segment.k_len, |full| full.keys[index]) as f64;
        -(2.0 * bound + keys.ln()) + f64::from(log_tolerance)
    }

    /// `U >= max |q_i . k_j| * scale`.
    fn logit_bound(&self, segment: &Segment, head: usize, kv_head: usize) -> f64 {
        let (d, scale) = (self.spec.head_dim, f64::from(self.spec.scale));
        let max = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0, f64::max);
        if let Some((q, k)) = self.norms {
            let of = |w: &'a [f64], h: usize| if w.len() == d { w } else { &w[h * d..][..d] };
            let largest = |w: &[f64]| max(&mut w.iter().map(|w| w.abs()));
            return largest(of(q, head)) * largest(of(k, kv_head)) * d as f64 * scale;
        }
        let norm = |x: &[f64]| dot(x, x).sqrt();
        let q =
            max(&mut (0..segment.q_len).map(|t| norm(self.q.head(segment.q_start + t, head, d))));
        let k = max(
            &mut (0..segment.k_len).map(|j| norm(self.k.head(segment.k_start + j, kv_head, d)))
        );
        q * k * scale
    }

    /// Scores of query `t` of the segment against all its keys; `-inf` where masked or pruned.
    fn scores(&self, unit: &HeadSegment<'_>, t: usize) -> Vec<f64> {
        let (d, segment) = (self.spec.head_dim, unit.segment);
        let q = self.q.head(segment.q_start + t, unit.head, d);
        let i = segment.offset() + t;
        (0..segment.k_len)
            .map(|j| {
                if !self.spec.sees(i, j) || !unit.tiles.visit[t / BM][j / BN] {
                    return f64::NEG_INFINITY;
                }
                let k = self.k.head(segment.k_start + j, unit.kv_head, d);
                dot(q, k) * f64::from(self.spec.scale) + decay(&unit.c, i, j)
            })
            .collect()
    }

    pub(crate) fn forward(&self) -> Forward {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let mut out = Forward::zeros(&self.q, heads);
        for unit in self.units() {
            out.tiles[unit.head][0] += unit.tiles.visited() as u64;
            out.tiles[unit.head][1] += unit.tiles.visible as u64;
            for t in 0..unit.segment.q_len {
                let row = unit.segment.q_start + t;
                let s = self.scores(&unit, t);
                let lse = logsumexp(&s);
                out.lse[row * heads + unit.head] = lse;
                let o = &mut out.o[row * self.q.cols + unit.head * d..][..d];
                for j in 0..s.len() {
                    let v = self.v.head(unit.segment.k_start + j, unit.kv_head, d);
                    axpy(o, (s[j] - lse).exp(), v);
                }
            }
        }
        out
    }

    /// `dS = P (dP - <do, o>)`, and from it everything else.
    pub(crate) fn backward(&self, d_out: Matrix<'_>, o: Matrix<'_>, lse: &[f64]) -> Backward {
        let (heads, d) = (self.spec.heads, self.spec.head_dim);
        let (scale, kv_width) = (f64::from(self.spec.scale), self.k.cols);
        let mut grads = Backward::zeros(&self.q, &self.k, heads);
        for unit in self.units() {
            let segment = unit.segment;
            let mut dc = vec![0.0; segment.k_len];
            for t in 0..segment.q_len {
                let (row, i) = (segment.q_start + t, segment.offset() + t);
                let (q, d_o) = (self.q.head(row, unit.head, d), d_out.head(row, unit.head, d));
                let delta = dot(d_o, o.head(row, unit.head, d));
                let s = self.scores(&unit, t);
                for j in 0..s.len() {
                    let p = (s[j] - lse[row * heads + unit.head]).exp();
                    if p == 0.0 {
                        continue;
                    }
                    let key = segment.k_start + j;
                    let (k, v) =
                        (self.k.head(key, unit.kv_head, d), self.v.head(key, unit.kv_head, d));
                    let ds = p * (dot(d_o, v) - delta);
                    let at = key * kv_width + unit.kv_head * d;
                    axpy(&mut grads.dv[at..][..d], p, d_o);
                    axpy(&mut grads.dk[at..][..d], ds * scale, q);
                    axpy(&mut grads.dq[row * self.q.cols + unit.head * d..][..d], ds * scale, k);
                    // The bias is c_i - c_j looking back and c_j - c_i looking ahead.
                    let sign = if j <= i { 1.0 } else { -1.0 };
                    dc[i] += sign * ds;
                    dc[j] -= sign * ds;
                }
            }
            grads.add_gates(&dc, segment, heads, unit.head);
        }
        grads
    }
}

/// `c[j] = sum_{l <= j} log f[l]`, from the segment's first key; zeros without gates.
pub(crate) fn prefix(log_gates: Option<Matrix<'_>>, segment: &Segment, head: usize) -> Vec<f64> {
    let mut sum = 0.0;
    (0..segment.k_len)
        .map(|j| {
            let gate = log_gates.map_or(0.0, |lf| lf.row(segment.k_start + j)[head]);
            sum += clamp_log_gate(gate);
            sum
        })
        .collect()
}

/// Bias of the score: `c_i - c_j` looking back, `c_j - c_i` looking ahead, never positive.
fn decay(c: &[f64], i: usize, j: usize) -> f64 {
    c[i.max(j)] - c[i.min(j)]
}

impl Tiles {
    /// Applies the mask and the pruning rule to every tile.
    fn new(spec: &AttentionSpec, segment: &Segment, c: &[f64], delta: f64) -> Self {
        let mut tiles = Tiles { visit: Vec::new(), visible: 0 };
        for m0 in (0..segment.q_len).step_by(BM) {
            // Positions of the block's first and last query.
            let first = segment.offset() + m0;
            let last = segment.offset() + (m0 + BM).min(segment.q_len) - 1;
            let mut row = Vec::new();
            for n0 in (0..segment.k_len).step_by(BN) {
                let n1 = (n0 + BN).min(segment.k_len) - 1;
                let seen = (first..=last).any(|i| (n0..=n1).any(|j| spec.sees(i, j)));
                tiles.visible += usize::from(seen);
                row.push(seen && nearest_decay(spec.mask, c, (first, last), (n0, n1)) >= delta);
            }
            tiles.visit.push(row);
        }
        tiles
    }

    fn visited(&self) -> usize {
        self.visit.iter().flatten().filter(|&&visit| visit).count()
    }
}

/// The weakest decay in a tile: that of its nearest pair, since gates only ever add decay. A
/// tile that holds a query's own position has a pair without decay. Windows are ignored.
fn nearest_decay(mask: Mask, c: &[f64], queries: (usize, usize), keys: (usize, usize)) -> f64 {
    if keys.1 < queries.0 {
        decay(c, queries.0, keys.1)
    } else if mask == Mask::Bidirectional && keys.0 > queries.1 {
        decay(c, queries.1, keys.0)
    } else {
        0.0
    }
}
