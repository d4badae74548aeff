//! Cases of PaTH attention: its features, and random cases.

use super::PathVars;
use crate::cases::{Args, Case, Output, round};
use crate::ops::attention::cases::{AttentionCase, Gates, Pruning, random};
use crate::{AttentionSpec, Mask, PathInputs, Result, Tape, tile_counts};

pub(crate) fn cases() -> Vec<Case> {
    // A test asserts that every description builds.
    descriptions().iter().filter_map(|case| path_attention_case(case).ok()).collect()
}

fn descriptions() -> Vec<AttentionCase> {
    let one = AttentionCase::new;
    let mut list = Vec::new();
    for len in [1, 2, 63, 64, 65, 130, 257] {
        list.push(one(len, len).heads(2, 2, 16).gates(Gates::None));
    }
    for d in [8, 40, 64, 128] {
        list.push(one(140, 140).heads(1, 1, d));
    }
    for gates in [Gates::None, Gates::Zero, Gates::Mild, Gates::Weak, Gates::VeryStrong] {
        list.push(one(113, 203).heads(4, 2, 16).gates(gates));
    }
    // Gates of -3e38: keys and queries before one of them still see each other.
    list.push(one(203, 203).heads(2, 1, 16).gates(Gates::Closed));
    for (q_len, k_len) in [(1, 1), (1, 64), (1, 65), (3, 331), (7, 130), (64, 128), (63, 129)] {
        list.push(one(q_len, k_len).heads(4, 2, 16).gates(Gates::Weak));
    }
    for pruning in [Pruning::Auto, Pruning::Norms(-3.0), Pruning::QkNorm(-10.0, true)] {
        list.push(one(330, 330).heads(2, 1, 16).gates(Gates::Strong).pruning(pruning));
        list.push(one(200, 330).heads(2, 2, 8).gates(Gates::Strong).pruning(pruning));
    }
    list.push(one(330, 330).heads(2, 1, 16).gates(Gates::Weak).pruning(Pruning::Given(-9.0)));
    list.push(one(0, 0).packed(&[0, 64, 1, 0, 65, 203, 1]).heads(2, 2, 16));
    // Blocks of older spans, where kernels have them, and spans of these.
    list.push(one(900, 900).heads(2, 1, 64));
    list.push(one(1100, 1100).heads(1, 1, 128));
    list.push(one(0, 0).packed(&[5, 130]).heads(2, 1, 16).gates(Gates::None));
    list.push(one(0, 0).padded(70, &[0, 5, 69, 70, 64]).heads(2, 1, 16).gates(Gates::None));
    list.push(one(0, 0).cached(&[1, 1, 0, 1], &[1, 63, 7, 130], 131).heads(4, 2, 24));
    let cached = one(0, 0).cached(&[1, 3, 70], &[300, 165, 200], 303);
    list.push(cached.heads(2, 1, 16).gates(Gates::Strong).pruning(Pruning::Auto));
    list
}

/// PaTH attention with these features.
pub fn path_attention_case(case: &AttentionCase) -> Result<Case> {
    let (spec, pruning) = (case.spec()?, case.pruning);
    let name = case.name().replacen("attention", "path_attention", 1);
    let built = Case::new(name, move |tape, args| {
        attend(tape, args, &AttentionSpec { acp: pruning.acp(args)?, ..spec.clone() })
    });
    let (rows, width) = (case.rows.1, case.kv_heads * case.head_dim);
    let built = case.operands(built);
    let mut rng = built.rng("u");
    let mut u = rng.normals(rows * width);
    for u in u.chunks_mut(case.head_dim) {
        // Identity, projection and reflection happen to be frequent: they are the ends and the middle of the range.
        let square = match rng.between(0, 7) {
            0 => 0.0,
            1 => 1.0,
            2 => 2.0,
            _ => 2.0 * rng.uniform(),
        };
        let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        u.iter_mut().for_each(|x| *x = round(*x * square.sqrt() / norm));
    }
    Ok(built.real("u", &[rows, width], u))
}

/// Runs the op on the tape, and on the backend for the row statistics, which the tape does not return.
fn attend(tape: &mut Tape<'static>, args: &Args<'_>, spec: &AttentionSpec) -> Result<Vec<Output>> {
    let (q, k, v, u) = (args.var("q")?, args.var("k")?, args.var("v")?, args.var("u")?);
    let vars = PathVars { q, k, v, u, log_gates: args.get("log_gates") };
    let (o, tiles) = tape.path_attention(&vars, spec)?;
    let log_gates = vars.log_gates.map(|gates| gates.value());
    let inputs = PathInputs { q: q.value(), k: k.value(), v: v.value(), u: u.value(), log_gates };
    let lse = tape.device().backend().path_attention_fwd(&inputs, spec)?.lse;
    let tiles = tile_counts(&tiles)?.into_iter().flatten().map(|n| n as f64).collect();
    Ok(vec![
        Output::Var("o", o),
        Output::Plain("lse", lse.to_f64()?),
        Output::Plain("tiles", tiles),
    ])
}

/// A case of random features, sizes and segments, for property tests.
pub fn random_path_attention(seed: u64) -> Result<Case> {
    let description = AttentionCase { mask: Mask::Causal, window: None, ..random(seed) };
    let mut case = path_attention_case(&description)?;
    case.name = format!("{}/seed {seed}", case.name);
    Ok(case)
}

/// Sequences of dozens of blocks. The oracle takes minutes for each, so tests do not run them by default.
pub fn large_path_attention() -> Vec<AttentionCase> {
    let pair =
        || AttentionCase { label: "large", ..AttentionCase::new(0, 0).packed(&[2050, 1030]) };
    let gated = |pruning| pair().gates(Gates::Spread).pruning(pruning);
    vec![
        pair().heads(4, 4, 64).gates(Gates::None),
        gated(Pruning::Off).heads(8, 2, 64),
        gated(Pruning::Auto).heads(8, 4, 64),
        gated(Pruning::Off).heads(4, 4, 128),
        gated(Pruning::QkNorm(-10.0, true)).heads(4, 2, 128),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_description_builds() {
        for description in descriptions() {
            path_attention_case(&description).unwrap();
        }
        for seed in 0..500 {
            random_path_attention(seed).unwrap();
        }
    }
}
