//! The thresholds of eviction for hand-set weights, against bounds from exact singular values.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_cache::bound::{Source, logit_bounds};
use fox_cache::{AttentionStateSpec, Cache, LayerState, PagePolicy, StateSpec};
use fox_tensor::cases::Rng;
use fox_tensor::{AttentionWeights, Device, Tensor};

/// Query heads, key heads, width of a head, width of the stream.
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const D: usize = 4;
const WIDTH: usize = 12;

const LOG_TOLERANCE: f64 = -7.0;
const MAX_CONTEXT: usize = 3000;

/// What [`fox_cache::bound`] adds for f32 arithmetic.
const MARGIN: f64 = 1.001;

/// The thresholds that a layer's state has in the end.
fn thresholds(q: Source<'_>, k: Source<'_>) -> Vec<f64> {
    let spec = AttentionStateSpec {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: D,
        gated: true,
        k_shift: false,
        v_shift: false,
        window: None,
        weights: AttentionWeights::Softmax,
        transition: 0,
        conv: None,
    };
    let bounds = logit_bounds(&spec, q, k).unwrap();
    let policy = PagePolicy::forgetting(&[bounds], LOG_TOLERANCE, MAX_CONTEXT);
    let specs = vec![StateSpec::Attention(spec)];
    let mut cache = Cache::paged(specs, &policy, &Device::naive()).unwrap();
    match &mut cache.layers_mut()[0] {
        LayerState::Paged(state) => state.thresholds().unwrap().to_vec(),
        _ => panic!("not paged"),
    }
}

fn threshold(bound: f64) -> f64 {
    -(2.0 * MARGIN * bound + (MAX_CONTEXT as f64).ln()) + LOG_TOLERANCE
}

fn tensor(x: &[f64], shape: &[usize]) -> Tensor {
    Device::naive().from_f64(x, shape).unwrap()
}

#[test]
fn from_the_weights_of_norms() {
    // The largest weight of every head is negative and no two are alike.
    let weights = |largest: &[f64]| -> Vec<f64> {
        largest.iter().flat_map(|&w| [0.25 * w, -w, 0.5 * w, -0.125 * w]).collect()
    };
    let (q_top, k_top) = ([0.5, 1.0, 2.0, 4.0], [3.0, 0.75]);
    let (q, k) = (weights(&q_top), weights(&k_top));
    let (q, k) = (tensor(&q, &[HEADS * D]), tensor(&k, &[KV_HEADS * D]));
    let got = thresholds(Source::Norm(&q), Source::Norm(&k));
    // Heads 0 and 1 read key head 0, heads 2 and 3 key head 1.
    for (h, kv) in [0, 0, 1, 1].into_iter().enumerate() {
        let want = threshold((D as f64).sqrt() * q_top[h] * k_top[kv]);
        assert!((got[h] - want).abs() < 1e-9, "head {h}: {} {want}", got[h]);
    }
}

#[test]
fn from_projections_with_biases_behind_a_norm() {
    let mut rng = Rng::new(3);
    // One strong direction per head, of individual strength, so that the Schatten norm is the largest
    // singular value to a part in 10,000.
    let mut projection = |strengths: &[f64]| -> Vec<f64> {
        let mut weight = Vec::new();
        for strength in strengths {
            let (rows, columns) = (rng.normals(D), rng.normals(WIDTH));
            for r in &rows {
                let noise = rng.normals(WIDTH);
                let row = columns.iter().zip(&noise);
                weight.extend(row.map(|(c, noise)| strength * (r * c + 0.1 * noise)));
            }
        }
        weight
    };
    let wq = projection(&[0.1, 0.3, 0.2, 0.5]);
    let wk = projection(&[0.05, 0.2]);
    let mut bias = |heads: usize| -> Vec<f64> {
        (0..heads * D).map(|i| (1 + i / D) as f64 * 0.5 * rng.normal()).collect()
    };
    let (bq, bk) = (bias(HEADS), bias(KV_HEADS));
    // Far from 1, the largest negative.
    let norm: Vec<f64> = (0..WIDTH).map(|i| [0.25, 1.5, -3.0, 0.75][i % 4]).collect();

    let (wq_tensor, wk_tensor) =
        (tensor(&wq, &[HEADS * D, WIDTH]), tensor(&wk, &[KV_HEADS * D, WIDTH]));
    let (bq_tensor, bk_tensor) = (tensor(&bq, &[HEADS * D]), tensor(&bk, &[KV_HEADS * D]));
    let norm_tensor = tensor(&norm, &[WIDTH]);
    let q = Source::Projection { weight: &wq_tensor, bias: Some(&bq_tensor), norm: &norm_tensor };
    let k = Source::Projection { weight: &wk_tensor, bias: Some(&bk_tensor), norm: &norm_tensor };
    let got = thresholds(q, k);

    // The largest norm that head `h` can have: sqrt(D) times a singular value, plus the bias.
    let largest = |weight: &[f64], bias: &[f64], h: usize| {
        let rows = weight[h * D * WIDTH..][..D * WIDTH].chunks(WIDTH);
        let a: Vec<Vec<f64>> =
            rows.map(|row| row.iter().zip(&norm).map(|(a, w)| a * w).collect()).collect();
        let bias = bias[h * D..][..D].iter().map(|x| x * x).sum::<f64>().sqrt();
        (WIDTH as f64).sqrt() * largest_singular_value(&a) + bias
    };
    for (h, kv) in [0, 0, 1, 1].into_iter().enumerate() {
        let u = largest(&wq, &bq, h) * largest(&wk, &bk, kv) / (D as f64).sqrt();
        let want = threshold(u);
        // Never above, and below by no more than the Schatten norm is generous.
        let excess = (want - got[h]) / u;
        assert!((-1e-6..1e-3).contains(&excess), "head {h}: {} {want}", got[h]);
    }
}

/// By one-sided Jacobi rotations in f64: rows are turned in pairs until all are orthogonal; their norms are
/// then the singular values.
fn largest_singular_value(a: &[Vec<f64>]) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let mut rows = a.to_vec();
    for _ in 0..30 {
        for i in 0..rows.len() {
            for j in i + 1..rows.len() {
                let (x, y) = (rows[i].clone(), rows[j].clone());
                let angle = 0.5 * (2.0 * dot(&x, &y)).atan2(dot(&x, &x) - dot(&y, &y));
                let (s, c) = angle.sin_cos();
                rows[i] = x.iter().zip(&y).map(|(x, y)| c * x + s * y).collect();
                rows[j] = x.iter().zip(&y).map(|(x, y)| c * y - s * x).collect();
            }
        }
    }
    for (i, x) in rows.iter().enumerate() {
        let off = rows[..i].iter().map(|y| dot(x, y).abs()).fold(0.0, f64::max);
        assert!(off < 1e-12 * dot(&rows[0], &rows[0]), "not orthogonal: {off:e}");
    }
    rows.iter().map(|row| dot(row, row).sqrt()).fold(0.0, f64::max)
}
