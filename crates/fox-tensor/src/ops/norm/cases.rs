//! The norm with and without a term to add, and with one of its two results unused.

use crate::cases::{Case, Output};

/// Rows and width.
const SHAPES: [(usize, usize); 6] = [(1, 1), (1, 40), (113, 203), (799, 3), (64, 64), (65, 256)];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.extend([add_rms_norm(shape, false, 1e-6), add_rms_norm(shape, true, 1e-5)]);
    }
    cases.extend([norm_only(), residual_only()]);
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
