//! Embedding lookup.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Matrix, Naive, axpy, int, matrix};
use crate::tape::{Tape, Var};
use crate::{Backend, IdRange, Result, Shape, Tensor};

/// Embedding lookups on a device: a table of `V` rows of width `C`.
pub trait EmbeddingOps {
    /// Rows of `table[V, C]` for `ids[R]`.
    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor>;
    /// `dtable[V, C] = sum over rows r with ids[r] = v of dy[r]`, plus `acc`. Row `pad`, if given,
    /// gets no gradient.
    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor>;
}

/// Validates the operands of [`EmbeddingOps::embedding_fwd`].
pub fn check_embedding_fwd(backend: &dyn Backend, table: &Tensor, ids: &Tensor) -> Result<()> {
    let operands = Operands::new("embedding", backend);
    let (vocab, width) = operands.matrix("table", table)?;
    operands.require(width > 0, || "the table has no columns".into())?;
    operands.ids("ids", ids, IdRange { vocab, ignore: None })
}

/// Validates the operands of [`EmbeddingOps::embedding_bwd`].
pub fn check_embedding_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    ids: &Tensor,
    vocab: usize,
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("embedding_bwd", backend);
    let (_, width) = operands.matrix("dy", dy)?;
    operands.real("dy", dy, &[ids.len(), width])?;
    operands.require(width > 0 && Shape::checked_len(&[vocab, width]).is_some(), || {
        format!("a table of {vocab} rows and {width} columns")
    })?;
    operands.maybe("acc", acc, &[vocab, width])?;
    operands.ids("ids", ids, IdRange { vocab, ignore: None })
}

impl Tape<'_> {
    /// Rows of `table[V, C]` for `ids[R]`; the row `pad`, if given, gets no gradient.
    pub fn embedding(&mut self, table: &Var, ids: &Tensor, pad: Option<usize>) -> Result<Var> {
        let y = self.device.backend().embedding_fwd(table.value(), ids)?;
        let out = self.output(y, table.needs_grad());
        let (slot, out_slot, vocab) = (table.slot, out.slot, table.value().rows());
        let (device, ids) = (self.device.clone(), ids.clone());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            flow.update(slot, |acc| device.backend().embedding_bwd(&dy, &ids, vocab, pad, acc))
        });
        Ok(out)
    }
}

impl EmbeddingOps for Naive {
    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        check_embedding_fwd(self, table, ids)?;
        let y = forward(matrix(table)?, int(ids)?);
        Ok(self.tensor(table.device(), y, [ids.len(), table.cols()]))
    }

    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_embedding_bwd(self, dy, ids, vocab, acc.as_ref())?;
        let dtable = backward(matrix(dy)?, int(ids)?, vocab, pad);
        self.plus(acc, self.tensor(dy.device(), dtable, [vocab, dy.cols()]))
    }
}

/// `y[r] = table[ids[r]]`.
fn forward(table: Matrix<'_>, ids: &[i32]) -> Vec<f64> {
    ids.iter().flat_map(|&id| table.row(id as usize).iter().copied()).collect()
}

/// `dtable[v] = sum over r with ids[r] = v of dy[r]`, nothing for row `pad`.
fn backward(dy: Matrix<'_>, ids: &[i32], vocab: usize, pad: Option<usize>) -> Vec<f64> {
    let mut dtable = vec![0.0; vocab * dy.cols];
    for (r, &id) in ids.iter().enumerate() {
        if pad != Some(id as usize) {
            axpy(&mut dtable[id as usize * dy.cols..][..dy.cols], 1.0, dy.row(r));
        }
    }
    dtable
}

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
    let mut rng = case.rng("ids");
    let ids = (0..rows).map(|_| rng.between(0, vocab - 1) as i32).collect();
    case.normal("table", &[vocab, width]).int("ids", &[rows], ids)
}
