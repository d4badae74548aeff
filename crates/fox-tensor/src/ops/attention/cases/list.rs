//! List of attention cases: every feature alone and combined, over lengths around block borders, and random cases.

use super::{AttentionCase, Gates, Pruning, segment};
use crate::cases::{Case, Rng};
use crate::{AttentionWeights, Mask, Result};

pub(crate) fn cases() -> Vec<Case> {
    // A test asserts that every description builds.
    descriptions().iter().filter_map(|case| case.build().ok()).collect()
}

/// The list, each feature alone first.
fn descriptions() -> Vec<AttentionCase> {
    let one = AttentionCase::new;
    let mut list = Vec::new();
    for len in [1, 2, 63, 64, 65, 127, 130] {
        list.push(one(len, len).heads(2, 2, 24));
    }
    for d in [8, 16, 24, 40, 64, 96, 128, 256] {
        list.push(one(67, 67).heads(1, 1, d));
    }
    list.push(one(113, 203).heads(2, 2, 40));
    // More blocks than any plausible tile, and the widest head over several of them.
    list.push(one(577, 577).heads(2, 1, 8));
    list.push(one(150, 321).heads(1, 1, 256));
    // The usual widths, over so many blocks that every pipeline stage of a kernel is reused.
    for d in [64, 128, 192, 256] {
        list.push(one(400, 400).heads(2, 1, d));
    }
    for gates in [Gates::None, Gates::Zero, Gates::Strong, Gates::VeryStrong] {
        list.push(one(113, 113).heads(2, 2, 16).gates(gates));
        list.push(one(70, 70).heads(2, 1, 8).gates(gates).bidirectional());
    }
    // Several gates of -3e38 in every sequence.
    list.push(one(203, 203).heads(2, 2, 16).gates(Gates::Closed));
    list.push(one(203, 203).heads(2, 1, 8).gates(Gates::Closed).bidirectional());
    list.push(one(300, 300).heads(2, 1, 64).gates(Gates::Closed).pruning(Pruning::Auto));
    for window in [1, 7, 64, 100] {
        list.push(one(130, 130).heads(1, 1, 8).window(window));
        list.push(one(129, 129).heads(1, 1, 8).window(window).bidirectional());
    }
    for (heads, kv_heads) in [(4, 2), (6, 1), (3, 3)] {
        list.push(one(65, 65).heads(heads, kv_heads, 24));
    }
    list.push(one(66, 66).heads(2, 2, 40).bidirectional());
    // Widths of GPU kernels, over blocks on both sides of a diagonal one.
    for d in [64, 96, 128, 256] {
        list.push(one(300, 300).heads(2, 1, d).bidirectional());
    }
    list.push(one(3, 799).heads(1, 1, 16));
    list.push(one(65, 130).heads(2, 2, 16).bidirectional());
    for (q_len, k_len) in [(1, 1), (1, 64), (1, 65), (1, 203), (5, 130), (64, 128), (63, 129)] {
        list.push(one(q_len, k_len).heads(4, 2, 16));
    }
    list.push(one(0, 0).packed(&[0, 64, 1, 0, 65, 3, 1, 0]).heads(2, 2, 16));
    list.push(one(0, 0).padded(70, &[0, 5, 69, 70, 64]).heads(2, 1, 16));
    list.push(one(0, 0).cached(&[1, 1, 0, 1], &[1, 63, 7, 130], 131).heads(4, 2, 24));
    list.push(one(0, 0).cached(&[3, 70], &[65, 100], 131).heads(2, 1, 16));
    list.extend(pruned());
    list.extend(combined());
    list
}

/// Gates strong enough, and sequences long enough, that blocks are pruned.
fn pruned() -> Vec<AttentionCase> {
    let one = AttentionCase::new;
    let strong = |q_len, k_len| one(q_len, k_len).gates(Gates::Strong);
    let mut list = Vec::new();
    for pruning in [
        Pruning::Auto,
        Pruning::Norms(-3.0),
        Pruning::Norms(0.0),
        Pruning::QkNorm(-10.0, false),
        Pruning::QkNorm(-5.0, true),
    ] {
        list.push(strong(257, 257).heads(1, 1, 16).pruning(pruning));
        list.push(strong(200, 200).heads(2, 1, 8).pruning(pruning).bidirectional());
    }
    list.push(strong(577, 577).heads(1, 1, 16).pruning(Pruning::Auto));
    list.push(strong(577, 577).heads(1, 1, 8).pruning(Pruning::Norms(-5.0)).bidirectional());
    let weak = |q_len, k_len| one(q_len, k_len).gates(Gates::Weak);
    list.push(weak(577, 577).heads(2, 1, 8).pruning(Pruning::Auto));
    list.push(weak(450, 450).heads(2, 1, 8).pruning(Pruning::Norms(-1.0)).bidirectional());
    list.push(weak(450, 450).heads(4, 2, 8).pruning(Pruning::QkNorm(-10.0, false)));
    list.push(weak(70, 700).heads(2, 2, 16).pruning(Pruning::QkNorm(-10.0, true)));
    list.push(weak(0, 0).packed(&[450, 330]).heads(4, 2, 8).pruning(Pruning::Given(-15.0)));
    // The key heads' bounds differ by a factor of 8: with the wrong one, old keys with most of the weight are
    // pruned, also where blocks are 128 wide.
    let uneven = weak(512, 512).heads(4, 2, 24).pruning(Pruning::UnevenQkNorm(-1.0));
    list.extend([uneven.clone(), uneven.bidirectional()]);
    list.push(weak(0, 0).cached(&[1, 1, 3], &[500, 65, 333], 511).pruning(Pruning::Auto));
    list.push(weak(0, 0).packed(&[300, 1, 400]).pruning(Pruning::Auto).heads(1, 1, 8));
    list.push(strong(65, 300).heads(2, 1, 16).pruning(Pruning::Auto));
    list.push(strong(1, 300).heads(2, 2, 16).pruning(Pruning::Auto));
    list.push(strong(130, 260).heads(1, 1, 16).pruning(Pruning::QkNorm(-10.0, false)));
    list.push(one(130, 130).pruning(Pruning::Auto).gates(Gates::None));
    list.push(one(130, 130).pruning(Pruning::Auto).gates(Gates::Zero));
    list.push(one(200, 200).pruning(Pruning::Auto).gates(Gates::VeryStrong));
    list.push(one(200, 200).pruning(Pruning::Auto).gates(Gates::VeryStrong).bidirectional());
    list
}

/// Features together.
fn combined() -> Vec<AttentionCase> {
    let one = AttentionCase::new;
    let strong = |q_len, k_len| one(q_len, k_len).gates(Gates::Strong);
    let packed = [0, 130, 1, 0, 203, 65];
    vec![
        strong(113, 203).heads(4, 2, 40).window(100).pruning(Pruning::Auto),
        strong(0, 0).packed(&packed).heads(2, 1, 16).pruning(Pruning::Auto),
        strong(0, 0).packed(&packed).heads(2, 1, 8).pruning(Pruning::Norms(-3.0)).bidirectional(),
        one(0, 0).packed(&packed).heads(2, 2, 8).window(64),
        one(0, 0).packed(&packed).heads(2, 1, 8).window(7).bidirectional(),
        strong(0, 0).padded(203, &[0, 60, 203]).heads(2, 1, 8).pruning(Pruning::Auto),
        strong(0, 0).padded(203, &[1, 202]).heads(1, 1, 16).window(150).pruning(Pruning::Auto),
        strong(0, 0)
            .cached(&[1, 1, 0, 1], &[1, 260, 7, 199], 261)
            .heads(4, 2, 24)
            .pruning(Pruning::QkNorm(-10.0, true)),
        strong(0, 0)
            .cached(&[3, 70], &[165, 200], 203)
            .heads(2, 1, 16)
            .window(100)
            .pruning(Pruning::Auto),
        one(0, 0).cached(&[3, 70], &[65, 100], 131).heads(2, 1, 16).bidirectional(),
        // Wide heads, whose kernels are others.
        strong(0, 0).packed(&packed).heads(2, 1, 192).pruning(Pruning::Auto),
        strong(113, 303).heads(2, 2, 256).window(100).pruning(Pruning::Auto),
        one(0, 0).packed(&[130, 203]).heads(2, 1, 248).gates(Gates::None),
    ]
}

/// Sequences of more tiles than a large GPU has thread blocks, so that each processes several: 544 of 128 rows, twice
/// as many of 64. The oracle takes minutes for each, so tests do not run them by default.
pub fn large_attention() -> Vec<AttentionCase> {
    let pair =
        || AttentionCase { label: "large", ..AttentionCase::new(0, 0).packed(&[2050, 2050]) };
    let pruned = |pruning| pair().gates(Gates::Spread).pruning(pruning);
    vec![
        pair().heads(16, 16, 64),
        pruned(Pruning::Auto).heads(16, 4, 64),
        pruned(Pruning::QkNorm(-10.0, false)).heads(16, 8, 128),
        pruned(Pruning::Auto).heads(16, 8, 256),
        pair().heads(16, 16, 64).bidirectional(),
        pruned(Pruning::Off).heads(16, 8, 128).bidirectional(),
        pruned(Pruning::Auto).heads(16, 4, 64).stick_breaking(),
    ]
}

/// A case of random features, sizes and segments, for property tests.
pub fn random_attention(seed: u64) -> Result<Case> {
    named(random(seed), seed)
}

pub(crate) fn named(case: AttentionCase, seed: u64) -> Result<Case> {
    let mut built = case.build()?;
    built.name = format!("{}/seed {seed}", built.name);
    Ok(built)
}

/// A random description.
pub(crate) fn random(seed: u64) -> AttentionCase {
    let mut rng = Rng::new(seed);
    let kv_heads = rng.between(1, 2);
    let mut case = AttentionCase {
        heads: kv_heads * rng.between(1, 3),
        kv_heads,
        head_dim: rng.pick(&[8, 8, 16, 24, 40, 64]),
        weights: AttentionWeights::Softmax,
        mask: if rng.chance(0.3) { Mask::Bidirectional } else { Mask::Causal },
        window: rng.chance(0.3).then(|| rng.between(1, 150)),
        gates: rng.pick(&[
            Gates::None,
            Gates::Zero,
            Gates::Mild,
            Gates::Weak,
            Gates::Strong,
            Gates::Strong,
            Gates::VeryStrong,
        ]),
        pruning: rng.pick(&[
            Pruning::Off,
            Pruning::Auto,
            Pruning::Norms(-2.0),
            Pruning::QkNorm(-10.0, false),
            Pruning::QkNorm(-4.0, true),
        ]),
        label: "random",
        rows: (0, 0),
        segments: Vec::new(),
    };
    // Gaps before, between and after the segments are padding.
    let gap = |rng: &mut Rng| if rng.chance(0.3) { rng.between(1, 9) } else { 0 };
    let (mut q_end, mut k_end) = (gap(&mut rng), gap(&mut rng));
    for _ in 0..rng.between(1, 3) {
        let k_len = rng.pick(&[0, 1, 5, 63, 64, 65, 100, 128, 129, 150, 400]);
        let q_len = if rng.chance(0.5) { k_len } else { rng.between(0, k_len) };
        case.segments.push(segment(q_end, q_len, k_end, k_len));
        q_end += q_len + gap(&mut rng);
        k_end += k_len + gap(&mut rng);
    }
    case.rows = (q_end, k_end);
    case
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
            random_attention(seed).unwrap();
        }
    }
}
