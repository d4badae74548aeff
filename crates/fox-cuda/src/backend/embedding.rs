//! Rows of a table by token id, and their gradient in fixed order.

use std::collections::BTreeMap;

use fox_tensor::Tensor;

use super::launcher::{Op, Variant};
use super::storage::{Groups, memory};
use super::{Cuda, int};
use crate::{Result, Source};

impl Cuda {
    pub(super) fn look_up(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (width, dtype) = (table.cols(), self.activations());
        let (y, at) = self.output([ids.len(), width], dtype, table.device())?;
        let table = self.real(table)?;
        let ids = memory(ids)?.data.address();
        let args =
            [at.into(), table.address().into(), ids.into(), y.len().into(), int(width).into()];
        // SAFETY: parameters as declared in elementwise.cu; the tape checked every id.
        unsafe {
            let variant = Variant::plain(dtype, width);
            self.launch_flat(Source::ELEMENTWISE, "embedding_fwd", variant, y.len(), &args)?;
        }
        Ok(y)
    }

    pub(super) fn look_up_gradient(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let (width, dtype) = (dy.cols(), self.activations());
        let groups = self.groups(ids)?;
        // The pad's row keeps what it had: nothing.
        let (dtable, at) = self.sum_in_place(acc, [vocab, width], dy.device())?;
        let before = match pad {
            Some(pad) => Some((pad, self.row_copy(at, pad, width)?)),
            None => None,
        };
        let dy = self.activation(dy)?;
        let variant = Variant::plain(dtype, width);
        let threads = width.div_ceil(variant.vec).next_multiple_of(32).min(256);
        let args = [
            at.into(),
            dy.address().into(),
            groups.groups.address().into(),
            groups.order.address().into(),
            int(width).into(),
        ];
        let op = Op {
            source: Source::ELEMENTWISE,
            entry: "embedding_bwd",
            variant,
            grid: [groups.count, width.div_ceil(threads * variant.vec)],
            block: threads,
            shared: 0,
            args: &args,
        };
        // SAFETY: parameters as declared in elementwise.cu; the tape checked every id.
        unsafe { self.launch(&op)? };
        if let Some((pad, row)) = before {
            // SAFETY: the row lies inside the table.
            unsafe { self.gpu.copy(at + (4 * pad * width) as u64, row.address(), 4 * width)? };
        }
        Ok(dtable)
    }

    fn row_copy(&self, table: u64, row: usize, width: usize) -> Result<crate::Buffer<f32>> {
        let copy = self.gpu.alloc::<f32>(width)?;
        // SAFETY: the row lies inside the table.
        unsafe { self.gpu.copy(copy.address(), table + (4 * row * width) as u64, 4 * width)? };
        Ok(copy)
    }

    /// Rows by id, sorted on the host, which has the ids anyway.
    fn groups(&self, ids: &Tensor) -> Result<std::sync::Arc<Groups>> {
        memory(ids)?.groups(|| {
            let host = self.ints(ids)?;
            let mut rows: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
            for (row, &id) in host.iter().enumerate() {
                rows.entry(id).or_default().push(int(row));
            }
            let (mut groups, mut order) = (Vec::new(), Vec::with_capacity(host.len()));
            for (id, rows) in &rows {
                groups.extend([*id, int(order.len()), int(order.len() + rows.len())]);
                order.extend(rows);
            }
            let count = rows.len();
            Ok(Groups { groups: self.gpu.upload(&groups)?, count, order: self.gpu.upload(&order)? })
        })
    }
}
