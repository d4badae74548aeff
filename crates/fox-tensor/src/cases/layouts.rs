//! Segments for the cases of several ops.

use crate::{Segment, Segments};

/// Named segments with their number of rows; lengths below, at and above the chunk sizes of kernels.
pub(crate) fn recurrent_layouts() -> Vec<((&'static str, Segments), usize)> {
    let alone = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
    let lists = [
        ("uniform", vec![alone(0, 33, 0, 33), alone(33, 33, 33, 33)], 66),
        ("one token", vec![alone(0, 1, 0, 1)], 1),
        ("long", vec![alone(0, 203, 0, 203)], 203),
        ("even", vec![alone(0, 128, 0, 128)], 128),
        (
            "packed",
            vec![alone(0, 5, 0, 5), alone(5, 0, 5, 0), alone(5, 1, 5, 1), alone(6, 81, 6, 81)],
            87,
        ),
        ("padded", vec![alone(3, 7, 3, 7), alone(10, 20, 10, 20), alone(49, 1, 49, 1)], 51),
        ("decode", vec![alone(0, 1, 0, 63), alone(1, 5, 100, 130), alone(8, 1, 230, 1)], 9),
    ];
    lists.into_iter().filter_map(|(n, s, rows)| Some(((n, Segments::new(s).ok()?), rows))).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_layout_is_valid() {
        assert_eq!(super::recurrent_layouts().len(), 7);
    }
}
