//! `prepare_heads` with every subset of its options, over every kind of segments.

use crate::cases::{Case, Output};
use crate::{HeadSpec, Rope, Segment, Segments};

/// Source of the row before a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shift {
    None,
    Zeros,
    Prev,
}

/// Norm weights of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    None,
    PerHead,
    Shared,
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let layouts = layouts();
    let sizes = [(1, 8), (3, 40), (2, 24), (1, 256), (5, 16), (2, 96), (2, 64), (1, 128)];
    for (i, (name, segments, rows)) in layouts.iter().enumerate() {
        for shift in [Shift::None, Shift::Zeros, Shift::Prev] {
            for norm in [Norm::None, Norm::PerHead, Norm::Shared] {
                for rope in [false, true] {
                    // Cycles through the sizes so that options and sizes mix.
                    let (heads, head_dim) = sizes[(cases.len() + i) % sizes.len()];
                    let spec = HeadSpec {
                        heads,
                        head_dim,
                        norm_eps: 1e-5,
                        rope: rope.then_some(Rope::new(500_000.0)),
                        segments: segments.clone(),
                    };
                    cases.push(case(name, *rows, shift, norm, spec));
                }
            }
        }
    }
    cases
}

/// Named segments with the number of rows they lie in.
fn layouts() -> Vec<(&'static str, Segments, usize)> {
    let alone = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
    let lists = [
        ("uniform", vec![alone(0, 13, 0, 13), alone(13, 13, 13, 13)], 26),
        ("one token", vec![alone(0, 1, 0, 1)], 1),
        (
            "packed",
            vec![alone(0, 5, 0, 5), alone(5, 0, 5, 0), alone(5, 1, 5, 1), alone(6, 64, 6, 64)],
            70,
        ),
        ("padded", vec![alone(3, 7, 3, 7), alone(10, 10, 10, 10), alone(29, 1, 29, 1)], 31),
        ("decode", vec![alone(0, 1, 0, 63), alone(1, 5, 100, 130), alone(8, 1, 230, 1)], 9),
    ];
    lists.into_iter().filter_map(|(n, s, rows)| Some((n, Segments::new(s).ok()?, rows))).collect()
}

fn case(layout: &str, rows: usize, shift: Shift, norm: Norm, spec: HeadSpec) -> Case {
    let (heads, d, segments) = (spec.heads, spec.head_dim, spec.segments.len());
    let rope = if spec.rope.is_some() { "+rope" } else { "" };
    let name =
        format!("prepare_heads/shift {shift:?}+norm {norm:?}{rope}/{layout}/{rows}x{heads}/d{d}");
    let mut case = Case::new(name, move |tape, args| {
        let (shift, prev, norm) = (args.get("shift"), args.get("prev"), args.get("norm"));
        let y = tape.prepare_heads(args.var("u")?, shift, prev, norm, &spec)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("u", &[rows, heads * d]);
    if shift != Shift::None {
        case = case.normal("shift", &[rows, heads]);
    }
    if shift == Shift::Prev {
        case = case.normal("prev", &[segments, heads * d]);
    }
    match norm {
        Norm::None => case,
        Norm::PerHead => case.normal("norm", &[heads * d]),
        Norm::Shared => case.normal("norm", &[d]),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_layout_is_valid() {
        assert_eq!(super::layouts().len(), 5);
        assert_eq!(super::cases().len(), 5 * 18);
    }
}
