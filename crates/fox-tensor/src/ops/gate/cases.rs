//! Forget gates, some of them far out.

use crate::cases::{Case, Output, round};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads) in [(1, 1), (113, 3), (799, 5), (65, 16)] {
        for (z, bias) in [(true, true), (true, false), (false, true)] {
            cases.push(log_gate(rows, heads, z, bias));
        }
    }
    cases.push(far());
    cases
}

/// Logits at both ends of f32, and a sum that leaves it. No gradient: differences would find none.
fn far() -> Case {
    let z = vec![-3e38, 3e38, -3e38, 3e38, -1e4, 1e4, 0.0, -100.0];
    Case::new("log_gate/far/4x2", |tape, args| {
        Ok(vec![Output::Var("y", tape.log_gate(args.get("z"), args.get("bias"), 4)?)])
    })
    .constant("z", &[4, 2], z.into_iter().map(round).collect())
    .constant("bias", &[2], vec![0.0, 1.0])
}

fn log_gate(rows: usize, heads: usize, z: bool, bias: bool) -> Case {
    let kind = match (z, bias) {
        (true, true) => "z+bias",
        (true, false) => "z",
        _ => "bias",
    };
    let mut case = Case::new(format!("log_gate/{kind}/{rows}x{heads}"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.log_gate(args.get("z"), args.get("bias"), rows)?)])
    });
    if z {
        let data = case.wide("z", rows * heads);
        case = case.real("z", &[rows, heads], data);
    }
    if bias {
        case = case.normal("bias", &[heads]);
    }
    case
}
