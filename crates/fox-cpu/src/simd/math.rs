//! Vector exponential, sigmoid and softplus.

use super::Simd;

/// Below this `exp` is zero in f32, subnormals included.
const EXP_LOW: f32 = -105.0;
/// Above this `exp` overflows f32.
const EXP_HIGH: f32 = 88.8;

/// `e^x` to about one unit in the last place; 0 for `-inf`, `inf` for large `x`, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `ln 2` is split in two parts so that `r` is exact to
/// rounding; `e^r` is its Taylor polynomial of degree 7, whose remainder is below 2e-9.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // The constant comes first: `max` and `min` return the second operand for NaN.
    let x = s.min(s.splat(EXP_HIGH), s.max(s.splat(EXP_LOW), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.mul_add(n, s.splat(-0.693_359_4), x);
    let r = s.mul_add(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.mul_add(p, r, s.splat(c));
    }
    s.scale_pow2(p, n)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// `ln(1 + e^x)`, without overflow and exact for large negative `x`.
#[inline(always)]
pub fn softplus<S: Simd>(s: S, x: S::V) -> S::V {
    s.add(ln_one_plus(s, x), s.max(s.splat(0.0), x))
}

/// `ln(sigmoid(x))` and `ln(1 - sigmoid(x))`, neither with cancellation; `(-inf, 0)` for `-inf`.
#[inline(always)]
pub fn log_sigmoids<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let (zero, common) = (s.splat(0.0), ln_one_plus(s, x));
    let minus = s.sub(zero, x);
    (s.sub(s.min(zero, x), common), s.sub(s.min(zero, minus), common))
}

/// `ln(1 + t)` with `t = e^-|x|` in 0..=1.
///
/// It is `2 artanh(t / (2 + t))`, whose argument is at most 1/3: the series to the 15th power leaves
/// less than 2e-9.
#[inline(always)]
fn ln_one_plus<S: Simd>(s: S, x: S::V) -> S::V {
    let t = exp(s, s.min(x, s.sub(s.splat(0.0), x)));
    let y = s.div(t, s.add(s.splat(2.0), t));
    let square = s.mul(y, y);
    let mut p = s.splat(2.0 / 15.0);
    for n in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        p = s.mul_add(p, square, s.splat(2.0 / n));
    }
    s.mul(p, y)
}

#[cfg(test)]
mod tests {
    use super::super::{Kernel, Level, map};
    use super::*;

    struct Softplus<'a>(&'a [f32], &'a mut [f32]);
    impl Kernel for Softplus<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            map(s, [self.0], self.1, |[x]| softplus(s, x));
        }
    }

    #[test]
    fn softplus_is_accurate_at_every_level() {
        let x: Vec<f32> = (-8700..=8700).map(|i| i as f32 * 0.01).collect();
        for level in Level::available() {
            let mut y = vec![f32::NAN; x.len()];
            level.run(Softplus(&x, &mut y));
            for (&x, &y) in x.iter().zip(&y) {
                let exact = (x as f64).max(0.0) + (-(x as f64).abs()).exp().ln_1p();
                assert!((y as f64 - exact).abs() <= 4e-7 * exact + 1e-38, "{} {x}", level.name());
            }
            let edges = [f32::NEG_INFINITY, -200.0, 200.0, f32::INFINITY];
            let mut y = [1.0; 4];
            level.run(Softplus(&edges, &mut y));
            assert_eq!(y, [0.0, 0.0, 200.0, f32::INFINITY], "{}", level.name());
        }
    }

    struct LogSigmoids<'a>(&'a [f32], &'a mut [f32], &'a mut [f32]);
    impl Kernel for LogSigmoids<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            map(s, [self.0], self.1, |[x]| log_sigmoids(s, x).0);
            map(s, [self.0], self.2, |[x]| log_sigmoids(s, x).1);
        }
    }

    #[test]
    fn log_sigmoids_are_accurate_at_every_level() {
        let mut x: Vec<f32> = (-8700..=8700).map(|i| i as f32 * 0.01).collect();
        x.extend([f32::NEG_INFINITY, -200.0, 200.0]);
        for level in Level::available() {
            let (mut own, mut other) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
            level.run(LogSigmoids(&x, &mut own, &mut other));
            for ((&x, &own), &other) in x.iter().zip(&own).zip(&other) {
                let exact = |x: f64| x.min(0.0) - (-x.abs()).exp().ln_1p();
                for (got, want) in [(own, exact(x as f64)), (other, exact(-x as f64))] {
                    let off = if got as f64 == want { 0.0 } else { (got as f64 - want).abs() };
                    assert!(off <= -4e-7 * want + 1e-38, "{} {x}: {got}", level.name());
                }
            }
        }
    }

    struct ExpOrSigmoid<'a>(&'a [f32], &'a mut [f32], bool);
    impl Kernel for ExpOrSigmoid<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            if self.2 {
                map(s, [self.0], self.1, |[x]| sigmoid(s, x));
            } else {
                map(s, [self.0], self.1, |[x]| exp(s, x));
            }
        }
    }

    #[test]
    fn exp_and_sigmoid_are_accurate_at_every_level() {
        let x: Vec<f32> = (-8800..=8800).map(|i| i as f32 * 0.01).collect();
        for level in Level::available() {
            let mut y = vec![f32::NAN; x.len()];
            level.run(ExpOrSigmoid(&x, &mut y, false));
            for (&x, &y) in x.iter().zip(&y) {
                let exact = (x as f64).exp();
                let tolerance = 2.5e-7 * exact + 1.5e-45;
                assert!((y as f64 - exact).abs() <= tolerance, "{} exp({x}) = {y}", level.name());
            }
            level.run(ExpOrSigmoid(&x, &mut y, true));
            for (&x, &y) in x.iter().zip(&y) {
                let exact = 1.0 / (1.0 + (-x as f64).exp());
                assert!((y as f64 - exact).abs() <= 3e-7 * exact + 1e-38, "{} {x}", level.name());
            }
        }
    }

    #[test]
    fn exp_handles_extreme_arguments() {
        let x = [f32::NEG_INFINITY, -200.0, -104.5, 89.0, f32::INFINITY, f32::NAN, 0.0, -0.0];
        for level in Level::available() {
            let mut y = [1.0; 8];
            level.run(ExpOrSigmoid(&x, &mut y, false));
            assert_eq!(&y[..3], &[0.0; 3], "{}", level.name());
            assert_eq!(&y[3..5], &[f32::INFINITY; 2], "{}", level.name());
            assert!(y[5].is_nan(), "{}", level.name());
            assert_eq!(&y[6..], &[1.0; 2], "{}", level.name());
        }
    }
}
