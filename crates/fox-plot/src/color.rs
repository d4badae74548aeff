//! The colour map of heat maps and matrix images.

/// Red, green and blue.
pub type Rgb = [u8; 3];

/// Anchors of a map from dark blue to light yellow with uniformly increasing lightness, readable without colour and on
/// white and black.
const ANCHORS: [Rgb; 9] = [
    [41, 22, 92],
    [62, 52, 138],
    [50, 92, 153],
    [36, 128, 150],
    [33, 155, 137],
    [64, 180, 112],
    [137, 202, 78],
    [206, 218, 60],
    [253, 231, 85],
];

/// The colour of a value from 0 to 1; other values are clamped, NaN counts as 0.
pub fn sequential(value: f64) -> Rgb {
    let scaled = value.clamp(0.0, 1.0) * (ANCHORS.len() - 1) as f64;
    let scaled = if scaled.is_nan() { 0.0 } else { scaled };
    let low = (scaled as usize).min(ANCHORS.len() - 2);
    let share = scaled - low as f64;
    std::array::from_fn(|c| {
        let (a, b) = (f64::from(ANCHORS[low][c]), f64::from(ANCHORS[low + 1][c]));
        (a + (b - a) * share).round() as u8
    })
}

/// Black or white, whichever has more contrast on `color`.
pub fn ink_on(color: Rgb) -> &'static str {
    let [r, g, b] = color.map(f64::from);
    if 0.299 * r + 0.587 * g + 0.114 * b > 140.0 { "#101418" } else { "#ffffff" }
}

/// `#rrggbb`.
pub(super) fn hex(color: Rgb) -> String {
    format!("#{:02x}{:02x}{:02x}", color[0], color[1], color[2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lightness_increases() {
        let light = |v: f64| {
            let [r, g, b] = sequential(v).map(f64::from);
            0.299 * r + 0.587 * g + 0.114 * b
        };
        assert!((1..=100).all(|i| light(f64::from(i) / 100.0) > light(f64::from(i - 1) / 100.0)));
        assert_eq!(sequential(-1.0), ANCHORS[0]);
        assert_eq!(sequential(f64::NAN), ANCHORS[0]);
        assert_eq!(sequential(2.0), ANCHORS[8]);
        assert_eq!((ink_on(ANCHORS[0]), ink_on(ANCHORS[8])), ("#ffffff", "#101418"));
    }
}
