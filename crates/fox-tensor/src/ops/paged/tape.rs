//! Attention over pages on the tape.

use crate::check::Operands;
use crate::tape::{Tape, Var};
use crate::{Error, PagedKeys, PagedSpec, Result, gathered_attention};

impl Tape<'_> {
    /// Attention of `q[R, H * d]` over pages, `[R, H * d]`; no gradients pass through it.
    pub fn paged_attention(
        &mut self,
        q: &Var,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> Result<Var> {
        const OP: &str = "paged_attention";
        Operands::new(OP, self.device.backend()).matrix("q", q.value())?;
        spec.check(q.value(), keys)?;
        if self.recording {
            return Err(Error::argument(OP, "gradients do not pass through pages"));
        }
        let o = match self.device.backend().caps().paged {
            Some(ops) => ops.paged_attention(q.value(), keys, spec)?,
            None => gathered_attention(q.value(), keys, spec)?,
        };
        Ok(Var::constant(o))
    }
}
