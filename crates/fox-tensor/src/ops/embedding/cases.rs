//! Embeddings, with and without a row that is not trained.

use crate::cases::{Case, Output};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        embedding(1, 1, 8, None),
        embedding(113, 17, 40, None),
        embedding(113, 17, 40, Some(3)),
        embedding(799, 5, 3, Some(0)),
        embedding(7, 1000, 64, None),
    ]
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
