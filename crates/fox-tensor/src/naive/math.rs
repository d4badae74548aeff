//! Small functions that several ops share.

use crate::Activation;

/// Inner product.
#[inline]
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += a x`.
#[inline]
pub(crate) fn axpy(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// `ln sum exp(x)`; `-inf` for no entries.
pub(crate) fn logsumexp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// `1 / sqrt(mean(x^2) + eps)`.
pub(crate) fn rstd(x: &[f64], eps: f64) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt()
}

/// Gradient of `x r w` where `r = rstd(x)`, for `g = w dy`: `dx = r (g - xh mean(xh g))`, `xh = x r`.
pub(crate) fn rms_backward(x: &[f64], r: f64, g: &[f64]) -> Vec<f64> {
    let mean = x.iter().zip(g).map(|(x, g)| x * r * g).sum::<f64>() / x.len() as f64;
    x.iter().zip(g).map(|(x, g)| r * (g - x * r * mean)).collect()
}

/// `1 / (1 + e^-x)`, without overflow.
pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// `ln sigmoid(x) = -softplus(-x)`, without overflow and exact for large `x`.
pub(crate) fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// An activation with its derivative.
#[derive(Clone, Copy)]
pub(crate) struct Act(pub Activation);

impl Act {
    pub(crate) fn value(self, x: f64) -> f64 {
        match self.0 {
            Activation::Sigmoid => sigmoid(x),
            Activation::Silu => x * sigmoid(x),
        }
    }

    pub(crate) fn slope(self, x: f64) -> f64 {
        let s = sigmoid(x);
        match self.0 {
            Activation::Sigmoid => s * (1.0 - s),
            Activation::Silu => s + x * s * (1.0 - s),
        }
    }
}
