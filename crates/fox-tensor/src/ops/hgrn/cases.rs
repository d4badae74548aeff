//! Gates of HGRN2 with and without lower bounds, and the bounds themselves.

use crate::cases::{Case, Output, Rng, round};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, width) in [(1, 1), (113, 20), (65, 64), (7, 301)] {
        cases.extend([hgrn(rows, width, false), hgrn(rows, width, true)]);
    }
    cases.extend((0..3).map(lower_bound));
    cases
}

/// Gates near 0 and near 1 among others.
fn hgrn(rows: usize, width: usize, bounded: bool) -> Case {
    let mark = if bounded { "bounded" } else { "free" };
    let case = Case::new(format!("hgrn_gates/{mark}/{rows}x{width}"), |tape, args| {
        let (q, k, log_f) = tape.hgrn_gates(args.var("q")?, args.var("z")?, args.get("lower"))?;
        Ok(vec![Output::Var("q", q), Output::Var("k", k), Output::Var("log_f", log_f)])
    });
    let mut rng = Rng::new(case.seed);
    let spread = |rng: &mut Rng| if rng.chance(0.1) { 20.0 } else { 2.0 };
    let z = (0..rows * width).map(|_| round(spread(&mut rng) * rng.normal())).collect();
    let case = case.normal("q", &[rows, width]).real("z", &[rows, width], z);
    if !bounded {
        return case;
    }
    let lower = (0..width).map(|_| round(0.05 + 0.9 * rng.uniform())).collect();
    case.real("lower", &[width], lower)
}

fn lower_bound(layer: usize) -> Case {
    Case::new(format!("lower_bound/layer {layer}/3x20"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.lower_bound(args.var("table")?, layer)?)])
    })
    .normal("table", &[3, 20])
}
