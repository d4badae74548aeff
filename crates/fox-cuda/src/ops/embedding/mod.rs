//! Embedding lookup, and its gradient in fixed order.

use std::collections::BTreeMap;

use fox_tensor::{EmbeddingOps, Tensor};

use crate::backend::Cuda;
use crate::backend::launcher::{Op, Variant, plain_variants};
use crate::backend::storage::{Groups, expect_f32, memory};
use crate::params::{ConstPtr, Ptr, Real, int, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const EMBEDDING: Source = source!("embedding", [], [EmbeddingForward, EmbeddingBackward]);

kernel_params! {
    list struct EmbeddingForward {
        /// `[R, C]`.
        y: Ptr<Real>,
        /// `[V, C]`.
        table: ConstPtr<f32>,
        /// `[R]`.
        ids: ConstPtr<i32>,
        /// `R * C`.
        count: u64,
        width: usize,
    }

    list struct EmbeddingBackward {
        /// `[V, C]`, added to.
        dtable: Ptr<f32>,
        /// `[R, C]`.
        dy: ConstPtr<Real>,
        /// (id, first, end) of each id that occurs, as indices into `order`.
        groups: ConstPtr<i32>,
        /// Rows by id `[R]`.
        order: ConstPtr<i32>,
        width: usize,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(EMBEDDING)
}

impl Cuda {
    /// # Safety
    /// `table` must be a live f32 matrix that has this row of `width` values.
    unsafe fn row_copy(&self, table: u64, row: usize, width: usize) -> Result<crate::Buffer<f32>> {
        let copy = self.gpu.alloc::<f32>(width)?;
        // SAFETY: the caller's promise.
        unsafe { self.gpu.copy(copy.address(), table + (4 * row * width) as u64, 4 * width)? };
        Ok(copy)
    }

    /// Rows grouped by id, on the host, which has a copy of the ids.
    fn groups(&self, ids: &Tensor) -> Result<std::sync::Arc<Groups>> {
        memory(ids)?.groups(|| {
            let host = self.ints(ids)?;
            let mut rows: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
            let index = |row| int("embedding_bwd", "row", row);
            for (row, &id) in host.iter().enumerate() {
                rows.entry(id).or_default().push(index(row)?);
            }
            let (mut groups, mut order) = (Vec::new(), Vec::with_capacity(host.len()));
            for (id, rows) in &rows {
                groups.extend([*id, index(order.len())?, index(order.len() + rows.len())?]);
                order.extend(rows);
            }
            let count = rows.len();
            Ok(Groups { groups: self.gpu.upload(&groups)?, count, order: self.gpu.upload(&order)? })
        })
    }
}

impl EmbeddingOps for Cuda {
    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_embedding_fwd(self, table, ids)?;
        let _span = self.span("embedding fwd")?;
        let (width, dtype) = (table.cols(), self.activations());
        let (y, at) = self.output([ids.len(), width], dtype, table.device())?;
        let table = self.real(table)?;
        let ids = memory(ids)?.data.address();
        let params = EmbeddingForward {
            y: at.into(),
            table: table.address().into(),
            ids: ids.into(),
            count: y.len() as u64,
            width,
        };
        // SAFETY: shapes and every id are validated at entry.
        unsafe {
            let variant = Variant::plain(dtype, width);
            self.launch_flat(EMBEDDING, "embedding_fwd", variant, y.len(), params)?;
        }
        Ok(y)
    }

    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_embedding_bwd(self, dy, ids, vocab, acc.as_ref())?;
        acc.iter().try_for_each(|acc| expect_f32("embedding_bwd", "acc", acc))?;
        // A pad outside of the vocabulary matches no id.
        let pad = pad.filter(|&pad| pad < vocab);
        let _span = self.span("embedding bwd")?;
        let (width, dtype) = (dy.cols(), self.activations());
        let groups = self.groups(ids)?;
        // The gradient of the pad row stays as it is.
        let (dtable, at) = self.sum_in_place(acc, [vocab, width], dy.device())?;
        let before = match pad {
            // SAFETY: the table has `vocab` rows, more than `pad`.
            Some(pad) => Some((pad, unsafe { self.row_copy(at, pad, width)? })),
            None => None,
        };
        let dy = self.activation(dy)?;
        let variant = Variant::plain(dtype, width);
        let threads = width.div_ceil(variant.vec).next_multiple_of(32).min(256);
        let params = EmbeddingBackward {
            dtable: at.into(),
            dy: dy.address().into(),
            groups: groups.groups.address().into(),
            order: groups.order.address().into(),
            width,
        };
        let grid = [groups.count, width.div_ceil(threads * variant.vec)];
        let op = Op::new(EMBEDDING, "embedding_bwd", variant, grid, threads);
        // SAFETY: shapes and every id are validated at entry.
        unsafe { self.launch(&op, params)? };
        if let Some((pad, row)) = before {
            // SAFETY: the row lies inside the table.
            unsafe { self.gpu.copy(at + (4 * pad * width) as u64, row.address(), 4 * width)? };
        }
        Ok(dtable)
    }
}
