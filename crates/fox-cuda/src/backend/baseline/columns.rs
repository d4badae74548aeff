//! Columns of a matrix as matrices of their own, and back.

use fox_tensor::{DType, Tensor};

use crate::backend::launcher::Variant;
use crate::backend::storage::memory;
use crate::backend::{Cuda, int};
use crate::{Result, Source};

/// Some columns of a matrix in memory.
struct Columns {
    address: u64,
    stride: usize,
}

impl Cuda {
    /// Parts of these widths `[R, w]` of `x: [R, C]`, in its type.
    pub(super) fn split(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        let (rows, stride, dtype) = (x.rows(), x.cols(), x.dtype());
        let mut address = memory(x)?.data.address();
        let mut parts = Vec::with_capacity(widths.len());
        for &width in widths {
            let (part, at) = self.output([rows, width], dtype, x.device())?;
            let to = Columns { address: at, stride: width };
            self.copy_columns(&to, &Columns { address, stride }, rows, width, dtype)?;
            address += (width * dtype.size()) as u64;
            parts.push(part);
        }
        Ok(parts)
    }

    /// Parts `[R, w]` side by side `[R, C]`, in the type of activations.
    pub(super) fn join(&self, parts: &[Tensor]) -> Result<Tensor> {
        let (rows, dtype) = (parts[0].rows(), self.activations());
        let stride = parts.iter().map(Tensor::cols).sum();
        let (whole, mut address) = self.output([rows, stride], dtype, parts[0].device())?;
        for part in parts {
            let (width, from) = (part.cols(), self.activation(part)?);
            let from = Columns { address: from.address(), stride: width };
            self.copy_columns(&Columns { address, stride }, &from, rows, width, dtype)?;
            address += (width * dtype.size()) as u64;
        }
        Ok(whole)
    }

    fn copy_columns(
        &self,
        to: &Columns,
        from: &Columns,
        rows: usize,
        width: usize,
        dtype: DType,
    ) -> Result<()> {
        // Accesses of 8 elements need every row to begin at a multiple of them.
        let aligned = [to, from].iter().all(|x| {
            x.stride.is_multiple_of(8) && x.address.is_multiple_of(8 * dtype.size() as u64)
        });
        let variant = Variant::plain(dtype, if aligned { width } else { 1 });
        let pieces = rows * width / variant.vec;
        let args = [
            to.address.into(),
            from.address.into(),
            pieces.into(),
            int(width).into(),
            int(to.stride).into(),
            int(from.stride).into(),
        ];
        // SAFETY: parameters as declared in baseline.cu; both matrices have these rows and columns.
        unsafe { self.launch_flat(Source::BASELINE, "copy_columns", variant, rows * width, &args) }
    }
}
