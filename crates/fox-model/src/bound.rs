//! How large a logit can get, whatever the tokens: what makes forgetting provable.
//!
//! With QK-norm, `|q| <= sqrt(d) max|w_q|` and likewise for keys. Without, queries are `A x` with
//! `|x| <= sqrt(D)` for the normalised stream `x` and `A = W diag(w)`, `w` being the weights of the block's
//! norm; and `|A x| <= sqrt(D) s` for any `s` at least the largest singular value of `A`. Schatten norms are
//! such bounds: `s_p = (sum_i s_i^p)^(1/p)`, here with p = 16 from three squarings of `A A^T`. A shift mixes
//! two keys with weights that add up to 1, and a rotation changes no norm.

use std::sync::Arc;

use fox_tensor::{AttentionWeights, PageMeter, ParamId, Tensor};

use crate::config::ForgetGate;
use crate::mixers::{Forgetting, Projection};
use crate::params::Parameters;
use crate::{Model, PagePolicy, Result};

/// Rounding of the real computation, generously.
const MARGIN: f64 = 1.001;

/// Squarings of `A A^T`.
const SQUARINGS: i32 = 3;

impl Model {
    /// What paged caches of this model drop: nothing, or what has at most a share of `e^log_tolerance` of
    /// any later softmax over at most `max_context` keys.
    pub fn page_policy(
        &self,
        log_tolerance: Option<f32>,
        max_context: usize,
    ) -> Result<PagePolicy> {
        let meter = PageMeter::default();
        let Some(log_tolerance) = log_tolerance else {
            return Ok(PagePolicy { thresholds: Vec::new(), meter });
        };
        let keys = (max_context.max(1) as f64).ln();
        let mut thresholds: Vec<Arc<[f64]>> = Vec::new();
        for (mixer, norm) in self.attention_layers() {
            let bounds = mixer.logit_bounds(self.params(), norm)?;
            let threshold = |bound: &f64| -(2.0 * bound + keys) + f64::from(log_tolerance);
            thresholds.push(bounds.iter().map(threshold).collect());
        }
        Ok(PagePolicy { thresholds, meter })
    }
}

impl Forgetting {
    /// Per query head, what no `|q . k| / sqrt(d)` exceeds, where the weights depend on it. `norm` are the weights of the block's norm.
    fn logit_bounds(&self, params: &Parameters, norm: ParamId) -> Result<Vec<f64>> {
        let options = self.options();
        if options.gate == ForgetGate::None {
            // Nothing is ever forgotten, so nobody asks.
            return Ok(vec![f64::INFINITY; options.heads]);
        }
        if options.weights == AttentionWeights::StickBreaking {
            // No share of a stick exceeds 1, so that the decay bounds the weight by itself.
            return Ok(vec![0.0; options.heads]);
        }
        let d = self.head_dim();
        let (q, k) = self.query_and_key();
        let (q, k) = (norm_bounds(q, d, params, norm)?, norm_bounds(k, d, params, norm)?);
        let group = options.heads / options.kv_heads;
        let bound = |h: usize| MARGIN * q[h] * k[h / group] / (d as f64).sqrt();
        Ok((0..options.heads).map(bound).collect())
    }
}

/// Per head, what no norm of a query or key exceeds.
fn norm_bounds(
    p: &Projection,
    d: usize,
    params: &Parameters,
    block_norm: ParamId,
) -> Result<Vec<f64>> {
    if let Some(id) = p.norm {
        let weights = params.value(id).to_f64()?;
        let largest = |h: usize| {
            let own = if weights.len() == d { &weights[..] } else { &weights[h * d..][..d] };
            own.iter().fold(0.0f64, |max, w| max.max(w.abs()))
        };
        return Ok((0..p.heads).map(|h| (d as f64).sqrt() * largest(h)).collect());
    }
    let weight = params.value(p.weight);
    // On the host as a whole: it may be packed, and the bound is for what is computed with.
    let values = weight.to_f32()?;
    let (width, scale) = (weight.cols(), params.value(block_norm).to_f32()?);
    let bias = p.bias.map(|id| params.value(id).to_f64()).transpose()?;
    let mut bounds = Vec::with_capacity(p.heads);
    for h in 0..p.heads {
        let mut a = values[h * d * width..][..d * width].to_vec();
        for row in a.chunks_mut(width) {
            row.iter_mut().zip(&scale).for_each(|(a, w)| *a *= w);
        }
        let a = weight.device().from_f32(&a, [d, width])?;
        let shift = bias
            .as_ref()
            .map_or(0.0, |b| b[h * d..][..d].iter().map(|x| x * x).sum::<f64>().sqrt());
        bounds.push((width as f64).sqrt() * largest_singular_value(&a)? + shift);
    }
    Ok(bounds)
}

/// At least the largest singular value of `a: [d, D]`: its Schatten norm of order `2^(SQUARINGS + 1)`.
fn largest_singular_value(a: &Tensor) -> Result<f64> {
    let n = a.rows();
    let mut gram = a.device().backend().linear_fwd(a, a, None)?.to_f64()?;
    let trace = |g: &[f64]| (0..n).map(|i| g[i * n + i]).sum::<f64>();
    // The logarithm of what was divided out, so that powers neither overflow nor vanish.
    let mut log_scale = 0.0;
    for _ in 0..SQUARINGS {
        let scale = trace(&gram);
        if scale <= 0.0 {
            return Ok(0.0);
        }
        gram.iter_mut().for_each(|x| *x /= scale);
        log_scale = 2.0 * (log_scale + scale.ln());
        gram = square(&gram, n);
    }
    let order = 2f64.powi(SQUARINGS + 1);
    Ok(((trace(&gram).ln() + log_scale) / order).exp())
}

/// `g g` for a symmetric `g: [n, n]`.
fn square(g: &[f64], n: usize) -> Vec<f64> {
    let row = |i: usize| &g[i * n..][..n];
    let dot = |i: usize, j: usize| row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum::<f64>();
    (0..n * n).map(|at| dot(at / n, at % n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_tensor::Device;
    use fox_tensor::cases::Rng;

    #[test]
    fn the_bound_is_above_the_largest_singular_value_and_near_it() {
        let device = Device::naive();
        // Singular values 3, 2, 1 in rotated coordinates of a plane and on an axis.
        let (c, s) = (0.6, 0.8);
        let a = [3.0 * c, 3.0 * s, 0.0, -2.0 * s, 2.0 * c, 0.0, 0.0, 0.0, 1.0];
        let bound = largest_singular_value(&device.from_f64(&a, [3, 3]).unwrap()).unwrap();
        let exact = (3f64.powi(16) + 2f64.powi(16) + 1.0).powf(1.0 / 16.0);
        assert!((bound - exact).abs() < 1e-9, "{bound} {exact}");
        assert_eq!(
            largest_singular_value(&device.zeros([3, 3], fox_tensor::DType::F32).unwrap()).unwrap(),
            0.0
        );
        let mut rng = Rng::new(5);
        let (rows, cols) = (16, 40);
        let a = rng.normals(rows * cols);
        let bound = largest_singular_value(&device.from_f64(&a, [rows, cols]).unwrap()).unwrap();
        let mut worst = 0.0f64;
        for _ in 0..200 {
            let x = rng.normals(cols);
            let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
            let y: Vec<f64> =
                a.chunks(cols).map(|r| r.iter().zip(&x).map(|(a, b)| a * b).sum()).collect();
            worst = worst.max(norm(&y) / norm(&x));
        }
        assert!(worst < bound && bound < 4.0 * worst, "{worst} {bound}");
    }
}
