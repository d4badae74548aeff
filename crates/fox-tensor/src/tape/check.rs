//! Checks of operands that the ops share.

use super::Tape;
use crate::{DType, Error, IdRange, Result, Tensor};

impl Tape<'_> {
    pub(crate) fn check(
        &self,
        op: &'static str,
        what: &'static str,
        x: &Tensor,
        dims: &[usize],
    ) -> Result<()> {
        x.expect_device(op, what, &self.device)?;
        x.expect_real(op, what)?;
        x.expect_shape(op, what, dims)
    }

    /// Weights of every head, `[width]`, or one head's that all share, `[d]`.
    pub(crate) fn check_head_weights(
        &self,
        op: &'static str,
        what: &'static str,
        w: &Tensor,
        d: usize,
        width: usize,
    ) -> Result<()> {
        let dims = if w.dims() == [d] { d } else { width };
        self.check(op, what, w, &[dims])
    }

    pub(crate) fn check_matrix(
        &self,
        op: &'static str,
        what: &'static str,
        x: &Tensor,
    ) -> Result<()> {
        x.expect_device(op, what, &self.device)?;
        x.expect_real(op, what)?;
        if x.shape().rank() != 2 {
            return Err(Error::Shape {
                op,
                what,
                got: x.shape(),
                expected: "two dimensions".into(),
            });
        }
        Ok(())
    }

    /// Token ids index memory, so every one is looked at before an op trusts it.
    pub(crate) fn check_ids(
        &self,
        op: &'static str,
        what: &'static str,
        ids: &Tensor,
        range: IdRange,
    ) -> Result<()> {
        ids.expect_device(op, what, &self.device)?;
        ids.expect_type(op, what, DType::I32)?;
        if let Some(bad) = self.device.backend().id_out_of_range(ids, range)? {
            return Err(Error::argument(
                op,
                format!("{what} hold {bad}, but the vocabulary has {} entries", range.vocab),
            ));
        }
        Ok(())
    }
}
