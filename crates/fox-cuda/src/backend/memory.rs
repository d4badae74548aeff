//! Host to device and back, conversions, fills and copies.

use std::sync::Arc;

use fox_tensor::{DType, Storage, Tensor};
use half::bf16;

use super::launcher::Variant;
use super::storage::{Data, Memory, memory};
use super::{Cuda, int};
use crate::{Buffer, Error, Result, Source};

impl Cuda {
    pub(super) fn alloc_storage(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(Memory::new(Data::alloc(&self.gpu, len, dtype)?)))
    }

    pub(super) fn upload_f32(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(Memory::new(Data::F32(self.gpu.upload(data)?))))
    }

    pub(super) fn upload_ints(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        let buffer = Arc::new(self.gpu.upload(data)?);
        Ok(Arc::new(Memory::with_host(Data::I32(buffer), data)))
    }

    pub(super) fn download_f32(&self, x: &Tensor) -> Result<Vec<f32>> {
        match &memory(x)?.data {
            Data::F32(data) => self.gpu.download(data),
            Data::Bf16(data) => {
                Ok(self.gpu.download(data)?.into_iter().map(bf16::to_f32).collect())
            }
            Data::Halves(data) => self.gpu.download(&self.whole(data)?),
            Data::I32(_) => Err(Error::argument("download", "integers as real numbers")),
        }
    }

    pub(super) fn download_into(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        match &memory(x)?.data {
            Data::F32(data) => self.gpu.download_into(data, out),
            _ => {
                out.copy_from_slice(&self.download_f32(x)?);
                Ok(())
            }
        }
    }

    pub(super) fn ints(&self, x: &Tensor) -> Result<Arc<[i32]>> {
        let held = memory(x)?;
        match &held.data {
            Data::I32(data) => held.host(|| self.gpu.download(data)),
            other => Err(Error::argument("cuda", format!("{} where i32 is needed", other.dtype()))),
        }
    }

    /// f32 to bf16, rounded to nearest.
    pub(super) fn narrow(&self, x: &Buffer<f32>) -> Result<Buffer<bf16>> {
        let y = self.gpu.alloc::<bf16>(x.len())?;
        self.convert("narrow", y.address(), x.address(), x.len())?;
        Ok(y)
    }

    /// bf16 to f32, exact.
    pub(super) fn widen(&self, x: &Buffer<bf16>) -> Result<Buffer<f32>> {
        let y = self.gpu.alloc::<f32>(x.len())?;
        self.convert("widen", y.address(), x.address(), x.len())?;
        Ok(y)
    }

    /// Weights of products as two halves, see [`Data::Halves`], where products are in bf16: no further
    /// copy is needed then.
    pub(super) fn in_halves(&self, w: &Tensor) -> Result<Tensor> {
        let narrow = self.activations() == DType::Bf16;
        match &memory(w)?.data {
            // The optimizer reads and writes fours of them.
            Data::F32(x) if narrow && x.len().is_multiple_of(4) => {
                let y = self.gpu.alloc::<f32>(x.len())?;
                self.convert("to_halves_all", y.address(), x.address(), x.len())?;
                Ok(self.tensor(Data::Halves(y), w.shape(), w.device()))
            }
            _ => Ok(w.clone()),
        }
    }

    /// Two halves as f32, exact.
    pub(super) fn whole(&self, x: &Buffer<f32>) -> Result<Buffer<f32>> {
        let y = self.gpu.alloc::<f32>(x.len())?;
        self.convert("from_halves_all", y.address(), x.address(), x.len())?;
        Ok(y)
    }

    fn convert(&self, entry: &'static str, to: u64, from: u64, count: usize) -> Result<()> {
        // Accesses of 8 elements need addresses to match: rows in the middle of a tensor may not.
        let aligned = to.is_multiple_of(32) && from.is_multiple_of(32);
        let variant = Variant::plain(DType::F32, if aligned { count } else { 1 });
        // SAFETY: parameters as declared in elementwise.cu; the callers have `count` elements in both.
        unsafe {
            self.launch_flat(
                Source::ELEMENTWISE,
                entry,
                variant,
                count,
                &[to.into(), from.into(), count.into()],
            )
        }
    }

    pub(super) fn fill_with(&self, x: &mut Tensor, value: f32) -> Result<()> {
        let (count, dtype) = (x.len(), x.dtype());
        let at = self.writable(x)?.write().address();
        let (entry, value) = match dtype {
            DType::I32 => ("fill_i32", (value as i32).into()),
            _ => ("fill", value.into()),
        };
        let variant = Variant::plain(dtype, 1);
        // SAFETY: parameters as declared in elementwise.cu; the tensor has `count` elements.
        unsafe {
            self.launch_flat(
                Source::ELEMENTWISE,
                entry,
                variant,
                count,
                &[at.into(), value, count.into()],
            )
        }
    }

    pub(super) fn copy_some_rows(
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
        match (from_type, to_type) {
            // SAFETY: both ranges were just checked.
            _ if from_type == to_type => unsafe {
                self.gpu.copy(to, from, count * width * from_type.size())
            },
            (DType::F32, DType::Bf16) => self.convert("narrow", to, from, count * width),
            (DType::Bf16, DType::F32) => self.convert("widen", to, from, count * width),
            _ => Err(Error::argument("copy_rows", format!("{from_type} to {to_type}"))),
        }
    }

    pub(super) fn add_to(&self, mut acc: Tensor, x: &Tensor) -> Result<Tensor> {
        let (count, dtype) = (x.len(), acc.dtype());
        let x = self.operand(x, dtype)?;
        if matches!(memory(&acc)?.data, Data::Halves(_)) {
            self.writable(&mut acc)?;
        }
        let shared = acc.is_shared();
        let from = memory(&acc)?.data.address();
        // A shared sum is read where it is and written elsewhere: no copy is needed first.
        let to = match shared {
            true => {
                let (out, to) = self.output(acc.shape(), dtype, acc.device())?;
                // `acc` itself lives on with whoever shares it until the stream has passed.
                acc = out;
                to
            }
            false => self.writable(&mut acc)?.write().address(),
        };
        let args = [to.into(), from.into(), x.address().into(), count.into()];
        // SAFETY: parameters as declared in elementwise.cu; shapes are equal.
        unsafe {
            let variant = Variant::plain(dtype, count);
            self.launch_flat(Source::ELEMENTWISE, "add", variant, count, &args)?;
        }
        Ok(acc)
    }

    /// The first id that is out of range; looks at the host's copy, so nothing waits.
    pub(super) fn bad_id(
        &self,
        ids: &Tensor,
        vocab: usize,
        ignore: Option<i32>,
    ) -> Result<Option<i32>> {
        let limit = int(vocab);
        let valid = |id: i32| (0..limit).contains(&id) || Some(id) == ignore;
        Ok(self.ints(ids)?.iter().copied().find(|&id| !valid(id)))
    }
}
