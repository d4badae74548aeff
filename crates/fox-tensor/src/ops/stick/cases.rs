//! Cases of stick-breaking attention: its features, and random cases.

use crate::cases::Case;
use crate::ops::attention::cases::{AttentionCase, Gates, Pruning, named, random};
use crate::{Mask, Result};

pub(crate) fn cases() -> Vec<Case> {
    // A test asserts that every description builds.
    descriptions().iter().filter_map(|case| case.build().ok()).collect()
}

/// With and without gates. Scores of order 1 use up a stick within a few dozen keys, so pruning starts at the second
/// block.
fn descriptions() -> Vec<AttentionCase> {
    let one = AttentionCase::new;
    let mut list = Vec::new();
    for len in [1, 2, 63, 64, 65, 130] {
        list.push(one(len, len).heads(2, 2, 24).gates(Gates::None));
    }
    for d in [8, 40, 64, 256] {
        list.push(one(67, 67).heads(1, 1, d));
    }
    for gates in [Gates::None, Gates::Zero, Gates::Mild, Gates::Weak, Gates::VeryStrong] {
        list.push(one(113, 203).heads(2, 1, 16).gates(gates));
    }
    // Gates of -3e38: keys and queries before one of them still see each other.
    list.push(one(203, 203).heads(2, 1, 16).gates(Gates::Closed));
    for window in [1, 2, 7, 64, 100] {
        list.push(one(130, 130).heads(1, 1, 8).window(window).gates(Gates::Weak));
    }
    for (q_len, k_len) in [(1, 1), (1, 64), (1, 65), (3, 799), (7, 130), (64, 128), (63, 129)] {
        list.push(one(q_len, k_len).heads(4, 2, 16).gates(Gates::Weak));
    }
    for pruning in [Pruning::Auto, Pruning::Norms(-3.0), Pruning::Norms(0.0)] {
        list.push(one(257, 257).heads(2, 1, 16).gates(Gates::None).pruning(pruning));
        list.push(one(200, 330).heads(2, 2, 8).gates(Gates::Weak).pruning(pruning));
    }
    list.push(one(577, 577).heads(2, 1, 8).gates(Gates::None));
    list.push(one(0, 0).packed(&[0, 64, 1, 0, 65, 203, 1]).heads(2, 2, 16));
    list.push(one(0, 0).padded(70, &[0, 5, 69, 70, 64]).heads(2, 1, 16).gates(Gates::None));
    list.push(one(0, 0).cached(&[1, 1, 0, 1], &[1, 63, 7, 130], 131).heads(4, 2, 24));
    let cached = one(0, 0).cached(&[1, 3, 70], &[300, 165, 200], 303);
    list.push(cached.heads(2, 1, 16).gates(Gates::None).pruning(Pruning::Auto));
    list.into_iter().map(AttentionCase::stick_breaking).collect()
}

/// A case of random features, sizes and segments, for property tests.
pub fn random_stick_breaking(seed: u64) -> Result<Case> {
    named(AttentionCase { mask: Mask::Causal, ..random(seed).stick_breaking() }, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_description_builds() {
        for description in descriptions() {
            description.build().unwrap();
        }
        for seed in 0..500 {
            random_stick_breaking(seed).unwrap();
        }
    }
}
