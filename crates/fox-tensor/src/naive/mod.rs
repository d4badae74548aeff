//! The oracle: every op in f64 with plain loops. It documents what an op computes and is the reference for other
//! backends; speed is not a goal.
//!
//! This module has its memory and shared helpers; the loops are with each op.

mod math;
mod storage;

use std::sync::Arc;

pub use crate::ops::attention::naive::{BM, BN};
pub(crate) use math::{Act, axpy, dot, log_sigmoid, logsumexp, rms_backward, rstd, sigmoid};
use storage::Meter;
pub(crate) use storage::{
    Matrix, Values, int, matrix, maybe_matrix, maybe_real, real, values, values_mut,
};

use crate::{
    Backend, Caps, DType, Device, DeviceKind, IdRange, LinearGroupOps, Memory, MemoryStats,
    RecomputeOps, Result, Shape, Storage, Tensor, check_add, check_copy_columns, check_copy_rows,
    check_download, check_fill, check_ints,
};

/// The f64 backend. Allocated memory is filled with NaN until it is written.
#[derive(Debug, Default)]
pub struct Naive {
    meter: Arc<Meter>,
    optional_ops: bool,
}

impl Naive {
    /// One that prefers memory to time, takes linear layers in groups and uses pages again, as a GPU does: for tests.
    pub fn with_optional_ops() -> Self {
        Naive { optional_ops: true, ..Naive::default() }
    }

    pub(crate) fn has_optional_ops(&self) -> bool {
        self.optional_ops
    }

    pub(crate) fn tensor(
        &self,
        device: &Device,
        data: Vec<f64>,
        shape: impl Into<Shape>,
    ) -> Tensor {
        storage::tensor(&self.meter, device, data, shape)
    }

    /// A tensor of integers.
    pub(crate) fn ints(&self, device: &Device, data: Vec<i32>, shape: impl Into<Shape>) -> Tensor {
        let storage = self.meter.store(Values::Int(data));
        Tensor::from_storage(storage, shape, DType::I32, device.clone())
    }

    /// A tensor of the shape of `like`.
    pub(crate) fn like(&self, like: &Tensor, data: Vec<f64>) -> Tensor {
        self.tensor(like.device(), data, like.shape())
    }

    /// `grad`, added to `acc` if there is one.
    pub(crate) fn plus(&self, acc: Option<Tensor>, grad: Tensor) -> Result<Tensor> {
        match acc {
            Some(acc) => self.add(acc, &grad),
            None => Ok(grad),
        }
    }

    /// Copies the storage of `x` if it is shared.
    pub(crate) fn unshare(&self, x: &mut Tensor) -> Result<()> {
        if x.is_shared() {
            let copy = self.meter.store(values(x)?.clone());
            *x = Tensor::from_storage(copy, x.shape(), x.dtype(), x.device().clone());
        }
        Ok(())
    }
}

impl Backend for Naive {
    fn name(&self) -> &str {
        "naive"
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Naive
    }

    fn caps(&self) -> Caps<'_> {
        let recompute = self.optional_ops.then_some(self as &dyn RecomputeOps);
        let linear_group = self.optional_ops.then_some(self as &dyn LinearGroupOps);
        Caps { recompute, linear_group, paged: Some(self), slots: Some(self), ..Caps::default() }
    }
}

impl RecomputeOps for Naive {}

impl Memory for Naive {
    fn memory(&self) -> MemoryStats {
        self.meter.stats()
    }

    fn reset_peak(&self) {
        self.meter.reset_peak();
    }

    fn alloc(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(match dtype {
            DType::I32 => Values::Int(vec![i32::MIN; len]),
            DType::F32 | DType::Bf16 => Values::Real(vec![f64::NAN; len]),
        }))
    }

    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(Values::Real(data.iter().map(|&x| f64::from(x)).collect())))
    }

    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(Values::Real(data.to_vec())))
    }

    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(Values::Int(data.to_vec())))
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        check_download(self, x, out.len())?;
        for (out, &x) in out.iter_mut().zip(real(x)?) {
            *out = x as f32;
        }
        Ok(())
    }

    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>> {
        check_download(self, x, x.len())?;
        Ok(real(x)?.to_vec())
    }

    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>> {
        check_ints(self, x)?;
        Ok(int(x)?.to_vec())
    }

    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()> {
        check_fill(self, x)?;
        self.unshare(x)?;
        match values_mut(x)? {
            Values::Real(x) => x.fill(f64::from(value)),
            Values::Int(x) => x.fill(value as i32),
        }
        Ok(())
    }

    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        check_copy_rows(self, src, src_row, dst, dst_row, count)?;
        self.unshare(dst)?;
        let cols = dst.cols();
        let (from, to) = (src_row * cols, dst_row * cols);
        match (values(src)?, values_mut(dst)?) {
            (Values::Real(src), Values::Real(dst)) => {
                dst[to..][..count * cols].copy_from_slice(&src[from..][..count * cols]);
            }
            (Values::Int(src), Values::Int(dst)) => {
                dst[to..][..count * cols].copy_from_slice(&src[from..][..count * cols]);
            }
            _ => src.expect_type("copy_rows", "src", dst.dtype())?,
        }
        Ok(())
    }

    fn copy_columns(
        &self,
        src: &Tensor,
        (row, column): (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        check_copy_columns(self, src, (row, column), dst, dst_row, count)?;
        let (d, per_row) = (dst.cols(), src.cols() / dst.cols());
        let src = src.reshape([src.rows() * per_row, d])?;
        for r in 0..count {
            self.copy_rows(&src, (row + r) * per_row + column / d, dst, dst_row + r, 1)?;
        }
        Ok(())
    }

    fn id_out_of_range(&self, ids: &Tensor, range: IdRange) -> Result<Option<i32>> {
        check_ints(self, ids)?;
        Ok(int(ids)?.iter().copied().find(|&id| !range.allows(id)))
    }

    fn add(&self, mut acc: Tensor, x: &Tensor) -> Result<Tensor> {
        check_add(self, &acc, x)?;
        let x = real(x)?;
        self.unshare(&mut acc)?;
        if let Values::Real(acc) = values_mut(&mut acc)? {
            axpy(acc, 1.0, x);
        }
        Ok(acc)
    }
}
