//! Memory of a device: allocation, transfers, copies and sums.

use std::any::Any;
use std::sync::Arc;

use crate::check::Operands;
use crate::{Backend, DType, Result, Tensor};

/// The memory of one tensor, in the type of its backend.
pub trait Storage: Any + Send + Sync {
    /// The storage as `Any`, for downcasts to the type of the backend.
    fn as_any(&self) -> &dyn Any;
    /// The same for writing.
    fn as_any_mut(&mut self) -> &mut dyn Any;
    /// Whether this is memory of exactly `len` elements of `dtype`.
    fn holds(&self, len: usize, dtype: DType) -> bool;
    /// Whether these are weights in a format that only linear layers and downloads read; see
    /// [`PackOps`](crate::PackOps).
    fn is_packed(&self) -> bool {
        false
    }
    /// Whether the values are elsewhere, see [`Tensor::absent`].
    fn is_absent(&self) -> bool {
        false
    }
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Allocated to live tensors and scratch buffers.
    pub in_use: usize,
    /// Maximum of `in_use` since the start or the last reset.
    pub peak: usize,
    /// Allocated from the system, in use or cached for reuse.
    pub reserved: usize,
}

/// Range of valid token ids or labels: `0..vocab`, and optionally a label that is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// A further id that is valid, such as [`IGNORE_LABEL`](crate::IGNORE_LABEL).
    pub ignore: Option<i32>,
}

impl IdRange {
    /// Whether this id is valid.
    pub fn allows(&self, id: i32) -> bool {
        usize::try_from(id).is_ok_and(|id| id < self.vocab) || self.ignore == Some(id)
    }
}

/// Memory of a device.
pub trait Memory {
    /// Memory counters.
    fn memory(&self) -> MemoryStats;
    /// Bytes that can still be allocated; `None` where the device does not report it.
    fn free_memory(&self) -> Option<usize> {
        None
    }
    /// Resets the peak to the bytes in use.
    fn reset_peak(&self);

    /// Allocates `len` elements with unspecified contents.
    fn alloc(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>>;
    /// Copies host values to the device.
    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>>;
    /// Copies host values to the device, rounded to its precision.
    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>>;
    /// Copies host integers to the device.
    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>>;
    /// Copies real values to the host; `out` has the tensor's length.
    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()>;
    /// Copies real values to the host, in full precision.
    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>>;
    /// Copies integers to the host.
    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>>;
    /// Sets every element. A shared tensor is copied first.
    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()>;
    /// Copies `count` rows of equal width. A shared `dst` is copied first.
    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()>;

    /// Copies columns `column .. column + d` of `count` rows of `src`, `from = (row, column)`, into rows of `dst`
    /// `[.., d]`, where `d` divides `column` and the width of `src`. A shared `dst` is copied first.
    fn copy_columns(
        &self,
        src: &Tensor,
        from: (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()>;

    /// The first id of an i32 tensor that the range does not allow.
    fn id_out_of_range(&self, ids: &Tensor, range: IdRange) -> Result<Option<i32>>;

    /// `acc + x`, in place when `acc` is not shared.
    fn add(&self, acc: Tensor, x: &Tensor) -> Result<Tensor>;
}

/// Validates the operands of [`Memory::download`], for `len` host values, and of [`Memory::download_f64`].
pub fn check_download(backend: &dyn Backend, x: &Tensor, len: usize) -> Result<()> {
    let operands = Operands::new("download", backend);
    operands.any_real("input", x)?;
    operands.require(len == x.len(), || format!("{len} host values for shape {}", x.shape()))
}

/// Validates the operand of [`Memory::download_i32`] and of [`Memory::id_out_of_range`].
pub fn check_ints(backend: &dyn Backend, x: &Tensor) -> Result<()> {
    Operands::new("integers", backend).ints("input", x, x.dims())
}

/// Validates the operand of [`Memory::fill`].
pub fn check_fill(backend: &dyn Backend, x: &Tensor) -> Result<()> {
    let operands = Operands::new("fill", backend);
    operands.on_device("input", x)?;
    operands.require(!x.is_packed(), || "packed weights cannot be written".into())
}

/// Validates the operands of [`Memory::copy_rows`].
pub fn check_copy_rows(
    backend: &dyn Backend,
    src: &Tensor,
    src_row: usize,
    dst: &Tensor,
    dst_row: usize,
    count: usize,
) -> Result<()> {
    let operands = Operands::new("copy_rows", backend);
    check_copy(&operands, (src, src_row), (dst, dst_row), count)?;
    operands.require(src.cols() == dst.cols(), || {
        format!("rows of width {} to rows of width {}", src.cols(), dst.cols())
    })
}

/// Validates the operands of [`Memory::copy_columns`].
pub fn check_copy_columns(
    backend: &dyn Backend,
    src: &Tensor,
    (row, column): (usize, usize),
    dst: &Tensor,
    dst_row: usize,
    count: usize,
) -> Result<()> {
    let operands = Operands::new("copy_columns", backend);
    check_copy(&operands, (src, row), (dst, dst_row), count)?;
    let (width, d) = (src.cols(), dst.cols());
    let fits = d > 0 && width.is_multiple_of(d) && column.is_multiple_of(d) && column < width;
    operands.require(fits, || format!("{d} columns from {column} of rows of width {width}"))
}

fn check_copy(
    operands: &Operands<'_>,
    (src, src_row): (&Tensor, usize),
    (dst, dst_row): (&Tensor, usize),
    count: usize,
) -> Result<()> {
    for (what, x, row) in [("src", src, src_row), ("dst", dst, dst_row)] {
        operands.on_device(what, x)?;
        operands.require(!x.is_packed(), || format!("{what} has packed storage"))?;
        operands.require(row <= x.rows() && count <= x.rows() - row, || {
            format!("{count} rows from {row} of {what}, which has shape {}", x.shape())
        })?;
    }
    operands.require((src.dtype() == DType::I32) == (dst.dtype() == DType::I32), || {
        format!("a copy of {} to {}", src.dtype(), dst.dtype())
    })
}

/// Validates the operands of [`Memory::add`].
pub fn check_add(backend: &dyn Backend, acc: &Tensor, x: &Tensor) -> Result<()> {
    let operands = Operands::new("add", backend);
    operands.plain("acc", acc)?;
    operands.real("x", x, acc.dims())
}
