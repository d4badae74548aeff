//! `prepare_heads`: token shift, per-head RMS norm, RoPE.

use crate::naive::{
    Matrix, Naive, axpy, dot, matrix, maybe_matrix, maybe_real, rms_backward, rstd, sigmoid,
};
use crate::{
    HeadGrads, HeadInputs, HeadOps, HeadSpec, Result, Segment, Tensor, check_prepare_heads_bwd,
    check_prepare_heads_fwd,
};

impl HeadOps for Naive {
    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor> {
        check_prepare_heads_fwd(self, inputs, spec)?;
        Ok(self.like(inputs.u, heads(inputs, spec)?.forward()))
    }

    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads> {
        check_prepare_heads_bwd(self, dy, inputs, spec)?;
        let grads = heads(inputs, spec)?.backward(matrix(dy)?);
        Ok(HeadGrads {
            du: self.like(inputs.u, grads.du),
            dshift: inputs.shift.map(|z| self.like(z, grads.dshift)),
            dnorm: inputs.norm.map(|w| self.like(w, grads.dnorm)),
        })
    }
}

fn heads<'a>(inputs: &HeadInputs<'a>, spec: &'a HeadSpec) -> Result<Heads<'a>> {
    Ok(Heads {
        u: matrix(inputs.u)?,
        shift: maybe_matrix(inputs.shift)?,
        prev: maybe_matrix(inputs.prev)?,
        norm: maybe_real(inputs.norm)?,
        spec,
    })
}

/// Operands and options.
struct Heads<'a> {
    u: Matrix<'a>,
    shift: Option<Matrix<'a>>,
    prev: Option<Matrix<'a>>,
    norm: Option<&'a [f64]>,
    spec: &'a HeadSpec,
}

/// Gradients of [`Heads::forward`].
struct HeadsBackward {
    du: Vec<f64>,
    dshift: Vec<f64>,
    dnorm: Vec<f64>,
}

/// One head of one token of a segment.
struct TokenHead<'s> {
    segment: (usize, &'s Segment),
    /// Token, counted from the segment's first query.
    t: usize,
    head: usize,
}

impl TokenHead<'_> {
    fn row(&self) -> usize {
        self.segment.1.q_start + self.t
    }

    /// Position counted from the segment's first key.
    fn position(&self) -> f64 {
        (self.segment.1.offset() + self.t) as f64
    }
}

impl<'a> Heads<'a> {
    /// Every head of every token that a segment covers.
    fn token_heads(&self) -> impl Iterator<Item = TokenHead<'a>> + use<'a> {
        let spec = self.spec;
        spec.segments.as_slice().iter().enumerate().flat_map(move |segment| {
            (0..segment.1.q_len)
                .flat_map(move |t| (0..spec.heads).map(move |head| TokenHead { segment, t, head }))
        })
    }

    /// The raw head one token earlier: of the same segment, or handed in, or zero.
    fn before(&self, at: &TokenHead<'_>) -> Vec<f64> {
        let d = self.spec.head_dim;
        match (at.t, self.prev) {
            (0, Some(prev)) => prev.head(at.segment.0, at.head, d).to_vec(),
            (0, None) => vec![0.0; d],
            _ => self.u.head(at.row() - 1, at.head, d).to_vec(),
        }
    }

    /// The shift coefficient: weight of the previous token.
    fn alpha(&self, at: &TokenHead<'_>) -> Option<f64> {
        self.shift.map(|z| sigmoid(z.row(at.row())[at.head]))
    }

    /// `a u[t-1] + (1 - a) u[t]`.
    fn shifted(&self, at: &TokenHead<'_>) -> Vec<f64> {
        let now = self.u.head(at.row(), at.head, self.spec.head_dim);
        match self.alpha(at) {
            None => now.to_vec(),
            Some(a) => now
                .iter()
                .zip(self.before(at))
                .map(|(now, old)| a * old + (1.0 - a) * now)
                .collect(),
        }
    }

    /// The norm's weights of one head: its own, or those that all heads share.
    fn weights(&self, head: usize) -> Option<&'a [f64]> {
        let d = self.spec.head_dim;
        self.norm.map(|w| if w.len() == d { w } else { &w[head * d..][..d] })
    }

    /// Rotates the pairs `(x[m], x[m + d/2])` by `sign * position * base^(-2m/d)`.
    fn rotate(&self, x: &mut [f64], at: &TokenHead<'_>, sign: f64) {
        let (d, Some(rope)) = (x.len(), self.spec.rope) else { return };
        for m in 0..d / 2 {
            let angle = sign * at.position() * rope.frequency(m, d);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = (x[m], x[m + d / 2]);
            x[m] = a * cos - b * sin;
            x[m + d / 2] = a * sin + b * cos;
        }
    }

    fn forward(&self) -> Vec<f64> {
        let (d, eps) = (self.spec.head_dim, f64::from(self.spec.norm_eps));
        let mut y = vec![0.0; self.u.data.len()];
        for at in self.token_heads() {
            let mut x = self.shifted(&at);
            if let Some(w) = self.weights(at.head) {
                let r = rstd(&x, eps);
                x.iter_mut().zip(w).for_each(|(x, w)| *x *= r * w);
            }
            self.rotate(&mut x, &at, 1.0);
            y[at.row() * self.u.cols + at.head * d..][..d].copy_from_slice(&x);
        }
        y
    }

    fn backward(&self, dy: Matrix<'_>) -> HeadsBackward {
        let (d, width) = (self.spec.head_dim, self.u.cols);
        let mut grads = HeadsBackward {
            du: vec![0.0; self.u.data.len()],
            dshift: vec![0.0; self.u.rows * self.spec.heads],
            dnorm: vec![0.0; self.norm.map_or(0, <[f64]>::len)],
        };
        for at in self.token_heads() {
            let mut g = dy.head(at.row(), at.head, d).to_vec();
            self.rotate(&mut g, &at, -1.0);
            if let Some(w) = self.weights(at.head) {
                let x = self.shifted(&at);
                let r = rstd(&x, f64::from(self.spec.norm_eps));
                let first = if grads.dnorm.len() == d { 0 } else { at.head * d };
                for c in 0..d {
                    grads.dnorm[first + c] += g[c] * x[c] * r;
                    g[c] *= w[c];
                }
                g = rms_backward(&x, r, &g);
            }
            let here = at.row() * width + at.head * d;
            let Some(a) = self.alpha(&at) else {
                grads.du[here..][..d].copy_from_slice(&g);
                continue;
            };
            axpy(&mut grads.du[here..][..d], 1.0 - a, &g);
            if at.t > 0 {
                axpy(&mut grads.du[here - width..][..d], a, &g);
            }
            let now = self.u.head(at.row(), at.head, d);
            let da = dot(&g, &self.before(&at)) - dot(&g, now);
            grads.dshift[at.row() * self.spec.heads + at.head] = da * a * (1.0 - a);
        }
        grads
    }
}
