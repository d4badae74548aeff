//! Loops over slices of equal length, with the ragged end handled once.

use super::Simd;

/// Widest vector of any instruction set.
const MAX_LANES: usize = 16;

/// The values from `at` on; lanes past the end are zero.
#[inline(always)]
fn load<S: Simd>(s: S, x: &[f32], at: usize) -> S::V {
    if at + S::LANES <= x.len() {
        // SAFETY: just checked.
        return unsafe { s.load(x.as_ptr().add(at)) };
    }
    let mut lanes = [0.0; MAX_LANES];
    lanes[..x.len() - at].copy_from_slice(&x[at..]);
    // SAFETY: `lanes` holds at least `LANES` values.
    unsafe { s.load(lanes.as_ptr()) }
}

#[inline(always)]
fn load_all<S: Simd, const N: usize>(s: S, x: &[&[f32]; N], at: usize) -> [S::V; N] {
    let mut lanes = [s.splat(0.0); N];
    for (lane, x) in lanes.iter_mut().zip(x) {
        *lane = load(s, x, at);
    }
    lanes
}

/// Writes from `at` on, as many lanes as there is room for.
#[inline(always)]
fn store<S: Simd>(s: S, y: &mut [f32], at: usize, v: S::V) {
    if at + S::LANES <= y.len() {
        // SAFETY: just checked.
        return unsafe { s.store(y.as_mut_ptr().add(at), v) };
    }
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: `lanes` holds at least `LANES` values.
    unsafe { s.store(lanes.as_mut_ptr(), v) };
    let rest = y.len() - at;
    y[at..].copy_from_slice(&lanes[..rest]);
}

/// `y[i] = f(x[0][i], x[1][i], ...)`.
// `f` is called at one place only, here and below, so that it is inlined: otherwise it loses the target features of the
// kernel around it.
#[inline(always)]
pub fn map<S: Simd, const N: usize>(
    s: S,
    x: [&[f32]; N],
    y: &mut [f32],
    f: impl Fn([S::V; N]) -> S::V,
) {
    assert!(x.iter().all(|x| x.len() == y.len()));
    for i in (0..y.len()).step_by(S::LANES) {
        let v = f(load_all(s, &x, i));
        store(s, y, i, v);
    }
}

/// `(y[i], z[i]) = f(x[0][i], x[1][i], ...)`.
#[inline(always)]
pub fn map_two<S: Simd, const N: usize>(
    s: S,
    x: [&[f32]; N],
    y: &mut [f32],
    z: &mut [f32],
    f: impl Fn([S::V; N]) -> (S::V, S::V),
) {
    assert!(z.len() == y.len() && x.iter().all(|x| x.len() == y.len()));
    for i in (0..y.len()).step_by(S::LANES) {
        let (v, w) = f(load_all(s, &x, i));
        store(s, y, i, v);
        store(s, z, i, w);
    }
}

/// `y[i] = f(x[0][i], x[1][i], ..., y[i])`.
#[inline(always)]
pub fn update<S: Simd, const N: usize>(
    s: S,
    x: [&[f32]; N],
    y: &mut [f32],
    f: impl Fn([S::V; N], S::V) -> S::V,
) {
    assert!(x.iter().all(|x| x.len() == y.len()));
    for i in (0..y.len()).step_by(S::LANES) {
        let v = f(load_all(s, &x, i), load(s, y, i));
        store(s, y, i, v);
    }
}

/// `y[i] += a * x[i]`.
#[inline(always)]
pub fn scale_add<S: Simd>(s: S, a: f32, x: &[f32], y: &mut [f32]) {
    let a = s.splat(a);
    update(s, [x], y, |[x], y| s.mul_add(a, x, y));
}

/// `sum_i f(x[0][i], x[1][i], ...)`, where `f(values, sum)` adds to `sum` and adds nothing for zeros.
#[inline(always)]
pub fn sum<S: Simd, const N: usize>(
    s: S,
    x: [&[f32]; N],
    f: impl Fn([S::V; N], S::V) -> S::V,
) -> f32 {
    let len = x.first().map_or(0, |x| x.len());
    assert!(x.iter().all(|x| x.len() == len));
    // Four chains hide the latency of the multiply-add.
    let mut sums = [s.splat(0.0); 4];
    for i in (0..len).step_by(4 * S::LANES) {
        for (n, sum) in sums.iter_mut().enumerate() {
            let at = i + n * S::LANES;
            if at < len {
                *sum = f(load_all(s, &x, at), *sum);
            }
        }
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

/// `sum_i a[i] * b[i]`.
#[inline(always)]
pub fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    sum(s, [a, b], |[a, b], sum| s.mul_add(a, b, sum))
}

#[cfg(test)]
mod tests {
    use super::super::{Level, simd_fn};
    use super::*;

    simd_fn! {
        fn all<'k, S>(s, x: &'k [f32], y: &'k mut [f32]) -> f32 {
            map(s, [x, x], y, |[a, b]| s.mul(a, b));
            scale_add(s, 2.0, x, y);
            dot(s, x, y)
        }
    }

    #[test]
    fn every_length_at_every_level() {
        for level in Level::available() {
            for len in 0..150 {
                let x: Vec<f32> = (0..len).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
                let mut y = vec![f32::NAN; len];
                let dot = all(level, &x, &mut y);
                let expected: Vec<f32> = x.iter().map(|x| x * x + 2.0 * x).collect();
                assert_eq!(y, expected, "{} {len}", level.name());
                let exact: f32 = x.iter().zip(&y).map(|(x, y)| x * y).sum();
                assert_eq!(dot, exact, "small integers add without rounding");
            }
        }
    }
}
