//! Rows of a table.

use crate::naive::{Matrix, Naive, axpy, int, matrix};
use crate::{EmbeddingOps, Result, Tensor};

impl EmbeddingOps for Naive {
    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
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
