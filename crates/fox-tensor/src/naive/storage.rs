//! Host memory of the oracle: f64 for every real type, i32 for integers, with byte counters.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{DType, Device, Error, MemoryStats, Result, Shape, Storage, Tensor};

/// Elements of a tensor.
#[derive(Clone, Debug)]
pub(crate) enum Values {
    Real(Vec<f64>),
    Int(Vec<i32>),
}

impl Values {
    fn bytes(&self) -> usize {
        match self {
            Values::Real(x) => size_of_val(&x[..]),
            Values::Int(x) => size_of_val(&x[..]),
        }
    }
}

/// Counts the bytes of live tensors, so that tests can measure saved activations.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl Meter {
    pub(crate) fn stats(&self) -> MemoryStats {
        let in_use = self.in_use.load(Ordering::Relaxed);
        MemoryStats { in_use, peak: self.peak.load(Ordering::Relaxed), reserved: in_use }
    }

    pub(crate) fn reset_peak(&self) {
        self.peak.store(self.in_use.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(crate) fn store(self: &Arc<Self>, values: Values) -> Arc<dyn Storage> {
        let bytes = values.bytes();
        let in_use = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(in_use, Ordering::Relaxed);
        Arc::new(Stored { values, meter: self.clone() })
    }
}

/// Storage of one tensor.
struct Stored {
    values: Values,
    meter: Arc<Meter>,
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.meter.in_use.fetch_sub(self.values.bytes(), Ordering::Relaxed);
    }
}

impl Storage for Stored {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn holds(&self, len: usize, dtype: DType) -> bool {
        match &self.values {
            Values::Real(x) => x.len() == len && dtype != DType::I32,
            Values::Int(x) => x.len() == len && dtype == DType::I32,
        }
    }
}

/// A row-major matrix of f64, read only.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub rows: usize,
    pub cols: usize,
    pub data: &'a [f64],
}

impl<'a> Matrix<'a> {
    pub(crate) fn row(&self, r: usize) -> &'a [f64] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// Columns `h * d .. (h + 1) * d` of row `r`: one head of one token.
    pub(crate) fn head(&self, r: usize, h: usize, d: usize) -> &'a [f64] {
        &self.row(r)[h * d..(h + 1) * d]
    }
}

/// The values of a tensor.
pub(crate) fn values(x: &Tensor) -> Result<&Values> {
    x.storage::<Stored>().map(|s| &s.values).ok_or_else(|| foreign(x.shape()))
}

/// The values of a tensor that is not shared, for writing.
pub(crate) fn values_mut(x: &mut Tensor) -> Result<&mut Values> {
    let shape = x.shape();
    x.storage_mut::<Stored>().map(|s| &mut s.values).ok_or_else(|| foreign(shape))
}

/// The elements of a real tensor.
pub(crate) fn real(x: &Tensor) -> Result<&[f64]> {
    match values(x)? {
        Values::Real(v) => Ok(v),
        Values::Int(_) => Err(wrong_type(x, DType::F32)),
    }
}

/// The elements of an integer tensor.
pub(crate) fn int(x: &Tensor) -> Result<&[i32]> {
    match values(x)? {
        Values::Int(v) => Ok(v),
        Values::Real(_) => Err(wrong_type(x, DType::I32)),
    }
}

/// The elements of a real tensor as rows.
pub(crate) fn matrix(x: &Tensor) -> Result<Matrix<'_>> {
    Ok(Matrix { rows: x.rows(), cols: x.cols(), data: real(x)? })
}

/// [`matrix`] of an optional operand.
pub(crate) fn maybe_matrix<'a>(x: Option<&'a Tensor>) -> Result<Option<Matrix<'a>>> {
    x.map(matrix).transpose()
}

/// [`real`] of an optional operand.
pub(crate) fn maybe_real(x: Option<&Tensor>) -> Result<Option<&[f64]>> {
    x.map(real).transpose()
}

/// A new real tensor.
pub(crate) fn tensor(
    meter: &Arc<Meter>,
    device: &Device,
    data: Vec<f64>,
    shape: impl Into<Shape>,
) -> Tensor {
    let shape = shape.into();
    debug_assert_eq!(data.len(), shape.len());
    Tensor::from_storage(meter.store(Values::Real(data)), shape, DType::F32, device.clone())
}

fn foreign(shape: Shape) -> Error {
    Error::Device {
        device: "naive".into(),
        detail: format!("a tensor of shape {shape} belongs to another backend or is shared"),
    }
}

fn wrong_type(x: &Tensor, expected: DType) -> Error {
    Error::Type { op: "naive", what: "input", got: x.dtype(), expected }
}
