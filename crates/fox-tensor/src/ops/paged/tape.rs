//! Attention over pages on the tape.

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
        if self.recording {
            return Err(Error::argument("paged_attention", "gradients do not pass through pages"));
        }
        let o = match self.device.backend().caps().paged {
            Some(ops) => ops.paged_attention(q.value(), keys, spec)?,
            None => gathered_attention(q.value(), keys, spec)?,
        };
        Ok(Var::constant(o))
    }
}
