//! Error measures of lists of numbers.
//!
//! Both measures are infinite where lengths differ or a difference is not a number, so that `error <= bound`
//! fails whenever something is wrong. Equal infinities (the logsumexp of padding) agree.

/// `|got - want| / |want|` in the Euclidean norm, where `|want|` counts as at least `least_norm`.
///
/// With a `least_norm` of 0 the result for a `want` of zeros is `|got|`. Infinite elements of `want` do not
/// enter its norm.
pub fn relative_error<A, B>(got: &[A], want: &[B], least_norm: f64) -> f64
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut square) = (0.0, 0.0);
    for (&got, &want) in got.iter().zip(want) {
        let (got, want): (f64, f64) = (got.into(), want.into());
        difference += distance(got, want).powi(2);
        if want.is_finite() {
            square += want * want;
        }
    }
    let norm = square.sqrt().max(least_norm);
    let error = difference.sqrt() / if norm > 0.0 { norm } else { 1.0 };
    if error.is_nan() { f64::INFINITY } else { error }
}

/// The largest `|got - want|` of an element.
pub fn largest_error<A, B>(got: &[A], want: &[B]) -> f64
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    largest(got.iter().zip(want).map(|(&got, &want)| distance(got.into(), want.into())))
}

/// The largest of several errors, 0 without any; infinite where one is not a number. `f64::max` would pass
/// over it.
pub fn largest(errors: impl IntoIterator<Item = f64>) -> f64 {
    errors.into_iter().fold(0.0, |largest: f64, error| {
        largest.max(if error.is_nan() { f64::INFINITY } else { error })
    })
}

/// Equal infinities agree; their plain difference is not a number.
fn distance(got: f64, want: f64) -> f64 {
    if got == want { 0.0 } else { (got - want).abs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;

    #[test]
    fn norms_are_euclidean() {
        assert_eq!(relative_error(&[3.0, 4.0], &[0.0, 0.0], 0.0), 5.0);
        assert_eq!(relative_error(&[6.0, 12.0], &[3.0, 8.0f32], 10.0), 0.5);
        assert!((relative_error(&[2.0, 2.0], &[1.0, 1.0], 0.0) - 1.0).abs() < 1e-15);
        assert_eq!(relative_error::<f64, f64>(&[], &[], 0.0), 0.0);
    }

    #[test]
    fn largest_error_is_the_maximum() {
        assert_eq!(largest_error(&[1.0, -2.0, 3.0], &[1.5, 2.0, 3.0]), 4.0);
        assert_eq!(largest_error::<f32, f64>(&[], &[]), 0.0);
        assert_eq!(largest([0.5, 2.0, 1.0]), 2.0);
        assert_eq!(largest([]), 0.0);
    }

    #[test]
    fn wrong_values_have_infinite_error() {
        for (got, want) in [
            (&[NAN, 1.0][..], &[1.0, 1.0][..]),
            (&[1.0, 1.0], &[1.0, NAN]),
            (&[NAN, 1.0], &[NAN, 1.0]),
            (&[INF, 1.0], &[1.0, 1.0]),
            (&[1.0, 1.0], &[INF, 1.0]),
            (&[-INF, 1.0], &[INF, 1.0]),
            (&[1.0], &[1.0, 1.0]),
            (&[1.0, 1.0], &[1.0]),
        ] {
            assert_eq!(relative_error(got, want, 0.0), INF, "{got:?} {want:?}");
            assert_eq!(largest_error(got, want), INF, "{got:?} {want:?}");
        }
        // A NaN in the middle must not be passed over by the larger numbers around it.
        assert_eq!(largest([1.0, NAN, 2.0]), INF);
    }

    #[test]
    fn equal_infinities_agree() {
        assert_eq!(relative_error(&[INF, -INF, 3.0], &[INF, -INF, 2.0], 0.0), 0.5);
        assert_eq!(largest_error(&[INF, 3.0], &[INF, 2.0]), 1.0);
    }
}
