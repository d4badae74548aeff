//! The oracle: pages hold the log gates, as on a GPU, and attention reads them there.

use std::ops::Range;

use super::gathered::gathered;
use super::{
    NewKeys, PAGE, PageMut, PagedKeys, PagedOps, PagedSpec, Slab, check_write_pages, copy_to_pages,
    held_pages, host_gate_totals, page_parts, unwritable,
};
use crate::naive::{Naive, Values, matrix, real, values_mut};
use crate::{Result, Tensor, check_paged_attention};

impl PagedOps for Naive {
    fn gates_in_pages(&self) -> bool {
        true
    }

    fn slab_pages(&self) -> Option<usize> {
        // Pages that share a slab, for tests of who holds them; the oracle writes to slabs of one page alone.
        self.has_optional_ops().then_some(2)
    }

    fn gate_totals(&self, log_gates: &[&Tensor], ranges: &[Range<usize>]) -> Result<Vec<f64>> {
        host_gate_totals(self, log_gates, ranges)
    }

    fn write_pages(&self, new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()> {
        check_write_pages(self, new, keys, first)?;
        copy_to_pages(new, keys, first)?;
        let Some(gates) = new.log_gates else { return Ok(()) };
        let gates = matrix(gates)?;
        let group = keys.shape().group;
        for head in 0..keys.shape().kv_heads {
            for part in page_parts(first, new.count) {
                let page = keys.page_mut(head, part.index);
                let Some(PageMut { slab: Slab { gates: Some(own), .. }, place }) = page else {
                    return Err(unwritable(part.index));
                };
                let Values::Real(own) = values_mut(own)? else { continue };
                let own = &mut own[place * group * PAGE..];
                for (t, slot) in part.slots.enumerate() {
                    let row = gates.head(new.row + part.before + t, head, group);
                    row.iter().enumerate().for_each(|(g, gate)| own[g * PAGE + slot] = *gate);
                }
            }
        }
        Ok(())
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
        check_paged_attention(self, q, keys, spec)?;
        gathered(q, keys, spec, gates_of_pages)
    }
}

/// The log gates `[group][kept]` of a head.
fn gates_of_pages(keys: &dyn PagedKeys, head: usize) -> Result<Vec<f64>> {
    let kept = keys.seen() - keys.first(head);
    let group = keys.shape().group;
    let mut gates = Vec::with_capacity(group * kept);
    for g in 0..group {
        let mut left = kept;
        for page in held_pages(keys, head) {
            let Some(own) = &page.slab.gates else { continue };
            gates.extend(&real(own)?[(page.place * group + g) * PAGE..][..left.min(PAGE)]);
            left -= left.min(PAGE);
        }
    }
    Ok(gates)
}
