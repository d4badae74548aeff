//! Tolerances of pruning and eviction on the command line.

/// The natural logarithm of a share, e.g. -10. A share is below 1, so its logarithm is negative; above that,
/// everything would be pruned.
pub fn log_tolerance(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x < 0.0 => Ok(x),
        _ => Err("the natural log of a share is a negative number, e.g. -10".into()),
    }
}
