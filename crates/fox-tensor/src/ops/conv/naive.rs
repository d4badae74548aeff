//! The short convolution with what follows it.

use crate::naive::{Act, Matrix, Naive, dot, matrix, maybe_matrix, maybe_real, real};
use crate::{
    ConvGrads, ConvInputs, ConvOps, ConvSpec, Result, Segment, Tensor, check_short_conv_bwd,
    check_short_conv_fwd, check_short_conv_split_bwd, check_short_conv_split_fwd,
    short_conv_split_bwd_by_copies, short_conv_split_fwd_by_copies,
};

impl ConvOps for Naive {
    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
        check_short_conv_fwd(self, inputs, spec)?;
        Ok(self.like(inputs.x, conv(inputs, spec)?.forward()))
    }

    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        check_short_conv_bwd(self, dy, inputs, spec)?;
        let grads = conv(inputs, spec)?.backward(matrix(dy)?);
        Ok(ConvGrads {
            dx: self.like(inputs.x, grads.dx),
            dweight: self.like(inputs.weight, grads.dweight),
            dbias: inputs.bias.map(|bias| self.like(bias, grads.dbias)),
        })
    }

    fn short_conv_split_fwd(
        &self,
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<Vec<Tensor>> {
        check_short_conv_split_fwd(self, inputs, widths, spec)?;
        short_conv_split_fwd_by_copies(self, inputs, widths, spec)
    }

    fn short_conv_split_bwd(
        &self,
        dys: &[Tensor],
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        check_short_conv_split_bwd(self, dys, inputs, widths, spec)?;
        short_conv_split_bwd_by_copies(self, dys, inputs, widths, spec)
    }
}

fn conv<'a>(inputs: &ConvInputs<'a>, spec: &'a ConvSpec) -> Result<Conv<'a>> {
    Ok(Conv {
        x: matrix(inputs.x)?,
        weight: real(inputs.weight)?,
        bias: maybe_real(inputs.bias)?,
        before: maybe_matrix(inputs.before)?,
        taps: inputs.taps(),
        spec,
    })
}

/// Operands and options.
struct Conv<'a> {
    x: Matrix<'a>,
    weight: &'a [f64],
    bias: Option<&'a [f64]>,
    before: Option<Matrix<'a>>,
    taps: usize,
    spec: &'a ConvSpec,
}

/// Gradients of [`Conv::forward`].
struct ConvBackward {
    dx: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
}

impl<'a> Conv<'a> {
    /// The row `t - back` of a segment: its own, or one that came before it, or zeros.
    fn input(&self, n: usize, segment: &Segment, t: usize, back: usize) -> Option<&'a [f64]> {
        if back <= t {
            return Some(self.x.row(segment.q_start + t - back));
        }
        let rows = self.taps - 1;
        self.before.map(|before| before.row(n * rows + rows - (back - t)))
    }

    /// The convolution of one row, with its bias.
    fn filtered(&self, n: usize, segment: &Segment, t: usize) -> Vec<f64> {
        let mut y = self.bias.map_or(vec![0.0; self.x.cols], <[f64]>::to_vec);
        for back in 0..self.taps {
            let Some(x) = self.input(n, segment, t, back) else { continue };
            for c in 0..y.len() {
                y[c] += self.weight[c * self.taps + self.taps - 1 - back] * x[c];
            }
        }
        y
    }

    fn activated(&self, filtered: &[f64]) -> Vec<f64> {
        let act = |&x: &f64| self.spec.activation.map_or(x, |act| Act(act).value(x));
        filtered.iter().map(act).collect()
    }

    fn rows(&self) -> impl Iterator<Item = (usize, &'a Segment, usize)> + use<'a> {
        let segments = self.spec.segments.as_slice().iter().enumerate();
        segments.flat_map(|(n, segment)| (0..segment.q_len).map(move |t| (n, segment, t)))
    }

    fn forward(&self) -> Vec<f64> {
        let mut out = vec![0.0; self.x.data.len()];
        for (n, segment, t) in self.rows() {
            let mut y = self.activated(&self.filtered(n, segment, t));
            if let Some(norm) = self.spec.l2_norm {
                for head in y.chunks_mut(norm.width) {
                    let r = 1.0 / (dot(head, head) + f64::from(norm.eps)).sqrt();
                    head.iter_mut().for_each(|x| *x *= r);
                }
            }
            out[(segment.q_start + t) * self.x.cols..][..self.x.cols].copy_from_slice(&y);
        }
        out
    }

    fn backward(&self, dy: Matrix<'_>) -> ConvBackward {
        let width = self.x.cols;
        let mut grads = ConvBackward {
            dx: vec![0.0; self.x.data.len()],
            dweight: vec![0.0; self.weight.len()],
            dbias: vec![0.0; width],
        };
        for (n, segment, t) in self.rows() {
            let mut d = dy.row(segment.q_start + t).to_vec();
            let filtered = self.filtered(n, segment, t);
            if let Some(norm) = self.spec.l2_norm {
                let y = self.activated(&filtered);
                for (x, d) in y.chunks(norm.width).zip(d.chunks_mut(norm.width)) {
                    let r = 1.0 / (dot(x, x) + f64::from(norm.eps)).sqrt();
                    let along = dot(x, d) * r * r;
                    d.iter_mut().zip(x).for_each(|(d, x)| *d = r * (*d - along * x));
                }
            }
            if let Some(act) = self.spec.activation {
                d.iter_mut().zip(&filtered).for_each(|(d, &x)| *d *= Act(act).slope(x));
            }
            for c in 0..width {
                grads.dbias[c] += d[c];
            }
            for back in 0..self.taps {
                let Some(x) = self.input(n, segment, t, back) else { continue };
                for c in 0..width {
                    let tap = c * self.taps + self.taps - 1 - back;
                    grads.dweight[tap] += d[c] * x[c];
                    if back <= t {
                        let row = segment.q_start + t - back;
                        grads.dx[row * width + c] += d[c] * self.weight[tap];
                    }
                }
            }
        }
        grads
    }
}
