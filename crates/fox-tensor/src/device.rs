//! Devices: shared handles to backends.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    Backend, DType, Error, LinearGroupOps, MemoryStats, RecomputeOps, Result, Shape, Tensor,
};

/// A handle to a backend. Cheap to clone; two handles are the same device when they share it.
#[derive(Clone)]
pub struct Device(Arc<Handle<dyn Backend>>);

struct Handle<B: ?Sized> {
    downloads: AtomicU64,
    backend: B,
}

impl Device {
    /// A device that runs on `backend`.
    pub fn new(backend: impl Backend + 'static) -> Self {
        Device(Arc::new(Handle { downloads: AtomicU64::new(0), backend }))
    }

    /// The f64 oracle.
    pub fn naive() -> Self {
        Device::new(crate::naive::Naive::default())
    }

    /// The backend behind this device.
    pub fn backend(&self) -> &dyn Backend {
        &self.0.backend
    }

    /// The ops of a tape that recomputes cheap results.
    pub(crate) fn recompute_ops(&self) -> Result<&dyn RecomputeOps> {
        let missing =
            || Error::unsupported(self.0.backend.name(), "recomputation in backward passes");
        self.0.backend.caps().recompute.ok_or_else(missing)
    }

    /// The ops of groups of linear layers.
    pub(crate) fn group_ops(&self) -> Result<&dyn LinearGroupOps> {
        let missing = || Error::unsupported(self.0.backend.name(), "groups of linear layers");
        self.0.backend.caps().linear_group.ok_or_else(missing)
    }

    /// Whether two handles mean the same device.
    pub fn same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Memory in use, and its peak.
    pub fn memory(&self) -> MemoryStats {
        self.0.backend.memory()
    }

    /// Resets the peak of [`Device::memory`] to the bytes in use.
    pub fn reset_peak(&self) {
        self.0.backend.reset_peak();
    }

    /// Number of transfers to the host. Each synchronizes host and device, so tests assert that a training step has a
    /// fixed number of them.
    pub fn downloads(&self) -> u64 {
        self.0.downloads.load(Ordering::Relaxed)
    }

    pub(crate) fn count_download(&self) {
        self.0.downloads.fetch_add(1, Ordering::Relaxed);
    }

    /// A tensor with unspecified contents, for outputs that an op writes in full.
    pub fn uninit(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let storage = self.0.backend.alloc(shape.len(), dtype)?;
        Ok(Tensor::from_storage(storage, shape, dtype, self.clone()))
    }

    /// A tensor of zeros.
    pub fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let mut tensor = self.uninit(shape, dtype)?;
        self.0.backend.fill(&mut tensor, 0.0)?;
        Ok(tensor)
    }

    /// A tensor with every element set to `value`.
    pub fn full(&self, shape: impl Into<Shape>, value: f32) -> Result<Tensor> {
        let mut tensor = self.uninit(shape, DType::F32)?;
        self.0.backend.fill(&mut tensor, value)?;
        Ok(tensor)
    }

    /// A tensor from host values.
    pub fn from_f32(&self, data: &[f32], shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = expect_len("from_f32", data.len(), shape.into())?;
        let storage = self.0.backend.upload(data)?;
        Ok(Tensor::from_storage(storage, shape, DType::F32, self.clone()))
    }

    /// A tensor from f64 host values: exact on the oracle, rounded elsewhere.
    pub fn from_f64(&self, data: &[f64], shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = expect_len("from_f64", data.len(), shape.into())?;
        let storage = self.0.backend.upload_f64(data)?;
        Ok(Tensor::from_storage(storage, shape, DType::F32, self.clone()))
    }

    /// A tensor of integers (token ids, labels).
    pub fn from_i32(&self, data: &[i32], shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = expect_len("from_i32", data.len(), shape.into())?;
        let storage = self.0.backend.upload_i32(data)?;
        Ok(Tensor::from_storage(storage, shape, DType::I32, self.clone()))
    }
}

fn expect_len(op: &'static str, len: usize, shape: Shape) -> Result<Shape> {
    if shape.len() != len {
        return Err(Error::Shape {
            op,
            what: "data",
            got: Shape::from([len]),
            expected: format!("{} elements for shape {shape}", shape.len()),
        });
    }
    Ok(shape)
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.backend.name())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.backend.name())
    }
}
