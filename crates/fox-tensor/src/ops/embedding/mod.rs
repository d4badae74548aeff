//! Rows of a table, and the gradient that goes back to them.

pub(crate) mod cases;
mod naive;
mod tape;

use crate::{Result, Tensor};

/// A device's embeddings: `V` rows of width `C`.
pub trait EmbeddingOps {
    /// Rows of `table[V, C]` for `ids[R]`; every id was checked to be in range.
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
