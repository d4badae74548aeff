//! How large a logit can get, whatever the tokens: the bound `U` that eviction rests on.
//!
//! `U` bounds `|q . k| / sqrt(d)` for every query and key that a layer can make. From it follows a bound on
//! the evicted fraction of the softmax, not on the output; see the eviction rule.
//!
//! With QK-norm, `|q| <= sqrt(d) max|w_q|` and the same for keys. Without, queries are `A x` with
//! `|x| <= sqrt(D)` for the normalised stream `x` and `A = W diag(w)`, `w` being the weights of the block's
//! norm; and `|A x| <= sqrt(D) s` for any `s` at least the largest singular value of `A`. Schatten norms are
//! such bounds: `s_p = (sum_i s_i^p)^(1/p)`, here with p = 16 from three squarings of `A A^T`. A shift mixes
//! two keys with weights that add up to 1, and a rotation changes no norm.
//!
//! # Rounding
//!
//! What is multiplied is not `q` and `k` but their roundings to the device's type of activations. With `u`
//! the unit roundoff of that type (bf16: `2^-8`), rounding a vector element by element makes its norm at
//! most `1 + u` times as large. So
//!
//! - with QK-norm, where f32 arithmetic ends in one rounding, `|q| <= (1 + u) sqrt(d) max|w_q|`;
//! - without, the stream, the projection and the prepared heads are rounded, and the weights and `A A^T`
//!   too: `|q| <= (1 + u)^3 (sqrt(D) s + |b|)` with
//!   `s = s_16 + u |G|_F / (2 s_16) + 2 u |A|_F`. `G` is the rounded `A A^T` with Schatten norm `s_16^2`:
//!   its rounding moves no eigenvalue by more than `u |G|_F` (to first order), and
//!   `sqrt(x^2 + e) <= x + e / (2 x)`. Rounding weights element by element changes `A` by a matrix of norm
//!   at most `u |A|_F`, once in the product with the stream and once in `A A^T`.
//!
//! Everything else, f32 arithmetic and terms of second order, is left to the factor `MARGIN` on `U`. For
//! activations in f32, `u` is counted as 0 and that factor covers it all.

use fox_tensor::{AttentionWeights, DType, Device, Result, Tensor};

use crate::spec::AttentionStateSpec;

/// Rounding of f32 arithmetic, generously.
const MARGIN: f64 = 1.001;

/// Squarings of `A A^T`.
const SQUARINGS: i32 = 3;

/// How a layer makes its queries or its keys.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// They are normalised head by head, with these weights: `[heads * d]`, or `[d]` for all heads.
    Norm(&'a Tensor),
    /// They are `W diag(w) x + b` for a normalised stream `x: [D]`.
    Projection {
        /// `W: [heads * d, D]`.
        weight: &'a Tensor,
        /// `b: [heads * d]`.
        bias: Option<&'a Tensor>,
        /// `w: [D]`.
        norm: &'a Tensor,
    },
}

/// Per query head, what no `|q . k| / sqrt(d)` of a layer exceeds; `None` for a layer without gates, which
/// forgets nothing.
pub fn logit_bounds(
    spec: &AttentionStateSpec,
    q: Source<'_>,
    k: Source<'_>,
) -> Result<Option<Vec<f64>>> {
    if !spec.gated {
        return Ok(None);
    }
    if spec.weights == AttentionWeights::StickBreaking {
        // No share of a stick exceeds 1, so that the decay bounds the weight by itself.
        return Ok(Some(vec![0.0; spec.heads]));
    }
    let kept = q.device().backend().caps().activation_type;
    bounds_in(kept, spec, q, k).map(Some)
}

/// The bounds of a softmax whose activations are rounded to `kept`.
fn bounds_in(
    kept: DType,
    spec: &AttentionStateSpec,
    q: Source<'_>,
    k: Source<'_>,
) -> Result<Vec<f64>> {
    let (d, u) = (spec.head_dim, roundoff(kept));
    let (q, k) = (q.norm_bounds(spec.heads, d, u)?, k.norm_bounds(spec.kv_heads, d, u)?);
    let group = spec.heads / spec.kv_heads;
    let bound = |h: usize| MARGIN * q[h] * k[h / group] / (d as f64).sqrt();
    Ok((0..spec.heads).map(bound).collect())
}

/// The unit roundoff of activations of this type, where [`MARGIN`] does not cover it.
fn roundoff(kept: DType) -> f64 {
    match kept {
        DType::Bf16 => 2f64.powi(-8),
        DType::F32 | DType::I32 => 0.0,
    }
}

impl Source<'_> {
    fn device(&self) -> &Device {
        match self {
            Source::Norm(weights) => weights.device(),
            Source::Projection { weight, .. } => weight.device(),
        }
    }

    /// Per head of width `d`, what no norm exceeds with activations of unit roundoff `u`.
    fn norm_bounds(self, heads: usize, d: usize, u: f64) -> Result<Vec<f64>> {
        match self {
            Source::Norm(weights) => {
                let weights = weights.to_f64()?;
                let largest = |h: usize| {
                    let own =
                        if weights.len() == d { &weights[..] } else { &weights[h * d..][..d] };
                    own.iter().fold(0.0f64, |max, w| max.max(w.abs()))
                };
                Ok((0..heads).map(|h| (1.0 + u) * (d as f64).sqrt() * largest(h)).collect())
            }
            Source::Projection { weight, bias, norm } => {
                let bounds = projection_bounds(weight, bias, norm, (heads, d), u)?;
                Ok(bounds.into_iter().map(|bound| (1.0 + u).powi(3) * bound).collect())
            }
        }
    }
}

fn projection_bounds(
    weight: &Tensor,
    bias: Option<&Tensor>,
    norm: &Tensor,
    (heads, d): (usize, usize),
    u: f64,
) -> Result<Vec<f64>> {
    // On the host as a whole: it may be packed, and the bound is for what is computed with.
    let values = weight.to_f32()?;
    let (width, scale) = (weight.cols(), norm.to_f32()?);
    let bias = bias.map(Tensor::to_f64).transpose()?;
    let mut bounds = Vec::with_capacity(heads);
    for h in 0..heads {
        let mut a = values[h * d * width..][..d * width].to_vec();
        for row in a.chunks_mut(width) {
            row.iter_mut().zip(&scale).for_each(|(a, w)| *a *= w);
        }
        let rounded = 2.0 * u * frobenius(a.iter().map(|&x| f64::from(x)));
        let a = weight.device().from_f32(&a, [d, width])?;
        let shift = bias.as_ref().map_or(0.0, |b| frobenius(b[h * d..][..d].iter().copied()));
        bounds.push((width as f64).sqrt() * (largest_singular_value(&a, u)? + rounded) + shift);
    }
    Ok(bounds)
}

fn frobenius(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// At least the largest singular value of `a: [d, D]`: its Schatten norm of order `2^(SQUARINGS + 1)`, and
/// what rounding `a a^T` with unit roundoff `u` may have taken from it.
fn largest_singular_value(a: &Tensor, u: f64) -> Result<f64> {
    let n = a.rows();
    let mut gram = a.device().backend().linear_fwd(a, a, None)?.to_f64()?;
    let gram_norm = frobenius(gram.iter().copied());
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
    let schatten = ((trace(&gram).ln() + log_scale) / order).exp();
    Ok(schatten + u * gram_norm / (2.0 * schatten))
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
    use fox_tensor::cases::Rng;

    #[test]
    fn bound_is_close_to_the_largest_singular_value() {
        let device = Device::naive();
        // Singular values 3, 2, 1 in rotated coordinates of a plane and on an axis.
        let (c, s) = (0.6, 0.8);
        let a = [3.0 * c, 3.0 * s, 0.0, -2.0 * s, 2.0 * c, 0.0, 0.0, 0.0, 1.0];
        let bound = largest_singular_value(&device.from_f64(&a, [3, 3]).unwrap(), 0.0).unwrap();
        let exact = (3f64.powi(16) + 2f64.powi(16) + 1.0).powf(1.0 / 16.0);
        assert!((bound - exact).abs() < 1e-9, "{bound} {exact}");
        assert_eq!(
            largest_singular_value(&device.zeros([3, 3], DType::F32).unwrap(), 0.0).unwrap(),
            0.0
        );
        let mut rng = Rng::new(5);
        let (rows, cols) = (16, 40);
        let a = rng.normals(rows * cols);
        let bound =
            largest_singular_value(&device.from_f64(&a, [rows, cols]).unwrap(), 0.0).unwrap();
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

    fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionStateSpec {
        AttentionStateSpec {
            heads,
            kv_heads,
            head_dim,
            gated: true,
            k_shift: false,
            v_shift: false,
            window: None,
            weights: AttentionWeights::Softmax,
            transition: 0,
            conv: None,
        }
    }

    #[test]
    fn norm_bound_is_a_product_of_weights() {
        let device = Device::naive();
        let tensor = |x: &[f64]| device.from_f64(x, [x.len()]).unwrap();
        // Four query heads of width 2 on two key heads.
        let q = tensor(&[1.0, -3.0, 0.5, 2.0, 1.0, 1.0, 0.0, -0.5]);
        let (own, shared) = (tensor(&[-1.5, 1.0, 0.25, 4.0]), tensor(&[-1.5, 1.0]));
        let spec = spec(4, 2, 2);
        let bounds = |spec: &AttentionStateSpec, k: &Tensor| {
            logit_bounds(spec, Source::Norm(&q), Source::Norm(k)).unwrap()
        };
        // sqrt(2) 3 * sqrt(2) 1.5 / sqrt(2) for the first; the last two read the second key head.
        for (k, want) in [(&own, [4.5, 3.0, 4.0, 2.0]), (&shared, [4.5, 3.0, 1.5, 0.75])] {
            let want = want.map(|x| 1.001 * 2f64.sqrt() * x);
            let got = bounds(&spec, k).unwrap();
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-12), "{got:?} {want:?}");
        }
        let sticks =
            AttentionStateSpec { weights: AttentionWeights::StickBreaking, ..spec.clone() };
        assert_eq!(bounds(&sticks, &own), Some(vec![0.0; 4]));
        assert_eq!(bounds(&AttentionStateSpec { gated: false, ..spec }, &own), None);
    }

    /// Largest logits that were seen, and their bounds, of two query heads on one key head, for random
    /// projections, streams and weights of the norm times `scale`, and biases of the queries times `bias`.
    fn projected(scale: f64, bias: f64) -> ([f64; 2], Vec<f64>) {
        let device = Device::naive();
        let mut rng = Rng::new(11);
        let (d, width) = (8, 24);
        let (w, b) = (rng.normals(3 * d * width), rng.normals(2 * d));
        let b: Vec<f64> = b.iter().map(|x| bias * x).collect();
        let norm: Vec<f64> = rng.normals(width).iter().map(|x| scale * (1.0 + 0.5 * x)).collect();
        let (queries, keys) = w.split_at(2 * d * width);
        let tensor = |x: &[f64], rows: usize| device.from_f64(x, [rows, width]).unwrap();
        let (wq, wk) = (tensor(queries, 2 * d), tensor(keys, d));
        let vector = |x: &[f64]| device.from_f64(x, [x.len()]).unwrap();
        let (norms, biases) = (vector(&norm), vector(&b));
        let q = Source::Projection { weight: &wq, bias: Some(&biases), norm: &norms };
        let k = Source::Projection { weight: &wk, bias: None, norm: &norms };
        let bounds = logit_bounds(&spec(2, 1, d), q, k).unwrap().unwrap();
        let project = |rows: &[f64], rng: &mut Rng| -> Vec<f64> {
            let x = rng.normals(width);
            let rms = (x.iter().map(|x| x * x).sum::<f64>() / width as f64).sqrt();
            let x: Vec<f64> = x.iter().zip(&norm).map(|(x, w)| x / rms * w).collect();
            rows.chunks(width).map(|r| r.iter().zip(&x).map(|(a, b)| a * b).sum()).collect()
        };
        let mut largest = [0.0f64; 2];
        for _ in 0..500 {
            let (q, k) = (project(queries, &mut rng), project(keys, &mut rng));
            for h in 0..2 {
                let q = q[h * d..][..d].iter().zip(&b[h * d..]).map(|(q, b)| q + b);
                let logit = q.zip(&k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt();
                largest[h] = largest[h].max(logit.abs());
            }
        }
        (largest, bounds)
    }

    #[test]
    fn no_logit_of_a_projection_exceeds_its_bound() {
        for (scale, bias) in [(1.0, 0.0), (0.01, 10.0), (30.0, 1.0)] {
            let (largest, bounds) = projected(scale, bias);
            for (largest, bound) in largest.iter().zip(&bounds) {
                assert!(largest < bound && *bound < 20.0 * largest, "{largest} {bound}");
            }
        }
    }

    #[test]
    fn norm_weights_and_bias_enter_the_bound() {
        let ((_, plain), (_, wide)) = (projected(1.0, 0.0), projected(3.0, 0.0));
        for (plain, wide) in plain.iter().zip(wide) {
            assert!((wide / plain - 9.0).abs() < 1e-5, "{plain} {wide}");
        }
        // The bias's part of the bound is linear in it, and is all that is left under a small norm.
        let part = |bias: f64| projected(1.0, bias).1[1] - plain[1];
        assert!(part(1.0) > 0.01 * plain[1]);
        assert!((part(2.0) / part(1.0) - 2.0).abs() < 1e-5);
    }

    /// To the nearest bf16, ties to even.
    fn bf16(x: f64) -> f64 {
        let bits = (x as f32).to_bits();
        f64::from(f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000))
    }

    /// Just above the middle of 1 and the next bf16, to which it is rounded.
    const ROUNDED_UP: f64 = 1.0 + 1.0 / 256.0 + 1.0 / 8192.0;

    #[test]
    fn norm_bound_covers_rounding() {
        let (d, device) = (8, Device::naive());
        let w = device.full([d], ROUNDED_UP as f32).unwrap();
        let bound =
            |kept| bounds_in(kept, &spec(1, 1, d), Source::Norm(&w), Source::Norm(&w)).unwrap()[0];
        // A stream of ones has a root mean square of 1, so that queries and keys are the weights.
        let x = bf16(ROUNDED_UP);
        let logit = d as f64 * x * x / (d as f64).sqrt();
        assert!(logit > 1.006 * bound(DType::F32), "too weak a case: {logit}");
        let allowed = bound(DType::Bf16);
        assert!(logit < allowed && allowed < 1.002 * logit, "{logit} {allowed}");
    }

    #[test]
    fn projection_bound_covers_rounding() {
        let (d, device) = (8, Device::naive());
        // Ones through a norm and rows of one direction, for which the Schatten norm is exact.
        for width in (8..200).step_by(8) {
            let weight = device.full([d, width], ROUNDED_UP as f32).unwrap();
            let norm = device.full([width], ROUNDED_UP as f32).unwrap();
            let source = Source::Projection { weight: &weight, bias: None, norm: &norm };
            let bound = |kept| bounds_in(kept, &spec(1, 1, d), source, source).unwrap()[0];
            let element = bf16(width as f64 * bf16(ROUNDED_UP) * bf16(ROUNDED_UP));
            let logit = d as f64 * element * element / (d as f64).sqrt();
            assert!(logit > 1.004 * bound(DType::F32), "too weak a case: {width}");
            let allowed = bound(DType::Bf16);
            assert!(logit < allowed, "{width}: {logit} {allowed}");
            // For one direction the norms of `A` and of `A A^T` are the singular value and its square.
            let u = 2f64.powi(-8);
            let factor = ((1.0 + u).powi(3) * (1.0 + 0.5 * u + 2.0 * u)).powi(2);
            let want = factor * bound(DType::F32);
            assert!((allowed - want).abs() < 1e-6 * want, "{width}: {allowed} {want}");
        }
    }

    #[test]
    fn rounding_weights_and_their_products_is_counted() {
        // Singular values of the rounded weights against the bound from the weights before rounding.
        let (rows, cols, u) = (16, 40, 2f64.powi(-8));
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let device = Device::naive();
            let a = rng.normals(rows * cols);
            let norm = device.full([cols], 1.0).unwrap();
            let exact = device.from_f64(&a, [rows, cols]).unwrap();
            let rounded: Vec<f64> = a.iter().map(|&x| bf16(x)).collect();
            let rounded = device.from_f64(&rounded, [rows, cols]).unwrap();
            let of =
                |w: &Tensor, u: f64| projection_bounds(w, None, &norm, (1, rows), u).unwrap()[0];
            assert!(of(&rounded, 0.0) < of(&exact, u));
            let schatten = of(&exact, 0.0) / (cols as f64).sqrt();
            let (a_norm, gram) = (frobenius(a.iter().copied()), exact.device().backend());
            let gram = gram.linear_fwd(&exact, &exact, None).unwrap().to_f64().unwrap();
            let want =
                schatten + u * frobenius(gram.into_iter()) / (2.0 * schatten) + 2.0 * u * a_norm;
            let got = of(&exact, u) / (cols as f64).sqrt();
            assert!((got - want).abs() < 1e-6 * want, "{got} {want}");
        }
    }
}
