//! Newton-Schulz steps against a singular value decomposition in f64.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::cases::Rng;
use fox_tensor::{Device, MatrixStack, NEWTON_SCHULZ, StackedMatrix};

const STEPS: usize = 5;

/// A matrix as its columns.
type Columns = Vec<Vec<f64>>;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `[rows, cols]`, row by row, as columns; with `transpose` its rows.
fn columns(m: &[f64], rows: usize, cols: usize, transpose: bool) -> Columns {
    match transpose {
        true => m.chunks(cols).map(<[f64]>::to_vec).collect(),
        false => (0..cols).map(|c| (0..rows).map(|r| m[r * cols + c]).collect()).collect(),
    }
}

/// One-sided Jacobi: turns pairs of columns until all are orthogonal. Returns singular values with their left
/// and right vectors; left ones of values that are 0 are 0.
fn svd(m: &[f64], rows: usize, cols: usize) -> Vec<(f64, Vec<f64>, Vec<f64>)> {
    let wide = rows < cols;
    let mut a = columns(m, rows, cols, wide);
    let n = a.len();
    let unit = |i: usize| (0..n).map(|j| f64::from(u8::from(i == j))).collect();
    let mut v: Columns = (0..n).map(unit).collect();
    for _ in 0..60 {
        let mut turned = false;
        for i in 0..n {
            for j in i + 1..n {
                let (aa, bb, ab) = (dot(&a[i], &a[i]), dot(&a[j], &a[j]), dot(&a[i], &a[j]));
                if ab.abs() <= 1e-15 * (aa * bb).sqrt() {
                    continue;
                }
                turned = true;
                let zeta = (bb - aa) / (2.0 * ab);
                let t = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                let c = 1.0 / (1.0 + t * t).sqrt();
                for x in [&mut a, &mut v] {
                    let (left, right) = x.split_at_mut(j);
                    for (x, y) in left[i].iter_mut().zip(&mut right[0]) {
                        (*x, *y) = (c * (*x - t * *y), c * (t * *x + *y));
                    }
                }
            }
        }
        if !turned {
            break;
        }
    }
    let triple = |(a, v): (Vec<f64>, Vec<f64>)| {
        let s = dot(&a, &a).sqrt();
        let u = a.iter().map(|x| if s > 0.0 { x / s } else { 0.0 }).collect();
        if wide { (s, v, u) } else { (s, u, v) }
    };
    a.into_iter().zip(v).map(triple).collect()
}

/// Where the steps put a singular value that is this part of the Frobenius norm.
fn moved(s: f64) -> f64 {
    let [a, b, c] = NEWTON_SCHULZ;
    (0..STEPS).fold(s, |s, _| a * s + b * s.powi(3) + c * s.powi(5))
}

fn orthogonalized(m: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let device = Device::naive();
    let mut x = device.from_f64(m, [rows, cols]).unwrap();
    let parts = vec![StackedMatrix { rows, factor: 1.0 }];
    device.backend().orthogonalize(&mut [MatrixStack::new(&mut x, parts).unwrap()], STEPS).unwrap();
    x.to_f64().unwrap()
}

/// `U f(S) V^T`.
fn from_svd(parts: &[(f64, Vec<f64>, Vec<f64>)], f: impl Fn(f64) -> f64) -> Vec<f64> {
    let (rows, cols) = (parts[0].1.len(), parts[0].2.len());
    let mut m = vec![0.0; rows * cols];
    for (s, u, v) in parts {
        for (row, u) in m.chunks_mut(cols).zip(u) {
            row.iter_mut().zip(v).for_each(|(m, v)| *m += f(*s) * u * v);
        }
    }
    m
}

fn normal(seed: u64, rows: usize, cols: usize) -> Vec<f64> {
    Rng::new(seed).normals(rows * cols)
}

/// Matrices of many kinds: name, values, shape.
fn matrices() -> Vec<(&'static str, Vec<f64>, usize, usize)> {
    let mut all = Vec::new();
    for (rows, cols) in [(8, 8), (33, 33), (24, 60), (60, 24), (1, 20), (20, 1), (96, 80)] {
        all.push(("random", normal(1, rows, cols), rows, cols));
        for (name, scale) in [("tiny", 1e-20), ("huge", 1e20)] {
            let scaled = normal(2, rows, cols).iter().map(|x| scale * x).collect();
            all.push((name, scaled, rows, cols));
        }
        // Columns over six orders of magnitude: singular values as well.
        let mut skewed = normal(3, rows, cols);
        for row in skewed.chunks_mut(cols) {
            for (c, x) in row.iter_mut().enumerate() {
                *x *= 10f64.powf(-6.0 * c as f64 / cols as f64);
            }
        }
        all.push(("skewed", skewed, rows, cols));
        let rank = 3.min(rows).min(cols);
        let (left, right) = (normal(4, rows, rank), normal(5, rank, cols));
        let entry = |r: usize, c: usize| -> f64 {
            (0..rank).map(|k| left[r * rank + k] * right[k * cols + c]).sum()
        };
        let low = (0..rows * cols).map(|i| entry(i / cols, i % cols)).collect();
        all.push(("of rank 3", low, rows, cols));
    }
    all
}

#[test]
fn test_svd_is_valid() {
    for (name, m, rows, cols) in matrices() {
        let parts = svd(&m, rows, cols);
        let norm = dot(&m, &m).sqrt();
        let again = from_svd(&parts, |s| s);
        let error = m.iter().zip(&again).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt() / norm;
        assert!(error < 1e-13, "{name} {rows}x{cols}: {error:.1e}");
        for (i, (s, u, v)) in parts.iter().enumerate() {
            for (t, w, x) in parts[..i].iter().filter(|(t, ..)| s.min(*t) > 1e-12 * norm) {
                assert!(dot(u, w).abs() < 1e-9 && dot(v, x).abs() < 1e-9, "{name} {s} {t}");
            }
        }
    }
}

/// Singular vectors stay, singular values go where the polynomial puts them.
#[test]
fn steps_preserve_singular_vectors() {
    for (name, m, rows, cols) in matrices() {
        let parts = svd(&m, rows, cols);
        let norm = dot(&m, &m).sqrt();
        let want = from_svd(&parts, |s| moved(s / norm));
        let got = orthogonalized(&m, rows, cols);
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // A step makes of an error at most 3.4445 times as much; rounding adds some eps per term of a sum.
        let growth = NEWTON_SCHULZ[0].powi(STEPS as i32);
        let tolerance = growth * rows.max(cols) as f64 * f64::EPSILON;
        assert!(worst < tolerance, "{name} {rows}x{cols}: {worst:.1e}, not {tolerance:.1e}");
    }
}

#[test]
fn singular_values_are_near_one() {
    let mut seen = [0; 3];
    for (name, m, rows, cols) in matrices() {
        let norm = dot(&m, &m).sqrt();
        let got = orthogonalized(&m, rows, cols);
        for (s, u, v) in &svd(&m, rows, cols) {
            let moved: f64 = u.iter().zip(got.chunks(cols)).map(|(u, row)| u * dot(row, v)).sum();
            let (share, kind) = (s / norm, format!("{name} {rows}x{cols}: {s} to {moved}"));
            if share >= 0.01 {
                assert!((0.68..1.14).contains(&moved), "{kind}");
                seen[0] += 1;
            } else if share >= 0.002 {
                assert!((0.68..1.21).contains(&moved), "{kind}");
                seen[1] += 1;
            } else {
                // Too small to be raised in five steps, and never by more than 3.4445 a step.
                let most = share * NEWTON_SCHULZ[0].powi(STEPS as i32);
                assert!(moved > -1e-9 && moved < most + 1e-9, "{kind}");
                seen[2] += 1;
            }
        }
    }
    assert!(seen[0] > 500 && seen[1] > 5 && seen[2] > 100, "{seen:?}");
}

#[test]
fn stacked_matrices_are_independent() {
    let (a, b) = (normal(7, 12, 20), normal(8, 30, 20));
    let device = Device::naive();
    let mut x = device.from_f64(&[a.clone(), b.clone()].concat(), [42, 20]).unwrap();
    let parts =
        vec![StackedMatrix { rows: 12, factor: 2.0 }, StackedMatrix { rows: 30, factor: -0.5 }];
    device.backend().orthogonalize(&mut [MatrixStack::new(&mut x, parts).unwrap()], STEPS).unwrap();
    let first = orthogonalized(&a, 12, 20).into_iter().map(|x| 2.0 * x);
    let second = orthogonalized(&b, 30, 20).into_iter().map(|x| -0.5 * x);
    assert_eq!(x.to_f64().unwrap(), first.chain(second).collect::<Vec<_>>());
}

#[test]
fn rejects_invalid_stacks() {
    let device = Device::naive();
    let mut x = device.from_f64(&[1.0; 12], [4, 3]).unwrap();
    let matrix = |rows| StackedMatrix { rows, factor: 1.0 };
    let error = MatrixStack::new(&mut x, vec![matrix(1), matrix(2)]).unwrap_err().to_string();
    assert!(error.contains("matrices of 3 rows") && error.contains("[4, 3]"), "{error}");
    let mut vector = device.from_f64(&[1.0; 4], [4]).unwrap();
    assert!(MatrixStack::new(&mut vector, vec![matrix(4)]).is_err());
}
