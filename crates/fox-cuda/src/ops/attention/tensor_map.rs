//! TMA descriptors.

use std::ptr;

use cudarc::driver::sys;

use crate::{Buffer, Error, Result};

/// TMA descriptor of a bf16 tensor; out-of-bounds columns and rows read as zeros. 128 opaque bytes, aligned to 64, like
/// `TensorMap` in `tma.cuh`.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(in crate::ops) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Descriptor of a tensor `[rows, heads, head_dim]` with boxes of 64 columns and `box_rows` rows of one head.
    pub(in crate::ops) fn new<T>(
        buffer: &Buffer<T>,
        heads: usize,
        head_dim: usize,
        box_rows: usize,
    ) -> Result<Self> {
        let rows = buffer.len() / (heads * head_dim);
        Self::of_bf16(buffer.address(), [rows, heads, head_dim], [box_rows, 1])
    }

    /// Descriptor of a tensor `[rows, heads, head_dim]` at `address` with boxes `[box_rows, box_heads, 64]`.
    pub(in crate::ops) fn of_bf16(
        address: u64,
        [rows, heads, head_dim]: [usize; 3],
        [box_rows, box_heads]: [usize; 2],
    ) -> Result<Self> {
        let dims = [head_dim as u64, heads as u64, rows as u64];
        // Strides of heads and rows in bytes.
        let strides = [2 * head_dim as u64, 2 * (heads * head_dim) as u64];
        let boxes = [64u32, box_heads as u32, box_rows as u32];
        let steps = [1u32; 3];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have the lengths of rank 3 and the map is writable. Only kernels use the address, whose
        // launches promise that its buffer is alive.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                ptr::with_exposed_provenance_mut(address as usize),
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().map_err(|e| {
            Error::driver(format!("cuTensorMapEncodeTiled of [{rows}, {heads}, {head_dim}]"), e)
        })?;
        Ok(TensorMap(map))
    }
}
