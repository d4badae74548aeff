//! The gated norm with every subset of its parts.

use crate::Activation;
use crate::cases::{Case, Output};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (norm, gate) in [(false, false), (true, false), (false, true), (true, true)] {
        for act in [Activation::Sigmoid, Activation::Silu] {
            for (rows, width, groups) in [(1, 8, 1), (113, 120, 5), (65, 203, 7), (799, 6, 2)] {
                cases.push(gated_norm(norm, gate, act, (rows, width, groups)));
            }
        }
    }
    cases
}

fn gated_norm(
    norm: bool,
    gate: bool,
    act: Activation,
    (rows, width, groups): (usize, usize, usize),
) -> Case {
    let kind = match (norm, gate) {
        (false, false) => "identity",
        (true, false) => "norm",
        (false, true) => "gate",
        (true, true) => "norm+gate",
    };
    let name = format!("gated_norm/{kind}/{act:?}/{rows}x{width}/g{groups}");
    let mut case = Case::new(name, move |tape, args| {
        let (norm, gate) = (args.get("norm"), args.get("gate"));
        let y = tape.gated_norm(args.var("x")?, norm, gate, groups, 1e-6, act)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("x", &[rows, width]);
    if norm {
        case = case.normal("norm", &[width]);
    }
    if gate {
        case = case.normal("gate", &[rows, width]);
    }
    case
}
