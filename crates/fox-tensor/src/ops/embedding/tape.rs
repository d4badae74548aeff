//! Embeddings on the tape.

use crate::tape::{Tape, Var};
use crate::{IdRange, Result, Tensor};

impl Tape<'_> {
    /// Rows of `table[V, C]` for `ids[R]`; the row `pad`, if given, gets no gradient.
    pub fn embedding(&mut self, table: &Var, ids: &Tensor, pad: Option<usize>) -> Result<Var> {
        const OP: &str = "embedding";
        self.check_matrix(OP, "table", table.value())?;
        self.check_ids(OP, "ids", ids, IdRange { vocab: table.value().rows(), ignore: None })?;
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
