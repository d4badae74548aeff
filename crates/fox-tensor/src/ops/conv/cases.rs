//! The short convolution with every subset of its options.

use crate::cases::{Case, Output, Rng, recurrent_layouts};
use crate::{Activation, ConvSpec, L2Norm, Segments};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, (layout, rows)) in recurrent_layouts().iter().enumerate() {
        for act in [None, Some(Activation::Silu)] {
            for norm in [false, true] {
                // Cycles through options and sizes so that they mix.
                let turn = 11 + cases.len() + n;
                cases.push(conv(act, norm, [1, 2, 4, 5][turn % 4], turn, layout, *rows));
            }
        }
    }
    for (n, (layout, rows)) in recurrent_layouts().iter().enumerate() {
        let sizes = [([24, 8, 8], 3), ([16, 32, 8], 0), ([5, 1, 2], 8), ([64, 64, 128], 8)][n % 4];
        cases.push(split(sizes, n % 2 == 0, layout, *rows));
    }
    cases
}

/// Columns in three matrices, one of which gets no gradient, and further columns that pass through.
fn split(
    (widths, rest): ([usize; 3], usize),
    norm: bool,
    layout: &(&'static str, Segments),
    rows: usize,
) -> Case {
    let width: usize = widths.iter().sum();
    let norm = (norm && widths[0].is_multiple_of(8)).then_some(L2Norm { width: 8, eps: 1e-6 });
    let spec =
        ConvSpec { activation: Some(Activation::Silu), l2_norm: norm, segments: layout.1.clone() };
    let mark = if norm.is_some() { "+l2" } else { "" };
    let name = format!("short_conv/split{mark}/{}/{rows}x{widths:?}+{rest}", layout.0);
    Case::new(name, move |tape, args| {
        let (x, w) = (args.var("x")?, args.var("weight")?);
        let outs = tape.short_conv_split(x, w, args.get("bias"), &widths, &spec)?;
        let used = outs.into_iter().enumerate().filter(|(n, _)| *n != 1);
        let mut names = ["a", "b", "c"].into_iter();
        Ok(used.map(|(_, y)| Output::Var(names.next().unwrap_or("d"), y)).collect())
    })
    .normal("x", &[rows, width + rest])
    .normal("weight", &[width, 1, 4])
    .normal("bias", &[width])
}

fn conv(
    activation: Option<Activation>,
    norm: bool,
    taps: usize,
    turn: usize,
    layout: &(&'static str, Segments),
    rows: usize,
) -> Case {
    let (head, heads) = [(8, 5), (3, 7), (40, 2), (16, 4)][turn / 2 % 4];
    let (width, bias, before) = (head * heads, turn.is_multiple_of(2), !turn.is_multiple_of(3));
    let spec = ConvSpec {
        activation,
        l2_norm: norm.then_some(L2Norm { width: head, eps: 1e-6 }),
        segments: layout.1.clone(),
    };
    let segments = spec.segments.len();
    let mark = |on: bool, word: &'static str| if on { word } else { "" };
    let name = format!(
        "short_conv/{}{}{}{}/{}/{rows}x{width}/k{taps}",
        activation.map_or("plain".into(), |act| format!("{act:?}")),
        mark(norm, "+l2"),
        mark(bias, "+bias"),
        mark(before, "+before"),
        layout.0
    );
    let mut case = Case::new(name, move |tape, args| {
        let before = args.get("before").map(|before| before.value());
        let (x, w) = (args.var("x")?, args.var("weight")?);
        let y = tape.short_conv(x, w, args.get("bias"), before, &spec)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("x", &[rows, width])
    .normal("weight", &[width, 1, taps]);
    if bias {
        case = case.normal("bias", &[width]);
    }
    if before {
        let rows = segments * (taps - 1);
        let data = Rng::new(case.seed).normals(rows * width);
        case = case.constant("before", &[rows, width], data);
    }
    case
}
