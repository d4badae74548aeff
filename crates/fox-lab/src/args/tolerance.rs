//! Tolerances of pruning and eviction.

/// Parses the natural log of a fraction of the softmax, e.g. -10. It is negative: at 0 everything would be pruned.
pub fn log_tolerance(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x < 0.0 => Ok(x),
        _ => Err("the natural log of a fraction is a negative number, e.g. -10".into()),
    }
}
