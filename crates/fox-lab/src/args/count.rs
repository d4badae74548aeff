//! Counts such as numbers of tokens.

/// Parses a whole number above 0, also written as 4e7 or 40_000_000.
pub fn count(text: &str) -> Result<u64, String> {
    match text.replace('_', "").parse::<f64>() {
        Ok(x) if (1.0..1e15).contains(&x) && x.fract() == 0.0 => Ok(x as u64),
        _ => Err("a whole number above 0, e.g. 1000000 or 1e6".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_may_have_exponents() {
        for (text, want) in [("1e4", 10_000), ("2.5e6", 2_500_000), ("40_000", 40_000), ("7", 7)] {
            assert_eq!(count(text), Ok(want));
        }
        for bad in ["", "-5", "0", "1.5", "many", "nan", "1e300"] {
            assert!(count(bad).is_err(), "{bad}");
        }
    }
}
