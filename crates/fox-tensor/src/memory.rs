//! A device's memory: room for tensors, values in and out, copies and sums.

use std::any::Any;
use std::sync::Arc;

use crate::{DType, Result, Tensor};

/// Memory that belongs to a backend.
pub trait Storage: Any + Send + Sync {
    /// For looking at it as the backend's own type.
    fn as_any(&self) -> &dyn Any;
    /// For writing to it as the backend's own type.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Held by live tensors and scratch.
    pub in_use: usize,
    /// The most that was ever in use at once.
    pub peak: usize,
    /// Taken from the system, in use or kept for reuse.
    pub reserved: usize,
}

/// Which token ids, or labels, an op takes: `0..vocab`, and one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// An id besides that means none.
    pub ignore: Option<i32>,
}

impl IdRange {
    /// Whether the range holds this id.
    pub fn allows(&self, id: i32) -> bool {
        usize::try_from(id).is_ok_and(|id| id < self.vocab) || self.ignore == Some(id)
    }
}

/// A device's memory.
pub trait Memory {
    /// Memory counters.
    fn memory(&self) -> MemoryStats;
    /// Bytes that can still be taken, where the device knows.
    fn free_memory(&self) -> Option<usize> {
        None
    }
    /// Lets the peak start again from what is in use now.
    fn reset_peak(&self);

    /// Room for `len` elements, contents unspecified.
    fn alloc(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>>;
    /// Host values to the device.
    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>>;
    /// Host values to the device, rounded to what it computes in.
    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>>;
    /// Host integers to the device.
    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>>;
    /// Real values to the host; `out` has the tensor's length.
    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()>;
    /// Real values to the host, in full precision.
    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>>;
    /// Integers to the host.
    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>>;
    /// Sets every element. A shared tensor gets storage of its own first.
    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()>;
    /// Copies `count` rows of equal width. A shared `dst` gets storage of its own first.
    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()>;

    /// Copies columns `column .. column + d` of `count` rows from `(row, column)` on into rows of `dst`
    /// `[.., d]`, where `d` divides `column` and the width of `src`. A shared `dst` gets storage of its
    /// own first.
    fn copy_columns(
        &self,
        src: &Tensor,
        (row, column): (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        let d = dst.cols();
        let parts = src.cols() / d;
        let src = src.reshape([src.rows() * parts, d])?;
        for r in 0..count {
            self.copy_rows(&src, (row + r) * parts + column / d, dst, dst_row + r, 1)?;
        }
        Ok(())
    }

    /// The first id of an i32 tensor that the range does not allow.
    fn id_out_of_range(&self, ids: &Tensor, range: IdRange) -> Result<Option<i32>>;

    /// `acc + x`, in place when `acc` is not shared.
    fn add(&self, acc: Tensor, x: &Tensor) -> Result<Tensor>;
}
