//! The backend: the ops of [`fox_tensor::Backend`] as launches on one GPU.
//!
//! Numbers. In [`Precision::F32`] everything is f32 and products are strict. In [`Precision::Bf16`]
//! activations and their gradients are bf16, products take bf16 copies of the f32 weights (made once; the
//! optimizer then keeps both as two halves, [`storage::Data::Halves`]), and everything that is summed over many terms or feeds an exponential
//! stays f32: gates and their logits, row statistics, losses, gradients of parameters, optimizer state.
//!
//! Waiting. Work is queued on one stream. The host waits only when it reads values back.

mod foreign;
pub(crate) mod launcher;
pub(crate) mod memory;
pub(crate) mod profile;
pub(crate) mod rows;
pub(crate) mod storage;

pub(crate) use storage::f32_buffer;

use std::fmt;
use std::sync::Arc;

use fox_tensor::{Backend, Caps, DType, Device, DeviceKind, OpTime, Shape, Span, Tensor};

use crate::lru::LruCache;
use crate::nccl::Connection;
use crate::ops::linear::Gemm;
use crate::ops::packed::Packed;
use crate::ops::scan;
use crate::{Buffer, Error, Gpu, Result};
use profile::Profiler;
use rows::{RopeTables, RowTables};
use storage::{Data, Memory, memory};

/// What activations are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f32 throughout, products without shortcuts: for comparisons.
    F32,
    /// bf16 activations and products, f32 where it counts.
    Bf16,
}

/// The CUDA backend.
pub struct Cuda {
    pub(crate) precision: Precision,
    pub(crate) name: &'static str,
    pub(crate) profiler: Profiler,
    pub(crate) row_tables: RowTables,
    pub(crate) rope_tables: RopeTables,
    pub(crate) chunk_tables: scan::chunks::ChunkTables,
    pub(crate) connection: Connection,
    pub(crate) gemm: Gemm,
    // Dropped last: everything above holds its memory.
    pub(crate) gpu: Arc<Gpu>,
}

/// GPU number `ordinal` as a device.
pub fn device(ordinal: usize, precision: Precision) -> Result<Device> {
    Ok(Device::new(Cuda::new(Gpu::new(ordinal)?, precision)?))
}

impl Cuda {
    /// A backend on this GPU.
    pub fn new(gpu: impl Into<Arc<Gpu>>, precision: Precision) -> Result<Self> {
        let gpu = gpu.into();
        if !crate::nvrtc_is_present() {
            return Err(crate::compile::missing_nvrtc());
        }
        Ok(Cuda {
            precision,
            name: match precision {
                Precision::F32 => "cuda f32",
                Precision::Bf16 => "cuda",
            },
            profiler: Profiler::default(),
            row_tables: RowTables::default(),
            rope_tables: RopeTables::default(),
            chunk_tables: LruCache::default(),
            connection: Connection::default(),
            gemm: Gemm::new(&gpu)?,
            gpu,
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The type of activations.
    pub(crate) fn activations(&self) -> DType {
        match self.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }

    pub(crate) fn tensor(&self, data: Data, shape: impl Into<Shape>, device: &Device) -> Tensor {
        let dtype = data.dtype();
        Tensor::from_storage(Arc::new(Memory::new(data)), shape, dtype, device.clone())
    }

    /// A tensor whose elements are still to be written.
    pub(crate) fn uninit(
        &self,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = shape.into();
        Ok(self.tensor(Data::alloc(&self.gpu, shape.len(), dtype)?, shape, device))
    }

    /// A new tensor, and where it lies.
    pub(crate) fn output(
        &self,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, u64)> {
        let tensor = self.uninit(shape, dtype, device)?;
        let address = memory(&tensor)?.data.address();
        Ok((tensor, address))
    }

    /// A tensor's memory, copied first if it is shared. An error for quantized weights.
    pub(crate) fn unshared<'a>(&self, x: &'a mut Tensor) -> Result<&'a mut Memory> {
        if let Data::Packed(_) = memory(x)?.data {
            return Err(Packed::refusal());
        }
        if x.is_shared() {
            let data = &memory(x)?.data;
            let copy = data.alloc_like(&self.gpu)?;
            // SAFETY: both have the same length and type.
            unsafe {
                self.gpu.copy(copy.address(), data.address(), x.len() * x.dtype().size())?;
            }
            *x = self.tensor(copy, x.shape(), x.device());
        }
        x.storage_mut().ok_or_else(|| Error::argument("cuda", "a tensor of another device"))
    }

    /// A tensor's memory for writing, in the tensor's own type; see [`Cuda::unshared`].
    pub(crate) fn writable<'a>(&self, x: &'a mut Tensor) -> Result<&'a mut Memory> {
        let held = self.unshared(x)?;
        if let Data::Halves(halves) = &held.data {
            let whole = self.whole(halves)?;
            held.replace(Data::F32(whole));
        }
        Ok(held)
    }

    /// A sum to be continued in place: `acc`, or zeros of this shape.
    pub(crate) fn sum_in_place(
        &self,
        acc: Option<Tensor>,
        shape: impl Into<Shape>,
        device: &Device,
    ) -> Result<(Tensor, u64)> {
        match acc {
            Some(mut acc) => {
                let address = self.writable(&mut acc)?.write().address();
                Ok((acc, address))
            }
            None => {
                let shape = shape.into();
                let zeros = self.gpu.zeros::<f32>(shape.len())?;
                let address = zeros.address();
                Ok((self.tensor(Data::F32(zeros), shape, device), address))
            }
        }
    }

    /// An operand as `dtype`, converted if needed.
    pub(crate) fn operand<'a>(&self, x: &'a Tensor, dtype: DType) -> Result<Operand<'a>> {
        let data = &memory(x)?.data;
        Ok(match (data, dtype) {
            (Data::F32(x), DType::Bf16) => Operand::Converted(Data::Bf16(self.narrow(x)?)),
            (Data::Bf16(x), DType::F32) => Operand::Converted(Data::F32(self.widen(x)?)),
            (Data::Halves(x), DType::F32) => Operand::Converted(Data::F32(self.whole(x)?)),
            (Data::Packed(Packed::Bf16(x)), DType::F32) => {
                Operand::Converted(Data::F32(self.widen(x)?))
            }
            (Data::Packed(Packed::Int8(x)), _) => Operand::Converted(self.unpack(x, dtype)?),
            _ => Operand::Own(data),
        })
    }

    /// Memory for a result in place of an operand that is not needed afterwards, if it is not shared.
    pub(crate) fn replaced(&self, x: Tensor) -> Result<Replaced> {
        let (shape, device) = (x.shape(), x.device().clone());
        let mut x = match self.activation(&x)? {
            Operand::Converted(data) => self.tensor(data, shape, &device),
            _ => x,
        };
        let from = memory(&x)?.data.address();
        if x.is_shared() {
            let (out, to) = self.output(shape, self.activations(), &device)?;
            return Ok(Replaced { out, to, from, old: Some(x) });
        }
        let to = self.writable(&mut x)?.write().address();
        Ok(Replaced { out: x, to, from, old: None })
    }

    /// An operand in the type of activations.
    pub(crate) fn activation<'a>(&self, x: &'a Tensor) -> Result<Operand<'a>> {
        self.operand(x, self.activations())
    }

    /// An operand in f32: weights of norms, biases, gates, statistics.
    pub(crate) fn real<'a>(&self, x: &'a Tensor) -> Result<Operand<'a>> {
        self.operand(x, DType::F32)
    }

    /// Weights of a matmul in the type of activations. The bf16 copy of f32 weights is stored with them; int8 weights are
    /// dequantized for this call alone.
    pub(crate) fn weights<'a>(&self, x: &'a Tensor) -> Result<Operand<'a>> {
        let held = memory(x)?;
        match (&held.data, self.precision) {
            (Data::F32(data), Precision::Bf16) => {
                Ok(Operand::Kept(held.narrow(|| self.narrow(data))?))
            }
            _ => self.activation(x),
        }
    }
}

/// A result that may reuse the memory of an operand.
pub(crate) struct Replaced {
    /// The result.
    pub(crate) out: Tensor,
    /// Where it goes.
    pub(crate) to: u64,
    /// Where the operand is read.
    pub(crate) from: u64,
    /// The operand, when it lies elsewhere: alive until the kernel has been launched.
    pub(crate) old: Option<Tensor>,
}

/// An operand of a kernel.
pub(crate) enum Operand<'a> {
    /// The tensor's memory.
    Own(&'a Data),
    /// Made for this call.
    Converted(Data),
    /// The bf16 copy stored with the tensor.
    Kept(Arc<Buffer<half::bf16>>),
}

impl Operand<'_> {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Operand::Own(data) => data.address(),
            Operand::Converted(data) => data.address(),
            Operand::Kept(copy) => copy.address(),
        }
    }

    pub(crate) fn data(&self) -> Option<&Data> {
        match self {
            Operand::Own(data) => Some(data),
            Operand::Converted(data) => Some(data),
            Operand::Kept(_) => None,
        }
    }
}

/// Address of an operand that may be absent.
pub(crate) fn address(operand: &Option<Operand<'_>>) -> u64 {
    operand.as_ref().map_or(0, Operand::address)
}

impl Backend for Cuda {
    fn name(&self) -> &str {
        self.name
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn caps(&self) -> Caps<'_> {
        Caps {
            activation_type: self.activations(),
            decode_batch: crate::ops::linear::thin::MAX_BATCH,
            compiles_kernels: true,
            recompute: Some(self),
            linear_group: Some(self),
            packing: Some(self),
            paged: Some(self),
            slots: Some(self),
            peers: Some(self),
        }
    }

    fn description(&self) -> String {
        format!("{}, {}", self.gpu.name(), self.activations())
    }

    fn synchronize(&self) -> fox_tensor::Result<()> {
        Ok(self.gpu.synchronize()?)
    }

    fn profile(&self, on: bool) {
        // Profiling is best effort.
        let _ = self.set_profiling(on);
    }

    fn take_profile(&self) -> fox_tensor::Result<Vec<OpTime>> {
        Ok(self.op_times()?)
    }

    fn take_timeline(&self) -> fox_tensor::Result<Vec<Span>> {
        Ok(self.timeline()?)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({:?}, {:?})", self.gpu, self.precision)
    }
}
