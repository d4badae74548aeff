//! Linear layers of every shape, alone, twice and in groups.

use crate::cases::{Case, Output};

/// Rows, inner width, outer width.
const LINEAR: [(usize, usize, usize); 7] = [
    (1, 1, 1),
    (1, 40, 203),
    (113, 203, 40),
    (799, 3, 5),
    (64, 64, 64),
    (65, 127, 130),
    (2, 513, 1),
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        LINEAR.iter().flat_map(|&shape| [linear(shape, false), linear(shape, true)]).collect();
    cases.push(linear_twice());
    cases.extend([group(1, 40, [3, 5, 2]), group(113, 203, [4, 4, 4]), group(799, 24, [1, 7, 16])]);
    cases.extend([shared(1, 40, 3), shared(113, 203, 4)]);
    cases.extend([
        split(1, 40, [3, 5, 2]),
        split(113, 64, [128, 96, 24]),
        split(799, 24, [1, 70, 16]),
    ]);
    cases
}

fn linear((rows, inner, width): (usize, usize, usize), bias: bool) -> Case {
    let kind = if bias { "bias" } else { "plain" };
    let case = Case::new(format!("linear/{kind}/{rows}x{inner}x{width}"), |tape, args| {
        Ok(vec![Output::Var("y", tape.linear(args.var("x")?, args.var("w")?, args.get("bias"))?)])
    });
    let case = case.normal("x", &[rows, inner]).normal("w", &[width, inner]);
    if bias { case.normal("bias", &[width]) } else { case }
}

/// Operands that serve twice: the backward adds to gradients that exist.
fn linear_twice() -> Case {
    Case::new("linear/twice/113x24x24", |tape, args| {
        let (w, bias) = (args.var("w")?, args.var("bias")?);
        let first = tape.linear(args.var("x")?, w, Some(bias))?;
        let second = tape.linear(&first, w, Some(bias))?;
        Ok(vec![Output::Var("first", first), Output::Var("second", second)])
    })
    .normal("x", &[113, 24])
    .normal("w", &[24, 24])
    .normal("bias", &[24])
}

/// Outputs in three matrices, one of which gets no gradient the second time.
fn split(rows: usize, inner: usize, widths: [usize; 3]) -> Case {
    Case::new(format!("linear_split/{rows}x{inner}/{widths:?}"), move |tape, args| {
        let (x, w) = (args.var("x")?, args.var("w")?);
        let again = tape.linear_split(x, w, &widths)?.swap_remove(1);
        let outs = tape.linear_split(x, w, &widths)?;
        let mut outs: Vec<Output> =
            ["a", "b", "c"].into_iter().zip(outs).map(|(n, y)| Output::Var(n, y)).collect();
        outs.push(Output::Var("again", again));
        Ok(outs)
    })
    .normal("x", &[rows, inner])
    .normal("w", &[widths.iter().sum(), inner])
}

/// Narrow layers of one input, each of which also serves alone; one of them gets no gradient the second time.
fn group(rows: usize, inner: usize, widths: [usize; 3]) -> Case {
    const NAMES: [&str; 3] = ["w0", "w1", "w2"];
    let name = format!("linear_group/{rows}x{inner}/{widths:?}");
    let mut case = Case::new(name, |tape, args| {
        let x = args.var("x")?;
        let mut weights = Vec::new();
        for name in NAMES {
            weights.push(args.var(name)?.clone());
        }
        let again = tape.linear_group(x, &weights)?.swap_remove(1);
        let mut outs: Vec<Output> = tape
            .linear_group(x, &weights)?
            .into_iter()
            .zip(["y0", "y1", "y2"])
            .map(|(y, name)| Output::Var(name, y))
            .collect();
        outs.push(Output::Var("alone", tape.linear(x, &weights[0], None)?));
        outs.push(Output::Var("again", again));
        Ok(outs)
    })
    .normal("x", &[rows, inner]);
    for (name, width) in NAMES.into_iter().zip(widths) {
        case = case.normal(name, &[width, inner]);
    }
    case
}

/// A group in which a weight is there twice: its gradient has two terms, and a third from outside.
fn shared(rows: usize, inner: usize, width: usize) -> Case {
    Case::new(format!("linear_group/shared/{rows}x{inner}x{width}"), |tape, args| {
        let (x, w, other) = (args.var("x")?, args.var("w")?, args.var("other")?);
        let weights = [w.clone(), other.clone(), w.clone()];
        let outs = tape.linear_group(x, &weights)?;
        let mut outs: Vec<Output> = outs
            .into_iter()
            .zip(["first", "between", "second"])
            .map(|(y, name)| Output::Var(name, y))
            .collect();
        outs.push(Output::Var("alone", tape.linear(x, w, None)?));
        Ok(outs)
    })
    .normal("x", &[rows, inner])
    .normal("w", &[width, inner])
    .normal("other", &[width, inner])
}
