//! Cases of one whole layer.

use super::{Args, Case, Output, Rng, round};
use crate::{
    Acp, Activation, AttentionSpec, Error, HeadSpec, IGNORE_LABEL, Result, Segments, Tape, Var,
};

const ROWS: usize = 24;
const HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const WIDTH: usize = HEADS * HEAD_DIM;
const VOCAB: usize = 19;
const INNER: usize = 20;

pub(super) fn cases() -> Vec<Case> {
    vec![layer(false), layer(true)]
}

/// Embedding, one FoX (Pro) layer, loss; with or without activation checkpointing.
fn layer(checkpoint: bool) -> Case {
    let kind = if checkpoint { "checkpointed" } else { "plain" };
    let case = Case::new(format!("composed/{kind}/{ROWS}x{WIDTH}"), move |tape, args| {
        let h = tape.embedding(args.var("table")?, args.tensor("ids")?, None)?;
        let mut inputs = vec![h];
        for name in WEIGHTS {
            inputs.push(args.var(name.0)?.clone());
        }
        let outputs =
            if checkpoint { tape.checkpoint(&inputs, block)? } else { block(tape, &inputs)? };
        loss(tape, args, &outputs)
    });
    // The two variants have the same inputs, so their results can be compared.
    let mut rng = Rng::new(7);
    let mut case =
        Case { seed: 7, ..case }.real("table", &[VOCAB, WIDTH], rng.normals(VOCAB * WIDTH));
    let ids = (0..ROWS).map(|_| rng.between(0, VOCAB - 1) as i32).collect();
    let labels = (0..ROWS)
        .map(|r| if r % 5 == 4 { IGNORE_LABEL } else { rng.between(0, VOCAB - 1) as i32 })
        .collect();
    for (name, rows, cols) in WEIGHTS {
        let data = rng.normals(rows * cols).iter().map(|x| round(x * 0.5)).collect();
        let shape = if rows == 1 { vec![cols] } else { vec![rows, cols] };
        case = case.real(name, &shape, data);
    }
    case.normal("final_norm", &[WIDTH])
        .int("ids", &[ROWS], ids)
        .int("labels", &[ROWS], labels)
        .constant("weights", &[ROWS], vec![0.125; ROWS])
}

/// Weights of the layer: name, rows (1 for a vector), columns. In the order that [`block`] reads.
const WEIGHTS: [(&str, usize, usize); 12] = [
    ("attn_norm", 1, WIDTH),
    ("wq", WIDTH, WIDTH),
    ("wk", WIDTH, WIDTH),
    ("wv", WIDTH, WIDTH),
    ("shift", HEADS, WIDTH),
    ("k_norm", 1, HEAD_DIM),
    ("fgate", HEADS, WIDTH),
    ("fgate_bias", 1, HEADS),
    ("ogate", WIDTH, WIDTH),
    ("o_norm", 1, WIDTH),
    ("mlp_norm", 1, WIDTH),
    ("w_up", 2 * INNER, WIDTH),
];

/// `[h, weights...]` to `[h after attention, MLP's inner activation]`.
fn block(tape: &mut Tape<'static>, inputs: &[Var]) -> Result<Vec<Var>> {
    let [h, attn_norm, wq, wk, wv, shift, k_norm, fgate, fgate_bias, ogate, o_norm, mlp_norm, w_up] =
        inputs
    else {
        return Err(Error::argument("case", "a layer has 13 inputs"));
    };
    let segments = Segments::packed(&[0, 9, 10, 24])?;
    let heads = HeadSpec {
        heads: HEADS,
        head_dim: HEAD_DIM,
        norm_eps: 1e-5,
        rope: None,
        segments: segments.clone(),
    };
    let (h, x) = tape.add_rms_norm(h, None, attn_norm, 1e-6)?;
    let (q, k, v) =
        (tape.linear(&x, wq, None)?, tape.linear(&x, wk, None)?, tape.linear(&x, wv, None)?);
    let alpha = tape.linear(&x, shift, None)?;
    let k = tape.prepare_heads(&k, Some(&alpha), None, Some(k_norm), &heads)?;
    let v = tape.prepare_heads(&v, Some(&alpha), None, None, &heads)?;
    let z = tape.linear(&x, fgate, None)?;
    let gates = tape.log_gate(Some(&z), Some(fgate_bias), ROWS)?;
    let spec =
        AttentionSpec { acp: Acp::auto(), ..AttentionSpec::causal(HEADS, HEAD_DIM, segments) };
    let (o, _) = tape.attention(&q, &k, &v, Some(&gates), &spec)?;
    let gate = tape.linear(&x, ogate, None)?;
    let y = tape.gated_norm(&o, Some(o_norm), Some(&gate), HEADS, 1e-6, Activation::Sigmoid)?;
    let (h, x) = tape.add_rms_norm(&h, Some(&y), mlp_norm, 1e-6)?;
    let up = tape.linear(&x, w_up, None)?;
    Ok(vec![h, tape.glu(&up, Activation::Silu)?])
}

fn loss(tape: &mut Tape<'static>, args: &Args<'_>, outputs: &[Var]) -> Result<Vec<Output>> {
    let [h, inner] = outputs else {
        return Err(Error::argument("case", "a layer has 2 outputs"));
    };
    // Tied embeddings: the gradient of the table has two terms.
    let (_, x) = tape.add_rms_norm(h, None, args.var("final_norm")?, 1e-6)?;
    let weights = args.tensor("weights")?;
    let table = args.var("table")?;
    let loss = tape.linear_cross_entropy(&x, table, args.tensor("labels")?, weights)?;
    Ok(vec![Output::Loss("loss", loss, weights.clone()), Output::Var("inner", inner.clone())])
}
