//! Column sums, bias add, and splitting and joining of columns.

use fox_tensor::{ColumnOps, DType, Device, Tensor};

use crate::backend::launcher::{FLAT_THREADS, Op, Variant};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Error, Float, Result, Source};

const COLUMNS: Source = source!("columns", [], [ColumnSums, AddBias, ColumnCopy, ColumnCopies]);

/// Maximum copies of one launch.
const COPIES: usize = 8;

kernel_params! {
    list struct ColumnSums {
        /// `[slices, C]`.
        out: Ptr<f32>,
        /// Added to the sums of all slices `[C]`, or null.
        acc: ConstPtr<f32>,
        /// `[R, C]`.
        x: ConstPtr<Real>,
        rows: usize,
        width: usize,
        rows_per_slice: usize,
    }

    list struct AddBias {
        /// `[R, C]`.
        x: Ptr<Real>,
        /// `[C]`.
        bias: ConstPtr<f32>,
        /// `R * C`.
        count: u64,
        width: usize,
    }

    /// Copy of a column block between matrices.
    #[derive(Default)]
    struct ColumnCopy {
        /// Null for zeros.
        from: ConstPtr<()>,
        to: Ptr<()>,
        /// Columns of the block.
        width: usize,
        /// Row strides in elements.
        from_stride: usize,
        to_stride: usize,
        /// Number of vector accesses.
        accesses: usize,
        /// Whether an access has eight elements instead of one.
        vectorized: bool,
        /// Whether to add to `to`.
        add: bool,
    }

    struct ColumnCopies {
        copies: [ColumnCopy; COPIES],
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    [DType::F32, DType::Bf16].map(|dtype| (COLUMNS, Variant::plain(dtype, 1).defines())).into()
}

/// A matrix that concatenates column blocks.
#[derive(Clone, Copy)]
pub(crate) struct JoinedColumns {
    /// Device address.
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

/// A contiguous matrix that is a column block of [`JoinedColumns`].
#[derive(Clone, Copy)]
pub(crate) struct ColumnBlock {
    /// Device address; 0 for zeros.
    pub(crate) address: u64,
    pub(crate) width: usize,
    /// Whether splitting adds to the block.
    pub(crate) add: bool,
}

impl ColumnCopy {
    /// A copy of `rows` rows of `width` columns between `(address, stride, type)`.
    fn new(
        (from, from_stride, from_type): (u64, usize, DType),
        (to, to_stride, to_type): (u64, usize, DType),
        [rows, width]: [usize; 2],
    ) -> Self {
        let even = |address: u64, stride: usize, dtype: DType| {
            stride.is_multiple_of(8) && address.is_multiple_of(8 * dtype.size() as u64)
        };
        let vectorized = width.is_multiple_of(8)
            && even(to, to_stride, to_type)
            && even(from, from_stride, from_type);
        ColumnCopy {
            from: from.into(),
            to: to.into(),
            width,
            from_stride,
            to_stride,
            accesses: rows * width / if vectorized { 8 } else { 1 },
            vectorized,
            add: false,
        }
    }
}

impl Cuda {
    /// # Safety
    /// Both sides of every copy must be live matrices with the rows and columns that it names.
    unsafe fn copy_columns(
        &self,
        entry: &'static str,
        dtype: DType,
        copies: &[ColumnCopy],
    ) -> Result<()> {
        for some in copies.chunks(COPIES) {
            let mut copies = [ColumnCopy::default(); COPIES];
            copies[..some.len()].copy_from_slice(some);
            let most = some.iter().map(|copy| copy.accesses).max().unwrap_or(0);
            let (variant, grid) = (Variant::plain(dtype, 1), [self.flat_blocks(most), some.len()]);
            let op = Op::new(COLUMNS, entry, variant, grid, FLAT_THREADS);
            // SAFETY: the caller's promise.
            unsafe { self.launch(&op, ColumnCopies { copies })? };
        }
        Ok(())
    }

    /// Copies `rows` rows of `width` columns between matrices given as (address, row stride) of this type.
    ///
    /// # Safety
    /// Both must be live and have these rows and columns.
    pub(crate) unsafe fn copy_block_of_columns(
        &self,
        from: (u64, usize),
        to: (u64, usize),
        [rows, width]: [usize; 2],
        dtype: DType,
    ) -> Result<()> {
        let copy = ColumnCopy::new((from.0, from.1, dtype), (to.0, to.1, dtype), [rows, width]);
        // SAFETY: the caller's promise.
        unsafe { self.copy_columns("copy_columns", dtype, &[copy]) }
    }

    /// Copies the first columns of `joined` to `blocks` of the same type.
    ///
    /// # Safety
    /// `joined` and the blocks, of as many rows, must be live matrices; `joined` must not be narrower than the blocks.
    pub(crate) unsafe fn split_into(
        &self,
        joined: &JoinedColumns,
        blocks: &[ColumnBlock],
    ) -> Result<()> {
        let JoinedColumns { mut address, dtype, rows, width } = *joined;
        let mut copies = Vec::with_capacity(blocks.len());
        for block in blocks {
            let (from, to) = ((address, width, dtype), (block.address, block.width, dtype));
            let copy = ColumnCopy::new(from, to, [rows, block.width]);
            copies.push(ColumnCopy { add: block.add, ..copy });
            address += (block.width * dtype.size()) as u64;
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_columns("copy_columns", dtype, &copies) }
    }

    /// Copies `blocks`, of the same type or f32, to the columns of `joined`, and zeroes the columns after the last.
    ///
    /// # Safety
    /// As for [`Cuda::split_into`].
    pub(crate) unsafe fn join_from(
        &self,
        joined: &JoinedColumns,
        blocks: &[ColumnBlock],
        block_type: DType,
    ) -> Result<()> {
        let JoinedColumns { mut address, dtype, rows, width } = *joined;
        let rest = width - blocks.iter().map(|block| block.width).sum::<usize>();
        let padding = (rest > 0).then_some(ColumnBlock { address: 0, width: rest, add: false });
        let mut copies = Vec::with_capacity(blocks.len() + 1);
        for block in blocks.iter().chain(&padding) {
            let (from, to) = ((block.address, block.width, block_type), (address, width, dtype));
            copies.push(ColumnCopy::new(from, to, [rows, block.width]));
            address += (block.width * dtype.size()) as u64;
        }
        let entry = if block_type == dtype { "copy_columns" } else { "convert_columns" };
        // SAFETY: the caller's promise.
        unsafe { self.copy_columns(entry, dtype, &copies) }
    }

    /// Column blocks `[R, w]` of these widths of `x: [R, C]`, in its type.
    pub(crate) fn split(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        let (rows, dtype) = (x.rows(), x.dtype());
        let (mut blocks, mut tensors) = (Vec::new(), Vec::new());
        for &width in widths {
            let (tensor, address) = self.output([rows, width], dtype, x.device())?;
            blocks.push(ColumnBlock { address, width, add: false });
            tensors.push(tensor);
        }
        let (width, operand) = (x.cols(), self.operand(x, dtype)?);
        let joined = JoinedColumns { address: operand.address(), dtype, rows, width };
        // SAFETY: the widths add up to at most `width`, as `check_split_columns` has checked.
        unsafe { self.split_into(&joined, &blocks)? };
        Ok(tensors)
    }

    /// Concatenates column blocks `[R, w]` to `[R, C]`, in the type of activations.
    pub(crate) fn join(&self, tensors: &[Tensor]) -> Result<Tensor> {
        let (rows, dtype) = (tensors[0].rows(), self.activations());
        let width = tensors.iter().map(Tensor::cols).sum();
        let (joined, address) = self.output([rows, width], dtype, tensors[0].device())?;
        let held: Vec<_> = tensors.iter().map(|x| self.activation(x)).collect::<Result<_>>()?;
        let block = |(x, operand): (&Tensor, &Operand<'_>)| ColumnBlock {
            address: operand.address(),
            width: x.cols(),
            add: false,
        };
        let blocks: Vec<ColumnBlock> = tensors.iter().zip(&held).map(block).collect();
        // SAFETY: the blocks have `rows` rows, as `check_join_columns` has checked, and `width` columns together.
        unsafe { self.join_from(&JoinedColumns { address, dtype, rows, width }, &blocks, dtype)? };
        Ok(joined)
    }

    /// `x[R, C] += bias[C]`, for `x` of this type.
    ///
    /// # Safety
    /// `x` and `bias` must be live buffers of these sizes.
    pub(crate) unsafe fn add_bias(
        &self,
        x: u64,
        dtype: DType,
        bias: u64,
        rows: usize,
        width: usize,
    ) -> Result<()> {
        let count = rows * width;
        let params = AddBias { x: x.into(), bias: bias.into(), count: count as u64, width };
        // SAFETY: the caller's promise.
        unsafe { self.launch_flat(COLUMNS, "add_bias", Variant::plain(dtype, 1), count, params) }
    }

    /// Sums of the columns of `x: [rows, width]`, plus `acc`, in f32 and fixed order.
    pub(crate) fn column_sums<T: Float>(
        &self,
        x: &Buffer<T>,
        [rows, width]: [usize; 2],
        acc: Option<Tensor>,
        device: &Device,
    ) -> Result<Tensor> {
        let acc = acc.as_ref().map(|acc| self.real(acc)).transpose()?;
        let fits = |acc: &Operand<'_>| acc.data().is_some_and(|data| data.len() == width);
        if x.len() < rows * width || !acc.as_ref().is_none_or(fits) {
            let detail = format!("{rows} rows of {width} in {} values", x.len());
            return Err(Error::argument("column_sums", detail));
        }
        let (dtype, acc_at) = (T::DTYPE, address(&acc));
        // Enough slices to fill the GPU, each of at least 512 rows.
        let wanted = 4 * self.gpu.processors() as usize / width.div_ceil(32).max(1);
        // One launch for few rows: a second launch would cost more than it saves.
        let slices = if rows <= 2048 { 1 } else { wanted.min(rows / 512).max(1) };
        let (out, at) = self.output([width], DType::F32, device)?;
        let partial: Buffer<f32> = self.gpu.alloc(if slices > 1 { slices * width } else { 0 })?;
        let (x, sums) = (x.address(), partial.address());
        // SAFETY: `x` and `acc` have these sizes, as checked above; the others are allocated with them.
        unsafe {
            if slices == 1 {
                self.sum_slices([at, acc_at, x], dtype, rows, width, 1)?;
            } else {
                self.sum_slices([sums, 0, x], dtype, rows, width, slices)?;
                self.sum_slices([at, acc_at, sums], DType::F32, slices, width, 1)?;
            }
        }
        Ok(out)
    }

    /// # Safety
    /// `[out, acc, x]` must be live: `[slices, width]` in f32, the same or 0, and `[rows, width]` of this type.
    unsafe fn sum_slices(
        &self,
        [out, acc, x]: [u64; 3],
        dtype: DType,
        rows: usize,
        width: usize,
        slices: usize,
    ) -> Result<()> {
        let params = ColumnSums {
            out: out.into(),
            acc: acc.into(),
            x: x.into(),
            rows,
            width,
            rows_per_slice: rows.div_ceil(slices),
        };
        let (variant, grid) = (Variant::plain(dtype, 1), [width.div_ceil(32), slices]);
        let op = Op::new(COLUMNS, "column_sums", variant, grid, 1024);
        // SAFETY: the caller's promise.
        unsafe { self.launch(&op, params) }
    }
}

impl ColumnOps for Cuda {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> fox_tensor::Result<Vec<Tensor>> {
        fox_tensor::check_split_columns(self, x, widths)?;
        Ok(self.timed("split_columns", || self.split(x, widths))?)
    }

    fn join_columns(&self, blocks: &[Tensor]) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_join_columns(self, blocks)?;
        Ok(self.timed("join_columns", || self.join(blocks))?)
    }
}
