//! A tensor's memory on the GPU and values derived from it.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::{DType, Storage, Tensor};
use half::bf16;

use crate::ops::packed::Packed;
use crate::{Buffer, Error, Gpu, Result};

/// Elements by type.
#[derive(Debug)]
pub(crate) enum Data {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
    I32(Arc<Buffer<i32>>),
    /// f32 values as two halves: all of them rounded to bf16, then the 16 bits each that restore f32. The format of
    /// trained weights: matmuls read the first half.
    Halves(Buffer<f32>),
    /// Quantized weights, which are read-only.
    Packed(Packed),
}

impl Data {
    pub(crate) fn alloc(gpu: &Gpu, len: usize, dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Data::F32(gpu.alloc(len)?),
            DType::Bf16 => Data::Bf16(gpu.alloc(len)?),
            DType::I32 => Data::I32(Arc::new(gpu.alloc(len)?)),
        })
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Data::F32(x) => x.address(),
            Data::Bf16(x) => x.address(),
            Data::I32(x) => x.address(),
            Data::Halves(x) => x.address(),
            Data::Packed(x) => x.address(),
        }
    }

    /// Memory for the same number of elements, kept in the same way.
    pub(crate) fn alloc_like(&self, gpu: &Gpu) -> Result<Self> {
        Ok(match self {
            Data::F32(x) => Data::F32(gpu.alloc(x.len())?),
            Data::Bf16(x) => Data::Bf16(gpu.alloc(x.len())?),
            Data::I32(x) => Data::I32(Arc::new(gpu.alloc(x.len())?)),
            Data::Halves(x) => Data::Halves(gpu.alloc(x.len())?),
            Data::Packed(_) => return Err(Packed::refusal()),
        })
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Data::F32(x) | Data::Halves(x) => x.len(),
            Data::Bf16(x) => x.len(),
            Data::I32(x) => x.len(),
            Data::Packed(x) => x.len(),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Data::F32(_) | Data::Halves(_) | Data::Packed(_) => DType::F32,
            Data::Bf16(_) => DType::Bf16,
            Data::I32(_) => DType::I32,
        }
    }
}

/// Activations of either type, as the attention kernels want them.
pub(crate) trait Activation: crate::Float {
    fn wrap(buffer: Buffer<Self>) -> Data;
    fn of(data: &Data) -> Option<&Buffer<Self>>;
}
impl Activation for f32 {
    fn wrap(buffer: Buffer<f32>) -> Data {
        Data::F32(buffer)
    }
    fn of(data: &Data) -> Option<&Buffer<f32>> {
        match data {
            Data::F32(x) => Some(x),
            _ => None,
        }
    }
}
impl Activation for bf16 {
    fn wrap(buffer: Buffer<bf16>) -> Data {
        Data::Bf16(buffer)
    }
    fn of(data: &Data) -> Option<&Buffer<bf16>> {
        match data {
            Data::Bf16(x) => Some(x),
            _ => None,
        }
    }
}

/// Rows sorted by token id, for the gradient of an embedding without atomics.
#[derive(Debug)]
pub(crate) struct Groups {
    /// (id, first, end) of each id that occurs, as indices into `order`.
    pub(crate) groups: Buffer<i32>,
    pub(crate) count: usize,
    /// Rows by id, ascending within one.
    pub(crate) order: Buffer<i32>,
}

/// A tensor's memory. Derived values are cached until the elements are written.
pub(crate) struct Memory {
    pub(crate) data: Data,
    derived: Mutex<Derived>,
}

#[derive(Default)]
struct Derived {
    /// bf16 copy of f32 weights, for products.
    narrow: Option<Arc<Buffer<bf16>>>,
    /// Integers that came from the host, readable without waiting for the GPU.
    host: Option<Arc<[i32]>>,
    groups: Option<Arc<Groups>>,
}

impl Memory {
    pub(crate) fn new(data: Data) -> Self {
        Memory { data, derived: Mutex::default() }
    }

    pub(crate) fn with_host(data: Data, host: &[i32]) -> Self {
        let derived = Derived { host: Some(host.into()), ..Derived::default() };
        Memory { data, derived: Mutex::new(derived) }
    }

    /// The elements for writing; drops derived values.
    pub(crate) fn write(&mut self) -> &mut Data {
        *self.derived.get_mut().unwrap_or_else(PoisonError::into_inner) = Derived::default();
        &mut self.data
    }

    /// Replaces the memory of the elements by another one with the same values.
    pub(crate) fn replace(&mut self, data: Data) {
        self.data = data;
        self.derived.get_mut().unwrap_or_else(PoisonError::into_inner).narrow = None;
    }

    /// The bf16 copy, if there is one. For an op that writes elements and copy alike.
    pub(crate) fn narrow_copy(&self) -> Option<Arc<Buffer<bf16>>> {
        self.derived().narrow.clone()
    }

    /// The bf16 copy, made by `make` when there is none.
    pub(crate) fn narrow(
        &self,
        make: impl FnOnce() -> Result<Buffer<bf16>>,
    ) -> Result<Arc<Buffer<bf16>>> {
        let mut derived = self.derived();
        if let Some(copy) = &derived.narrow {
            return Ok(Arc::clone(copy));
        }
        let copy = Arc::new(make()?);
        derived.narrow = Some(Arc::clone(&copy));
        Ok(copy)
    }

    /// Integers on the host: remembered, or fetched by `fetch`.
    pub(crate) fn host(&self, fetch: impl FnOnce() -> Result<Vec<i32>>) -> Result<Arc<[i32]>> {
        let mut derived = self.derived();
        if let Some(host) = &derived.host {
            return Ok(Arc::clone(host));
        }
        let host: Arc<[i32]> = fetch()?.into();
        derived.host = Some(Arc::clone(&host));
        Ok(host)
    }

    /// Rows by id, made by `make` when they are not there.
    pub(crate) fn groups(&self, make: impl FnOnce() -> Result<Groups>) -> Result<Arc<Groups>> {
        if let Some(groups) = self.derived().groups.clone() {
            return Ok(groups);
        }
        let groups = Arc::new(make()?);
        self.derived().groups = Some(Arc::clone(&groups));
        Ok(groups)
    }

    fn derived(&self) -> std::sync::MutexGuard<'_, Derived> {
        self.derived.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage for Memory {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
    fn holds(&self, len: usize, dtype: DType) -> bool {
        dtype == self.data.dtype() && self.data.len() == len
    }
    fn is_packed(&self) -> bool {
        matches!(self.data, Data::Packed(_))
    }
}

/// A tensor's memory; an error when it belongs to another backend.
pub(crate) fn memory(x: &Tensor) -> Result<&Memory> {
    x.storage().ok_or_else(|| {
        Error::argument("cuda", format!("a tensor of {} came to the GPU", x.device()))
    })
}

/// Rejects tensors of another type than f32, for ops whose kernels update them in place.
pub(crate) fn expect_f32(
    op: &'static str,
    what: &'static str,
    x: &Tensor,
) -> fox_tensor::Result<()> {
    match x.dtype() {
        DType::F32 => Ok(()),
        got => Err(fox_tensor::Error::Type { op, what, got, expected: DType::F32 }),
    }
}

/// The f32 elements of a tensor.
pub(crate) fn f32_buffer(x: &Tensor) -> Result<&Buffer<f32>> {
    match &memory(x)?.data {
        Data::F32(buffer) => Ok(buffer),
        other => Err(Error::argument("cuda", format!("{} where f32 is needed", other.dtype()))),
    }
}
