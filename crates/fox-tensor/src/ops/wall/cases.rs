//! Cases of Wall attention: shapes, decays, gates, windows, segments and past blocks.

use super::tape::WallVars;
use super::{WALL_BLOCK, WallBlock};
use crate::cases::{Case, Output, round};
use crate::{Acp, AttentionSpec, LogitBound, Result, Segment, Segments, Tensor, tile_counts};

/// Description of a case.
#[derive(Clone, Debug)]
struct WallCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Rows of the query and of the key tensors.
    rows: (usize, usize),
    segments: Vec<Segment>,
    window: Option<usize>,
    /// Mean log decay of a step; every channel has its own.
    rate: f64,
    gated: bool,
    /// Natural logarithm of the softmax mass that may be dropped; far below the tolerance of f32, because the oracle drops
    /// nothing.
    pruned: Option<f32>,
    label: &'static str,
}

fn one(q_len: usize, k_len: usize) -> WallCase {
    WallCase {
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        rows: (q_len, k_len),
        segments: vec![Segment { q_start: 0, q_len, k_start: 0, k_len }],
        window: None,
        rate: 0.05,
        gated: false,
        pruned: None,
        label: "",
    }
}

/// Documents one after the other.
fn packed(lengths: &[usize]) -> WallCase {
    let mut segments = Vec::new();
    let mut start = 0;
    for &len in lengths {
        segments.push(Segment { q_start: start, q_len: len, k_start: start, k_len: len });
        start += len;
    }
    WallCase { segments, rows: (start, start), label: "packed", ..one(0, 0) }
}

/// KV caches of different lengths with unused rows between them.
fn cached(queries: &[usize], keys: &[usize], room: usize) -> WallCase {
    let mut segments = Vec::new();
    let mut q_start = 0;
    for (b, (&q_len, &k_len)) in queries.iter().zip(keys).enumerate() {
        segments.push(Segment { q_start, q_len, k_start: b * room, k_len });
        q_start += q_len;
    }
    WallCase { segments, rows: (q_start, queries.len() * room), label: "cached", ..one(0, 0) }
}

pub(crate) fn cases() -> Vec<Case> {
    let descriptions = descriptions();
    // A test asserts that every description builds.
    let mut cases: Vec<Case> = descriptions.iter().filter_map(|case| case.build().ok()).collect();
    cases.extend([false, true].map(closed_blocks));
    cases
}

fn descriptions() -> Vec<WallCase> {
    let mut list = Vec::new();
    for len in [1, 2, 15, 16, 17, 33, 63, 64, 65, 130] {
        list.push(one(len, len));
    }
    for head_dim in [8, 40, 64, 128] {
        list.push(WallCase { head_dim, gated: true, ..one(67, 67) });
    }
    // Products over a block of 64: from 1 to far below the smallest f32.
    for rate in [0.0, 0.5, 2.0, 5.0, 1e4] {
        for gated in [false, true] {
            list.push(WallCase { rate, gated, ..one(200, 200) });
        }
    }
    for window in [1, 7, 64, 100] {
        list.push(WallCase { window: Some(window), ..one(150, 150) });
    }
    list.push(WallCase { gated: true, pruned: Some(-17.0), ..one(700, 700) });
    // Blocks of older spans, where kernels have them, and spans of these.
    list.push(WallCase {
        heads: 1,
        kv_heads: 1,
        head_dim: 128,
        rate: 0.003,
        gated: true,
        ..one(1100, 1100)
    });
    for (q_len, k_len) in [(1, 1), (1, 64), (1, 65), (3, 199), (7, 130), (64, 128), (63, 129)] {
        list.push(WallCase { heads: 4, gated: true, rate: 0.5, ..one(q_len, k_len) });
    }
    list.push(WallCase { heads: 4, rate: 2.0, gated: true, ..packed(&[0, 64, 1, 0, 65, 103, 1]) });
    list.push(WallCase { heads: 4, kv_heads: 1, ..packed(&[17, 80]) });
    let window = Some(40);
    list.push(WallCase { window, gated: true, ..cached(&[1, 1, 0, 9], &[1, 63, 7, 130], 131) });
    list
}

impl WallCase {
    fn name(&self) -> String {
        let WallCase { heads, kv_heads, head_dim, rows, window, rate, gated, label, .. } = self;
        let label = if self.pruned.is_some() { "pruned " } else { label };
        let gated = if *gated { "+gates" } else { "" };
        let window = window.map_or(String::new(), |window| format!("+window {window}"));
        let (q, k) = rows;
        format!("wall/{rate} nats{gated}{window}/{label}{q}x{k}/h{heads}:{kv_heads}/d{head_dim}")
    }

    fn build(&self) -> Result<Case> {
        let spec = AttentionSpec {
            kv_heads: self.kv_heads,
            window: self.window,
            acp: self.pruned.map_or(Acp::Off, |log_tolerance| Acp::On {
                log_tolerance,
                bound: LogitBound::Norms,
            }),
            ..AttentionSpec::causal(
                self.heads,
                self.head_dim,
                Segments::new(self.segments.clone())?,
            )
        };
        let case = Case::new(self.name(), move |tape, args| {
            let vars = WallVars {
                q: args.var("q")?,
                k: args.var("k")?,
                v: args.var("v")?,
                log_decays: args.var("log_decays")?,
                log_gates: args.get("log_gates"),
            };
            let (o, tiles) = tape.wall_attention(&vars, &[], &spec)?;
            let mut outputs = vec![Output::Var("o", o)];
            if matches!(spec.acp, Acp::Off) {
                let counts = tile_counts(&tiles)?.into_iter().flatten().map(|n| n as f64).collect();
                outputs.push(Output::Plain("tiles", counts));
            }
            Ok(outputs)
        });
        let (width, kv_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let case = case
            .normal("q", &[self.rows.0, width])
            .normal("k", &[self.rows.1, kv_width])
            .normal("v", &[self.rows.1, kv_width]);
        let decays = log_decays(&case, self.rows.1 * width, self.rate);
        let case = case.real("log_decays", &[self.rows.1, width], decays);
        if !self.gated {
            return Ok(case);
        }
        let mut rng = case.rng("log_gates");
        let gates = (0..self.rows.1 * self.heads).map(|_| round(-0.2 * rng.uniform())).collect();
        Ok(case.real("log_gates", &[self.rows.1, self.heads], gates))
    }
}

/// Cases of more than one wave of thread blocks.
pub fn large_wall() -> Vec<Case> {
    let pair = WallCase { heads: 16, kv_heads: 16, head_dim: 64, ..packed(&[2050, 2050]) };
    let grouped = WallCase { kv_heads: 4, head_dim: 128, rate: 0.5, gated: true, ..pair.clone() };
    // One key head for each query head: older blocks go through other kernels on some GPUs.
    let wide = WallCase { heads: 8, kv_heads: 8, ..grouped.clone() };
    [pair, wide, grouped].iter().filter_map(|case| case.build().ok()).collect()
}

/// Log decays of this mean.
fn log_decays(case: &Case, len: usize, rate: f64) -> Vec<f64> {
    let mut rng = case.rng("log_decays");
    (0..len).map(|_| round(-2.0 * rate * rng.uniform())).collect()
}

/// Two closed blocks and an open one of 20 keys, the last 7 of which are queries.
fn closed_blocks(gated: bool) -> Case {
    const OPEN: usize = 20;
    const QUERIES: usize = 7;
    let (heads, d, keys) = (4, 16, 2 * WALL_BLOCK + OPEN);
    let name = format!("wall/closed blocks{}", if gated { "+gates" } else { "" });
    let case = Case::new(name, move |tape, args| {
        let segment = Segment { q_start: 0, q_len: QUERIES, k_start: 0, k_len: OPEN };
        let spec = AttentionSpec {
            kv_heads: 2,
            ..AttentionSpec::causal(heads, d, Segments::new(vec![segment])?)
        };
        let [q, k, v, decays] =
            [args.tensor("q")?, args.tensor("k")?, args.tensor("v")?, args.tensor("log_decays")?];
        let gates = args.get("log_gates").map(|gates| gates.value());
        let backend = tape.device().backend();
        let mut blocks = Vec::new();
        for n in 0..2 {
            let rows = |x: &Tensor| x.slice_rows(n * WALL_BLOCK, WALL_BLOCK);
            let (closed, decay) = backend.wall_close_block(&rows(k)?, &rows(decays)?, d)?;
            blocks.push((closed, rows(v)?, decay, gates.map(rows).transpose()?));
        }
        let past = blocks.iter().map(|(k, v, decay, log_gates)| {
            let log_gates = log_gates.as_ref();
            WallBlock { k, v, decay, log_gates }
        });
        let open = |x: &Tensor| x.slice_rows(2 * WALL_BLOCK, OPEN);
        let (k, v, decays) = (open(k)?, open(v)?, open(decays)?);
        let gates = gates.map(open).transpose()?;
        let inputs =
            super::WallInputs { q, k: &k, v: &v, log_decays: &decays, log_gates: gates.as_ref() };
        let out = backend.wall_attention_fwd(&inputs, &[past.collect()], &spec)?;
        Ok(vec![Output::Plain("o", out.o.to_f64()?), Output::Plain("lse", out.lse.to_f64()?)])
    });
    let q = case.rng("q").normals(QUERIES * heads * d);
    let (k, v) = (case.rng("k").normals(keys * 2 * d), case.rng("v").normals(keys * 2 * d));
    let decays = log_decays(&case, keys * heads * d, 0.1);
    let case = case
        .constant("q", &[QUERIES, heads * d], q)
        .constant("k", &[keys, 2 * d], k)
        .constant("v", &[keys, 2 * d], v)
        .constant("log_decays", &[keys, heads * d], decays);
    if !gated {
        return case;
    }
    let mut rng = case.rng("log_gates");
    let gates = (0..keys * heads).map(|_| round(-0.1 * rng.uniform())).collect();
    case.constant("log_gates", &[keys, heads], gates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_description_builds() {
        assert_eq!(large_wall().len(), 3);
        for description in descriptions() {
            description.build().unwrap();
        }
    }
}
