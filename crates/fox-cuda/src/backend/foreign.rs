//! Tensors over foreign device memory, for programs whose arrays belong to another library.

use std::sync::Arc;

use fox_tensor::{DType, Device, Shape, Tensor};

use super::storage::{Data, Memory, memory};
use crate::ops::packed::Packed;
use crate::{Error, Gpu, Result};

impl Gpu {
    /// A tensor of a device on this GPU that reads f32 or bf16 values where they lie.
    ///
    /// # Safety
    /// As many elements as the shape has must lie at `address` on this GPU, and stay unchanged while the tensor, its
    /// clones and the work queued on them live. `device` must be a [`Cuda`](crate::Cuda) on this GPU.
    pub unsafe fn tensor(
        &self,
        device: &Device,
        address: u64,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Tensor> {
        let shape = shape.into();
        // SAFETY: the caller's promise.
        let data = unsafe {
            match dtype {
                DType::F32 => Data::F32(self.borrow(address, shape.len())),
                DType::Bf16 => Data::Bf16(self.borrow(address, shape.len())),
                DType::I32 => {
                    return Err(Error::argument("cuda", "integers cannot be borrowed"));
                }
            }
        };
        Ok(Tensor::from_storage(Arc::new(Memory::new(data)), shape, dtype, device.clone()))
    }

    /// Copies a tensor's elements to `address`, converted to `dtype` where they are of another type.
    ///
    /// # Safety
    /// The range must have room for them on this GPU and not be used elsewhere meanwhile.
    pub unsafe fn copy_to(&self, x: &Tensor, address: u64, dtype: DType) -> fox_tensor::Result<()> {
        if x.dtype() != dtype {
            let mut converted = x.device().uninit(x.dims(), dtype)?;
            x.device().backend().copy_rows(x, 0, &mut converted, 0, x.rows())?;
            // SAFETY: the caller's promise.
            return unsafe { self.copy_to(&converted, address, dtype) };
        }
        if let Data::Packed(_) = memory(x)?.data {
            return Err(Packed::refusal().into());
        }
        let bytes = x.len() * dtype.size();
        // SAFETY: the tensor is live and has this many bytes; the caller's promise for the rest.
        unsafe { self.copy(address, memory(x)?.data.address(), bytes) }?;
        Ok(())
    }
}
