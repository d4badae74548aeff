//! Elementwise conversions, fills and sums.

use cudarc::driver::sys;
use fox_tensor::{DType, Tensor};
use half::bf16;

use crate::backend::Cuda;
use crate::backend::launcher::{FLAT_THREADS, Variant, plain_variants};
use crate::backend::storage::{Data, memory};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};

const SOURCE: Source = source!("elementwise", [], [Narrow, Widen, Fill, FillInts, Add]);

kernel_params! {
    list struct Narrow {
        y: Ptr<bf16>,
        x: ConstPtr<f32>,
        count: u64,
    }

    list struct Widen {
        y: Ptr<f32>,
        x: ConstPtr<bf16>,
        count: u64,
    }

    list struct Fill {
        x: Ptr<Real>,
        value: f32,
        count: u64,
    }

    list struct FillInts {
        x: Ptr<i32>,
        value: i32,
        count: u64,
    }

    list struct Add {
        /// May be `a` or `b`.
        y: Ptr<Real>,
        a: ConstPtr<Real>,
        b: ConstPtr<Real>,
        count: u64,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(SOURCE)
}

/// Variant for copies between addresses: vector accesses need aligned addresses, which row slices may lack.
fn copy_variant(to: u64, from: u64, count: usize) -> Variant {
    let aligned = to.is_multiple_of(32) && from.is_multiple_of(32);
    Variant::plain(DType::F32, if aligned { count } else { 1 })
}

/// `y = a + b` of f32 values at addresses `[y, a, b]`, on another CUDA stream than that of the ops.
///
/// # Safety
/// All three must be live buffers of `count` values that outlive the work on the CUDA stream.
pub(crate) unsafe fn add_on(
    cuda: &Cuda,
    stream: sys::CUstream,
    [y, a, b]: [u64; 3],
    count: usize,
) -> Result<()> {
    let aligned = [y, a, b].iter().all(|at| at.is_multiple_of(32));
    let variant = Variant::plain(DType::F32, if aligned { count } else { 1 });
    let kernel = cuda.gpu.kernel_on(stream, SOURCE, &variant.defines(), "add")?;
    let params = Add { y: y.into(), a: a.into(), b: b.into(), count: count as u64 };
    let blocks = cuda.flat_blocks(count.div_ceil(variant.vec));
    let launch = kernel.launch([blocks, 1, 1], FLAT_THREADS).params(params)?;
    // SAFETY: the caller's promise.
    unsafe { launch.run(|| format!("{count} values")) }
}

impl Cuda {
    /// f32 to bf16, rounded to nearest.
    pub(crate) fn narrow(&self, x: &Buffer<f32>) -> Result<Buffer<bf16>> {
        let y = self.gpu.alloc::<bf16>(x.len())?;
        // SAFETY: both buffers have `x.len()` values.
        unsafe { self.narrow_values("narrow", y.address(), x.address(), x.len())? };
        Ok(y)
    }

    /// bf16 to f32, exact.
    pub(crate) fn widen(&self, x: &Buffer<bf16>) -> Result<Buffer<f32>> {
        let y = self.gpu.alloc::<f32>(x.len())?;
        // SAFETY: both buffers have `x.len()` values.
        unsafe { self.widen_values("widen", y.address(), x.address(), x.len())? };
        Ok(y)
    }

    /// Weights as [`Data::Halves`] where GEMMs are in bf16, which then need no bf16 copy.
    pub(crate) fn in_halves(&self, w: &Tensor) -> Result<Tensor> {
        let narrow = self.activations() == DType::Bf16;
        match &memory(w)?.data {
            // The optimizer's vector accesses have four elements.
            Data::F32(x) if narrow && x.len().is_multiple_of(4) => {
                let y = self.gpu.alloc::<f32>(x.len())?;
                // SAFETY: both buffers have `x.len()` values.
                unsafe {
                    self.narrow_values("to_halves_all", y.address(), x.address(), x.len())?;
                }
                Ok(self.tensor(Data::Halves(y), w.shape(), w.device()))
            }
            _ => Ok(w.clone()),
        }
    }

    /// Two halves as f32, exact.
    pub(crate) fn whole(&self, x: &Buffer<f32>) -> Result<Buffer<f32>> {
        let y = self.gpu.alloc::<f32>(x.len())?;
        // SAFETY: both buffers have `x.len()` values.
        unsafe { self.widen_values("from_halves_all", y.address(), x.address(), x.len())? };
        Ok(y)
    }

    /// Converts `count` f32 values to bf16 or to two halves.
    ///
    /// # Safety
    /// Both addresses must be those of `count` live values.
    pub(crate) unsafe fn narrow_values(
        &self,
        entry: &'static str,
        to: u64,
        from: u64,
        count: usize,
    ) -> Result<()> {
        let params = Narrow { y: to.into(), x: from.into(), count: count as u64 };
        // SAFETY: the caller's promise.
        unsafe { self.launch_flat(SOURCE, entry, copy_variant(to, from, count), count, params) }
    }

    /// Converts `count` bf16 values or two halves to f32.
    ///
    /// # Safety
    /// Both addresses must be those of `count` live values.
    pub(crate) unsafe fn widen_values(
        &self,
        entry: &'static str,
        to: u64,
        from: u64,
        count: usize,
    ) -> Result<()> {
        let params = Widen { y: to.into(), x: from.into(), count: count as u64 };
        // SAFETY: the caller's promise.
        unsafe { self.launch_flat(SOURCE, entry, copy_variant(to, from, count), count, params) }
    }

    pub(crate) fn fill_with(&self, x: &mut Tensor, value: f32) -> Result<()> {
        let (count, dtype) = (x.len(), x.dtype());
        let at = self.writable(x)?.write().address();
        let variant = Variant::plain(dtype, 1);
        // SAFETY: the tensor has `count` elements of its type.
        unsafe {
            if dtype == DType::I32 {
                // Saturates out-of-range values.
                let params = FillInts { x: at.into(), value: value as i32, count: count as u64 };
                return self.launch_flat(SOURCE, "fill_i32", variant, count, params);
            }
            let params = Fill { x: at.into(), value, count: count as u64 };
            self.launch_flat(SOURCE, "fill", variant, count, params)
        }
    }

    pub(crate) fn add_to(&self, mut acc: Tensor, x: &Tensor) -> Result<Tensor> {
        let (count, dtype) = (x.len(), acc.dtype());
        let x = self.operand(x, dtype)?;
        if matches!(memory(&acc)?.data, Data::Halves(_)) {
            self.writable(&mut acc)?;
        }
        let shared = acc.is_shared();
        let from = memory(&acc)?.data.address();
        // A shared accumulator is read in place and the sum written elsewhere, which saves a copy.
        let to = match shared {
            true => {
                let (out, to) = self.output(acc.shape(), dtype, acc.device())?;
                // Its other owner keeps the old `acc` alive.
                acc = out;
                to
            }
            false => self.writable(&mut acc)?.write().address(),
        };
        let (a, b) = (from.into(), x.address().into());
        let params = Add { y: to.into(), a, b, count: count as u64 };
        // SAFETY: shapes are equal.
        unsafe { self.launch_flat(SOURCE, "add", Variant::plain(dtype, count), count, params)? };
        Ok(acc)
    }
}
