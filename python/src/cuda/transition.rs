//! PaTH and Wall attention.

use fox_tensor::{AttentionSpec, DType, Device, Tensor};
use pyo3::prelude::*;

use super::{Session, StreamKey, fail, session};
use crate::errors::exception;
use crate::transition::{Options, Tensors, spec};

/// Shapes of queries `[B, T, H, d]` and keys `[B, T, Hk, d]`, d a multiple of 8, and whether f32 rather than bf16.
type Shape = ([usize; 4], [usize; 4], bool);

/// One call: the device of its precision, and its sizes.
struct Call<'a> {
    session: &'a Session,
    device: &'a Device,
    dtype: DType,
    rows: usize,
    spec: AttentionSpec,
}

impl<'a> Call<'a> {
    fn new(session: &'a Session, (q, k, wide): Shape, options: &Options) -> PyResult<Self> {
        let (device, dtype) = session.device(wide);
        Ok(Call { session, device, dtype, rows: q[0] * q[1], spec: spec(q, k, options)? })
    }

    /// # Safety
    /// The address must be that of a contiguous tensor `[rows, columns]`.
    unsafe fn tensor(&self, address: u64, columns: usize, dtype: DType) -> PyResult<Tensor> {
        // SAFETY: the caller's promise.
        let tensor =
            unsafe { self.session.gpu.tensor(self.device, address, [self.rows, columns], dtype) };
        tensor.map_err(fail)
    }

    /// q, k, v in f32 or bf16; transitions and log gates in f32, gates 0 where absent.
    ///
    /// # Safety
    /// As [`Call::tensor`].
    unsafe fn operands(&self, at: [u64; 5], reflections: bool) -> PyResult<Tensors> {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Tensors {
                q: self.tensor(at[0], width, self.dtype)?,
                k: self.tensor(at[1], kv_width, self.dtype)?,
                v: self.tensor(at[2], kv_width, self.dtype)?,
                transition: self.tensor(
                    at[3],
                    if reflections { kv_width } else { width },
                    DType::F32,
                )?,
                gates: match at[4] {
                    0 => None,
                    gates => Some(self.tensor(gates, heads, DType::F32)?),
                },
            })
        }
    }

    /// # Safety
    /// The address must have room for the tensor.
    unsafe fn copy(&self, tensor: &Tensor, address: u64, dtype: DType) -> PyResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.session.gpu.copy_to(tensor, address, dtype) }.map_err(exception)
    }
}

/// Queues the forward; results go to `o` `[B, T, H, d]` and `lse` `[B, T, H]`, f32.
#[pyfunction]
pub fn cuda_transition_forward(
    py: Python<'_>,
    place: StreamKey,
    at: [u64; 5],
    results: [u64; 2],
    shape: Shape,
    options: Options,
) -> PyResult<()> {
    py.detach(|| {
        let session = session(place)?;
        let call = Call::new(&session, shape, &options)?;
        // SAFETY: the package passes tensors of these sizes; PyTorch reuses memory in the order of the stream.
        unsafe {
            let out = call.operands(at, options.0)?.forward(options.0, &call.spec)?;
            call.copy(&out.o, results[0], call.dtype)?;
            call.copy(&out.lse, results[1], DType::F32)
        }
    })
}

/// Queues the gradients: those of q, k, v in their type, those of transitions and log gates in f32. `given` are the
/// gradient of the output, the output, and the log sums.
#[pyfunction]
pub fn cuda_transition_backward(
    py: Python<'_>,
    place: StreamKey,
    given: [u64; 3],
    at: [u64; 5],
    gradients: [u64; 5],
    shape: Shape,
    options: Options,
) -> PyResult<()> {
    py.detach(|| {
        let session = session(place)?;
        let call = Call::new(&session, shape, &options)?;
        let (heads, dtype) = (call.spec.heads, call.dtype);
        let width = heads * call.spec.head_dim;
        // SAFETY: as in the forward.
        unsafe {
            let tensors = call.operands(at, options.0)?;
            let d_out = call.tensor(given[0], width, dtype)?;
            let o = call.tensor(given[1], width, dtype)?;
            let lse = call.tensor(given[2], heads, DType::F32)?;
            let grads = tensors.backward(&d_out, (o, lse), options.0, &call.spec)?;
            call.copy(&grads.dq, gradients[0], dtype)?;
            call.copy(&grads.dk, gradients[1], dtype)?;
            call.copy(&grads.dv, gradients[2], dtype)?;
            call.copy(&grads.dtransition, gradients[3], DType::F32)?;
            match &grads.dgates {
                Some(dgates) if gradients[4] != 0 => call.copy(dgates, gradients[4], DType::F32),
                _ => Ok(()),
            }
        }
    })
}
