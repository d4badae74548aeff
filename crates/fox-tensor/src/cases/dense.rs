//! Linear layers, embeddings and the loss.

use super::{Case, Output, Rng};
use crate::IGNORE_LABEL;

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

pub(super) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        LINEAR.iter().flat_map(|&shape| [linear(shape, false), linear(shape, true)]).collect();
    cases.push(linear_twice());
    cases.extend([group(1, 40, [3, 5, 2]), group(113, 203, [4, 4, 4]), group(799, 24, [1, 7, 16])]);
    cases.extend([
        embedding(1, 1, 8, None),
        embedding(113, 17, 40, None),
        embedding(113, 17, 40, Some(3)),
        embedding(799, 5, 3, Some(0)),
        embedding(7, 1000, 64, None),
    ]);
    for vocab in [1, 2, 3, 17, 64, 257, 1000] {
        cases.push(loss(13, 24, vocab, 0.3));
    }
    cases.extend([
        loss(1, 8, 5, 0.0),
        loss(113, 40, 203, 0.1),
        loss(799, 3, 65, 0.5),
        loss(7, 16, 33, 1.0),
    ]);
    cases.push(loss_twice());
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

fn embedding(rows: usize, vocab: usize, width: usize, pad: Option<usize>) -> Case {
    let kind = if pad.is_some() { "pad" } else { "plain" };
    let case = Case::new(format!("embedding/{kind}/{rows}/{vocab}x{width}"), move |tape, args| {
        let (table, ids) = (args.var("table")?, args.tensor("ids")?);
        let once = tape.embedding(table, ids, pad)?;
        let twice = tape.embedding(table, ids, pad)?;
        Ok(vec![Output::Var("once", once), Output::Var("twice", twice)])
    });
    let mut rng = case.stream("ids");
    let ids = (0..rows).map(|_| rng.between(0, vocab - 1) as i32).collect();
    case.normal("table", &[vocab, width]).int("ids", &[rows], ids)
}

fn loss_labels(rng: &mut Rng, rows: usize, vocab: usize, ignored: f64) -> Vec<i32> {
    (0..rows)
        .map(|_| {
            let label = rng.between(0, vocab - 1) as i32;
            if rng.chance(ignored) { IGNORE_LABEL } else { label }
        })
        .collect()
}

fn loss(rows: usize, width: usize, vocab: usize, ignored: f64) -> Case {
    let name = format!("linear_cross_entropy/ignored {ignored}/{rows}x{width}/v{vocab}");
    let case = Case::new(name, |tape, args| {
        let (x, w) = (args.var("x")?, args.var("w")?);
        let (labels, weights) = (args.tensor("labels")?, args.tensor("weights")?);
        let loss = tape.linear_cross_entropy(x, w, labels, weights)?;
        let backend = tape.device().backend();
        let quiet = backend.linear_cross_entropy(x.value(), w.value(), labels, None)?;
        Ok(vec![
            Output::Loss("loss", loss, weights.clone()),
            Output::Plain("loss without gradient", quiet.loss.to_f64()?),
        ])
    });
    let mut rng = case.stream("labels");
    let labels = loss_labels(&mut rng, rows, vocab, ignored);
    let weights = rng.normals(rows);
    case.normal("x", &[rows, width])
        .normal("w", &[vocab, width])
        .int("labels", &[rows], labels)
        .constant("weights", &[rows], weights)
}

/// Two losses on one projection, as micro-batches accumulate.
fn loss_twice() -> Case {
    let case = Case::new("linear_cross_entropy/twice/65x16/v40", |tape, args| {
        let (x, w) = (args.var("x")?, args.var("w")?);
        let (labels, weights) = (args.tensor("labels")?, args.tensor("weights")?);
        let first = tape.linear_cross_entropy(x, w, labels, weights)?;
        let second = tape.linear_cross_entropy(x, w, labels, weights)?;
        Ok(vec![
            Output::Loss("first", first, weights.clone()),
            Output::Loss("second", second, weights.clone()),
        ])
    });
    let mut rng = case.stream("labels");
    let labels = loss_labels(&mut rng, 65, 40, 0.2);
    let weights = rng.normals(65);
    case.normal("x", &[65, 16]).normal("w", &[40, 16]).int("labels", &[65], labels).constant(
        "weights",
        &[65],
        weights,
    )
}
