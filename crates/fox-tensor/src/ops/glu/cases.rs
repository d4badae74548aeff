//! Gated linear units, some of them far out.

use crate::Activation;
use crate::cases::{Case, Output};

pub(crate) fn cases() -> Vec<Case> {
    let shapes = [(1, 1), (113, 101), (799, 3), (65, 64)].into_iter();
    let both = |(rows, width)| {
        [Activation::Sigmoid, Activation::Silu].map(move |act| glu(rows, width, act))
    };
    shapes.flat_map(both).collect()
}

fn glu(rows: usize, width: usize, act: Activation) -> Case {
    let case = Case::new(format!("glu/{act:?}/{rows}x{width}"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.glu(args.var("x")?, act)?)])
    });
    let x = case.wide("x", rows * 2 * width);
    case.real("x", &[rows, 2 * width], x)
}
