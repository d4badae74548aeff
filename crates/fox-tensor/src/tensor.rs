//! The tensor: a shape, an element type and storage on a device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::{DType, Device, Error, Result, Shape, Storage};

/// A contiguous, row-major array on a [`Device`].
///
/// Cloning is cheap and shares the storage. Shared storage is never written: ops that update in place take
/// the tensor by value or by `&mut` and copy it first if another tensor shares its storage.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<dyn Storage>,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl Tensor {
    /// Wraps the storage of a backend.
    ///
    /// # Panics
    /// The storage does not hold exactly `shape.len()` elements of `dtype`.
    pub fn from_storage(
        storage: Arc<dyn Storage>,
        shape: impl Into<Shape>,
        dtype: DType,
        device: Device,
    ) -> Self {
        let shape = shape.into();
        assert!(
            storage.holds(shape.len(), dtype),
            "no storage for a {dtype} tensor of shape {shape}"
        );
        Tensor { storage, shape, dtype, device }
    }

    /// A tensor of f32 values that are not on this rank: it has a shape and a device, but takes no memory. Every op
    /// rejects it.
    pub fn absent(shape: impl Into<Shape>, device: &Device) -> Self {
        Tensor::from_storage(Arc::new(Absent), shape, DType::F32, device.clone())
    }

    /// Whether the values are not on this rank.
    pub fn is_absent(&self) -> bool {
        self.storage.is_absent()
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The extents as a slice.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the storage.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Extent of the first dimension; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.dims().first().copied().unwrap_or(1)
    }

    /// Elements per row: the product of all extents but the first.
    pub fn cols(&self) -> usize {
        self.dims().iter().skip(1).product()
    }

    /// The same elements under another shape.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.len() != self.len() {
            return Err(Error::Shape {
                op: "reshape",
                what: "input",
                got: self.shape,
                expected: format!("as many elements as {shape}"),
            });
        }
        Ok(Tensor { shape, ..self.clone() })
    }

    /// The storage as the type of its backend. `None` when it belongs to another backend.
    pub fn storage<S: Any>(&self) -> Option<&S> {
        self.storage.as_any().downcast_ref()
    }

    /// The storage for writing. `None` when it is shared or belongs to another backend.
    pub fn storage_mut<S: Any>(&mut self) -> Option<&mut S> {
        Arc::get_mut(&mut self.storage)?.as_any_mut().downcast_mut()
    }

    /// Whether another tensor shares this storage.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.storage) > 1
    }

    /// Whether these are packed weights, which only linear layers and downloads read.
    pub fn is_packed(&self) -> bool {
        self.storage.is_packed()
    }

    /// The elements as f32, on the host.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        self.expect_real("to_f32", "input")?;
        self.device.count_download();
        let mut out = vec![0.0; self.len()];
        self.device.backend().download(self, &mut out)?;
        Ok(out)
    }

    /// The elements as f64, on the host: exact for the oracle, widened elsewhere.
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        self.expect_real("to_f64", "input")?;
        self.device.count_download();
        self.device.backend().download_f64(self)
    }

    /// The elements of an integer tensor, on the host.
    pub fn to_i32(&self) -> Result<Vec<i32>> {
        self.expect_type("to_i32", "input", DType::I32)?;
        self.device.count_download();
        self.device.backend().download_i32(self)
    }

    /// Rows `start .. start + count` as a new tensor.
    pub fn slice_rows(&self, start: usize, count: usize) -> Result<Tensor> {
        if self.shape.rank() == 0 || start > self.rows() || count > self.rows() - start {
            return Err(Error::argument(
                "slice_rows",
                format!("{count} rows from {start} of a tensor of shape {}", self.shape),
            ));
        }
        let mut dims = self.dims().to_vec();
        dims[0] = count;
        let mut out = self.device.uninit(&dims[..], self.dtype)?;
        self.device.backend().copy_rows(self, start, &mut out, 0, count)?;
        Ok(out)
    }

    /// The same values in the device's type of activations. Ops accept other types too, but convert them at every
    /// call.
    pub fn to_activations(&self) -> Result<Tensor> {
        let dtype = self.device.backend().caps().activation_type;
        if dtype == self.dtype {
            return Ok(self.clone());
        }
        let mut out = self.device.uninit(self.dims(), dtype)?;
        self.device.backend().copy_rows(self, 0, &mut out, 0, self.rows())?;
        Ok(out)
    }

    pub(crate) fn expect_real(&self, op: &'static str, what: &'static str) -> Result<()> {
        if self.dtype == DType::I32 {
            return Err(Error::Type { op, what, got: self.dtype, expected: DType::F32 });
        }
        Ok(())
    }

    pub(crate) fn expect_type(
        &self,
        op: &'static str,
        what: &'static str,
        expected: DType,
    ) -> Result<()> {
        if self.dtype != expected {
            return Err(Error::Type { op, what, got: self.dtype, expected });
        }
        Ok(())
    }

    pub(crate) fn expect_shape(
        &self,
        op: &'static str,
        what: &'static str,
        expected: &[usize],
    ) -> Result<()> {
        if self.dims() != expected {
            return Err(Error::Shape {
                op,
                what,
                got: self.shape,
                expected: format!("{expected:?}"),
            });
        }
        Ok(())
    }

    pub(crate) fn expect_device(
        &self,
        op: &'static str,
        what: &'static str,
        device: &Device,
    ) -> Result<()> {
        if !self.device.same(device) {
            return Err(Error::DeviceMismatch {
                op,
                what,
                got: self.device.to_string(),
                expected: device.to_string(),
            });
        }
        Ok(())
    }
}

/// The storage of [`Tensor::absent`].
struct Absent;

impl Storage for Absent {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn holds(&self, _: usize, dtype: DType) -> bool {
        dtype == DType::F32
    }

    fn is_absent(&self) -> bool {
        true
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} on {})", self.dtype, self.shape, self.device)
    }
}
