//! Attention with sinks that take little, much, and nearly all.

use crate::cases::{Case, Output};
use crate::{AttentionSpec, Segment, Segments};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        sinks(1, (1, 1, 8), &[0, 1], [0.0; 2]),
        sinks(65, (2, 1, 24), &[0, 65], [0.5, -1.0]),
        sinks(130, (4, 2, 64), &[0, 3, 100, 130], [2.0, -2.0]),
        // Rows before the first sequence see nothing.
        sinks(70, (2, 2, 16), &[9, 40, 70], [8.0, -40.0]),
        sinks(113, (3, 3, 40), &[0, 113], [30.0, 0.0]),
        sinks(203, (2, 2, 128), &[0, 203], [1.0, 3.0]),
    ]
}

/// Causal attention over packed sequences; the sinks of the heads have these two values in turn.
fn sinks(
    rows: usize,
    (heads, kv_heads, d): (usize, usize, usize),
    starts: &'static [usize],
    values: [f64; 2],
) -> Case {
    let name = format!("sink_attention/{values:?}/{rows}x{heads}:{kv_heads}/d{d}");
    let case = Case::new(name, move |tape, args| {
        let segment = |w: &[usize]| {
            let (start, len) = (w[0], w[1] - w[0]);
            Segment { q_start: start, q_len: len, k_start: start, k_len: len }
        };
        let segments = Segments::new(starts.windows(2).map(segment).collect())?;
        let spec = AttentionSpec { kv_heads, ..AttentionSpec::causal(heads, d, segments) };
        let keys = [args.var("q")?, args.var("k")?, args.var("v")?];
        let (gates, sinks) = (args.var("log_gates")?, args.var("sinks")?);
        let (o, _) = tape.sink_attention(keys, Some(gates), sinks, &spec)?;
        Ok(vec![Output::Var("o", o)])
    });
    let gates: Vec<f64> =
        case.stream("gates").normals(rows * heads).iter().map(|x| -x.abs() / 8.0).collect();
    let gates = gates.into_iter().map(crate::cases::round).collect();
    case.normal("q", &[rows, heads * d])
        .normal("k", &[rows, kv_heads * d])
        .normal("v", &[rows, kv_heads * d])
        .real("log_gates", &[rows, heads], gates)
        .real("sinks", &[heads], (0..heads).map(|h| values[h % 2]).collect())
}
