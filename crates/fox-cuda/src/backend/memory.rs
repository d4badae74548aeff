//! Host to device and back, copies of rows.

use std::sync::Arc;

use fox_tensor::{DType, IdRange, MemoryStats, Storage, Tensor};
use half::bf16;

use super::Cuda;
use super::storage::{Data, Memory, memory};
use crate::{Error, Result};

impl Cuda {
    pub(crate) fn alloc_storage(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(Memory::new(Data::alloc(&self.gpu, len, dtype)?)))
    }

    pub(crate) fn upload_f32(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(Memory::new(Data::F32(self.gpu.upload(data)?))))
    }

    pub(crate) fn upload_ints(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        let buffer = Arc::new(self.gpu.upload(data)?);
        Ok(Arc::new(Memory::with_host(Data::I32(buffer), data)))
    }

    pub(crate) fn download_f32(&self, x: &Tensor) -> Result<Vec<f32>> {
        match &memory(x)?.data {
            Data::F32(data) => self.gpu.download(data),
            Data::Bf16(data) => {
                Ok(self.gpu.download(data)?.into_iter().map(bf16::to_f32).collect())
            }
            Data::Halves(data) => self.gpu.download(&self.whole(data)?),
            Data::Packed(_) => match self.real(x)?.data() {
                Some(Data::F32(data)) => self.gpu.download(data),
                _ => Err(Error::argument("download", "weights that cannot be unpacked")),
            },
            Data::I32(_) => Err(Error::argument("download", "integers as real numbers")),
        }
    }

    pub(crate) fn download_into(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        match &memory(x)?.data {
            Data::F32(data) => self.gpu.download_into(data, out),
            _ => {
                out.copy_from_slice(&self.download_f32(x)?);
                Ok(())
            }
        }
    }

    pub(crate) fn ints(&self, x: &Tensor) -> Result<Arc<[i32]>> {
        let held = memory(x)?;
        match &held.data {
            Data::I32(data) => held.host(|| self.gpu.download(data)),
            other => Err(Error::argument("cuda", format!("{} where i32 is needed", other.dtype()))),
        }
    }

    pub(crate) fn copy_some_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        let (width, from_type, to_type) = (src.cols(), src.dtype(), dst.dtype());
        let inside = |x: &Tensor, row: usize| row + count <= x.rows() && x.cols() == width;
        if !inside(src, src_row) || !inside(dst, dst_row) {
            return Err(Error::argument(
                "copy_rows",
                format!("{count} rows from {src_row} of {src:?} to {dst_row} of {dst:?}"),
            ));
        }
        let src = self.operand(src, from_type)?;
        let from = src.address() + (src_row * width * from_type.size()) as u64;
        let to = self.writable(dst)?.write().address() + (dst_row * width * to_type.size()) as u64;
        let values = count * width;
        // SAFETY: both ranges were just checked.
        unsafe {
            match (from_type, to_type) {
                _ if from_type == to_type => self.gpu.copy(to, from, values * from_type.size()),
                (DType::F32, DType::Bf16) => self.narrow_values("narrow", to, from, values),
                (DType::Bf16, DType::F32) => self.widen_values("widen", to, from, values),
                _ => Err(Error::argument("copy_rows", format!("{from_type} to {to_type}"))),
            }
        }
    }

    /// The first id that is out of range; looks at the host's copy, so nothing waits.
    pub(crate) fn bad_id(&self, ids: &Tensor, range: IdRange) -> Result<Option<i32>> {
        Ok(self.ints(ids)?.iter().copied().find(|&id| !range.allows(id)))
    }
}

impl fox_tensor::Memory for Cuda {
    fn memory(&self) -> MemoryStats {
        self.gpu.memory()
    }

    fn free_memory(&self) -> Option<usize> {
        self.gpu.free_memory().ok()
    }

    fn reset_peak(&self) {
        self.gpu.reset_peak();
    }

    fn alloc(&self, len: usize, dtype: DType) -> fox_tensor::Result<Arc<dyn Storage>> {
        Ok(self.alloc_storage(len, dtype)?)
    }

    fn upload(&self, data: &[f32]) -> fox_tensor::Result<Arc<dyn Storage>> {
        Ok(self.upload_f32(data)?)
    }

    fn upload_f64(&self, data: &[f64]) -> fox_tensor::Result<Arc<dyn Storage>> {
        let data: Vec<f32> = data.iter().map(|&x| x as f32).collect();
        Ok(self.upload_f32(&data)?)
    }

    fn upload_i32(&self, data: &[i32]) -> fox_tensor::Result<Arc<dyn Storage>> {
        Ok(self.upload_ints(data)?)
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> fox_tensor::Result<()> {
        fox_tensor::check_download(self, x, out.len())?;
        Ok(self.download_into(x, out)?)
    }

    fn download_f64(&self, x: &Tensor) -> fox_tensor::Result<Vec<f64>> {
        fox_tensor::check_download(self, x, x.len())?;
        Ok(self.download_f32(x)?.into_iter().map(f64::from).collect())
    }

    fn download_i32(&self, x: &Tensor) -> fox_tensor::Result<Vec<i32>> {
        fox_tensor::check_ints(self, x)?;
        Ok(self.ints(x)?.to_vec())
    }

    fn fill(&self, x: &mut Tensor, value: f32) -> fox_tensor::Result<()> {
        fox_tensor::check_fill(self, x)?;
        Ok(self.timed("fill", || self.fill_with(x, value))?)
    }

    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> fox_tensor::Result<()> {
        fox_tensor::check_copy_rows(self, src, src_row, dst, dst_row, count)?;
        Ok(self.timed("copy_rows", || self.copy_some_rows(src, src_row, dst, dst_row, count))?)
    }

    fn copy_columns(
        &self,
        src: &Tensor,
        (row, column): (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> fox_tensor::Result<()> {
        fox_tensor::check_copy_columns(self, src, (row, column), dst, dst_row, count)?;
        let (d, per_row) = (dst.cols(), src.cols() / dst.cols());
        let src = src.reshape([src.rows() * per_row, d])?;
        for r in 0..count {
            self.copy_rows(&src, (row + r) * per_row + column / d, dst, dst_row + r, 1)?;
        }
        Ok(())
    }

    fn id_out_of_range(&self, ids: &Tensor, range: IdRange) -> fox_tensor::Result<Option<i32>> {
        fox_tensor::check_ints(self, ids)?;
        Ok(self.bad_id(ids, range)?)
    }

    fn add(&self, acc: Tensor, x: &Tensor) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_add(self, &acc, x)?;
        Ok(self.timed("add", || self.add_to(acc, x))?)
    }
}
