//! Tensors over memory of the caller, and slices of tensors: for programs whose arrays belong to another library.

use std::ptr::NonNull;
use std::sync::Arc;

use fox_tensor::{DType, Device, Shape, Tensor};

use crate::pool::Buffer;

/// A tensor on the CPU that reads f32 values in place. They are never written: an op that updates its operand copies
/// it first.
///
/// # Safety
/// `start` must point to as many initialised values as the shape has elements, aligned for f32, which neither move
/// nor change while the tensor or a clone of it lives. `device` must be one of this crate.
pub unsafe fn borrowed(device: &Device, start: NonNull<f32>, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    // SAFETY: the caller's promise.
    let buffer = unsafe { Buffer::borrowed(start, shape.len()) };
    Tensor::from_storage(Arc::new(buffer), shape, DType::F32, device.clone())
}

/// The values of a real tensor on the CPU, in place; `None` on another device or for packed weights.
pub fn values(x: &Tensor) -> Option<&[f32]> {
    if x.dtype() == DType::I32 {
        return None;
    }
    x.storage::<Buffer>().map(|buffer| &buffer[..])
}

/// [`values`] for writing; `None` also where the storage is shared or borrowed.
pub fn values_mut(x: &mut Tensor) -> Option<&mut [f32]> {
    if x.dtype() == DType::I32 {
        return None;
    }
    let buffer = x.storage_mut::<Buffer>().filter(|buffer| !buffer.is_borrowed())?;
    Some(&mut buffer[..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowed_memory_is_copied_on_write() {
        let device = crate::device();
        let memory = vec![1.0f32, 2.0, 3.0, 4.0];
        // SAFETY: four values that outlive the tensor.
        let mut tensor = unsafe { borrowed(&device, NonNull::from(&memory[..]).cast(), [2, 2]) };
        assert_eq!(values(&tensor).map(<[f32]>::as_ptr), Some(memory.as_ptr()));
        assert!(values_mut(&mut tensor).is_none());
        let one = device.full([2, 2], 1.0).unwrap();
        let sum = device.backend().add(tensor, &one).unwrap();
        assert_eq!(sum.to_f32().unwrap(), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(memory, [1.0, 2.0, 3.0, 4.0]);
    }
}
