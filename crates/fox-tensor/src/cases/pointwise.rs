//! Norms, forget gates, gated linear units.

use super::{Case, Output, round};
use crate::Activation;

/// Rows and width.
const SHAPES: [(usize, usize); 6] = [(1, 1), (1, 40), (113, 203), (799, 3), (64, 64), (65, 256)];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.extend([add_rms_norm(shape, false, 1e-6), add_rms_norm(shape, true, 1e-5)]);
    }
    cases.extend([norm_only(), residual_only()]);
    for (norm, gate) in [(false, false), (true, false), (false, true), (true, true)] {
        for act in [Activation::Sigmoid, Activation::Silu] {
            for (rows, width, groups) in [(1, 8, 1), (113, 120, 5), (65, 203, 7), (799, 6, 2)] {
                cases.push(gated_norm(norm, gate, act, (rows, width, groups)));
            }
        }
    }
    for (rows, width) in [(1, 1), (113, 101), (799, 3), (65, 64)] {
        cases.extend([Activation::Sigmoid, Activation::Silu].map(|act| glu(rows, width, act)));
    }
    for (rows, heads) in [(1, 1), (113, 3), (799, 5), (65, 16)] {
        for (z, bias) in [(true, true), (true, false), (false, true)] {
            cases.push(log_gate(rows, heads, z, bias));
        }
    }
    cases
}

fn add_rms_norm((rows, width): (usize, usize), delta: bool, eps: f32) -> Case {
    let kind = if delta { "delta" } else { "plain" };
    let case = Case::new(format!("add_rms_norm/{kind}/{rows}x{width}"), move |tape, args| {
        let (h, w) = (args.var("h")?, args.var("w")?);
        let (sum, y) = tape.add_rms_norm(h, args.get("delta"), w, eps)?;
        Ok(vec![Output::Var("sum", sum), Output::Var("y", y)])
    });
    let case = case.normal("h", &[rows, width]).normal("w", &[width]);
    if delta { case.normal("delta", &[rows, width]) } else { case }
}

/// No gradient down the residual stream, and weights that serve twice.
fn norm_only() -> Case {
    Case::new("add_rms_norm/norm only, twice/113x40", |tape, args| {
        let (h, w) = (args.var("h")?, args.var("w")?);
        let (_, first) = tape.add_rms_norm(h, None, w, 1e-6)?;
        let (_, second) = tape.add_rms_norm(&first, Some(h), w, 1e-6)?;
        Ok(vec![Output::Var("second", second)])
    })
    .normal("h", &[113, 40])
    .normal("w", &[40])
}

/// No gradient through the norm.
fn residual_only() -> Case {
    Case::new("add_rms_norm/residual only/113x40", |tape, args| {
        let (h, delta, w) = (args.var("h")?, args.var("delta")?, args.var("w")?);
        Ok(vec![Output::Var("sum", tape.add_rms_norm(h, Some(delta), w, 1e-6)?.0)])
    })
    .normal("h", &[113, 40])
    .normal("delta", &[113, 40])
    .normal("w", &[40])
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

/// Logits of order 1 with some far out, where a careless sigmoid overflows.
fn wide(case: &Case, name: &str, len: usize) -> Vec<f64> {
    let mut rng = case.stream(name);
    (0..len)
        .map(|_| {
            let spread = if rng.chance(0.1) { 60.0 } else { 2.0 };
            round(rng.normal() * spread)
        })
        .collect()
}

fn glu(rows: usize, width: usize, act: Activation) -> Case {
    let case = Case::new(format!("glu/{act:?}/{rows}x{width}"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.glu(args.var("x")?, act)?)])
    });
    let x = wide(&case, "x", rows * 2 * width);
    case.real("x", &[rows, 2 * width], x)
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
        let data = wide(&case, "z", rows * heads);
        case = case.real("z", &[rows, heads], data);
    }
    if bias {
        case = case.normal("bias", &[heads]);
    }
    case
}
