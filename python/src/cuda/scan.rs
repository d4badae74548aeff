//! Scans with states.

use fox_tensor::{DType, ScanExtras};
use pyo3::prelude::*;

use super::{Session, StreamKey, fail, session};
use crate::errors::exception;
use crate::scan::{Options, Tensors, scan_spec};

/// Shapes of queries `[B, T, G, dk]` and values `[B, T, H, dv]`, whether the decay is per channel, whether f32.
type ScanShape = ([usize; 4], [usize; 4], bool, bool);

/// q, k, v in f32 or bf16; log decay, write strength, skip and state in f32, 0 where absent.
///
/// # Safety
/// The addresses must be those of contiguous tensors of these shapes.
unsafe fn tensors(
    session: &Session,
    at: [u64; 7],
    shape: &ScanShape,
    states: usize,
) -> PyResult<Tensors> {
    let ([b, t, g, dk], [_, _, h, dv], by_channel, wide) = *shape;
    let ((device, dtype), rows) = (session.device(wide), b * t);
    // SAFETY: the caller's promise.
    let tensor = |address: u64, shape: &[usize], dtype: DType| unsafe {
        session.gpu.tensor(device, address, shape, dtype).map_err(fail)
    };
    let maybe = |address: u64, shape: &[usize]| match address {
        0 => Ok(None),
        _ => tensor(address, shape, DType::F32).map(Some),
    };
    Ok(Tensors {
        q: tensor(at[0], &[rows, g * dk], dtype)?,
        k: tensor(at[1], &[rows, g * dk], dtype)?,
        v: tensor(at[2], &[rows, h * dv], dtype)?,
        decay: maybe(at[3], &[rows, if by_channel { h * dk } else { h }])?,
        write: maybe(at[4], &[rows, h])?,
        skip: maybe(at[5], &[h])?,
        state: maybe(at[6], &[states, h * dk * dv])?,
    })
}

/// Queues a scan; results go to `o` `[B, T, H, dv]` and, if it is not 0, the last states `[segments, H, dk, dv]`, f32.
#[pyfunction]
pub fn cuda_scan_forward(
    py: Python<'_>,
    place: StreamKey,
    at: [u64; 7],
    results: [u64; 2],
    shape: ScanShape,
    options: Options,
) -> PyResult<()> {
    py.detach(|| {
        let session = session(place)?;
        let (device, dtype) = session.device(shape.3);
        let spec = scan_spec(shape.0, shape.1, &options)?;
        let keep = ScanExtras { state: results[1] != 0, backward: false };
        // SAFETY: the package passes tensors of these sizes; PyTorch reuses memory in the order of the stream.
        unsafe {
            let tensors = tensors(&session, at, &shape, spec.segments.len())?;
            let backend = device.backend();
            let out = backend.scan_fwd(&tensors.inputs(), &spec, keep).map_err(exception)?;
            session.gpu.copy_to(&out.o, results[0], dtype).map_err(exception)?;
            match &out.state {
                Some(state) if results[1] != 0 => {
                    session.gpu.copy_to(state, results[1], DType::F32).map_err(exception)
                }
                _ => Ok(()),
            }
        }
    })
}

/// Queues the gradients of a scan: those of q, k, v in their type, those of decay, write strength, skip and first states
/// in f32. `given` are the gradients of the output and of the last states, the latter 0 where absent.
#[pyfunction]
pub fn cuda_scan_backward(
    py: Python<'_>,
    place: StreamKey,
    given: [u64; 2],
    at: [u64; 7],
    gradients: [u64; 7],
    shape: ScanShape,
    options: Options,
) -> PyResult<()> {
    py.detach(|| {
        let session = session(place)?;
        let (device, dtype) = session.device(shape.3);
        let spec = scan_spec(shape.0, shape.1, &options)?;
        let [b, t, h, dv] = shape.1;
        // SAFETY: as in the forward.
        unsafe {
            let tensors = tensors(&session, at, &shape, spec.segments.len())?;
            let d_out =
                session.gpu.tensor(device, given[0], [b * t, h * dv], dtype).map_err(fail)?;
            let states = [spec.segments.len(), spec.state_len()];
            let d_state = match given[1] {
                0 => None,
                at => Some(session.gpu.tensor(device, at, states, DType::F32).map_err(fail)?),
            };
            let backend = device.backend();
            let grads = backend
                .scan_bwd(&d_out, d_state.as_ref(), &tensors.inputs(), None, &spec)
                .map_err(exception)?;
            let results = [
                (Some(&grads.dq), dtype),
                (Some(&grads.dk), dtype),
                (Some(&grads.dv), dtype),
                (grads.dlog_decay.as_ref(), DType::F32),
                (grads.dwrite.as_ref(), DType::F32),
                (grads.dskip.as_ref(), DType::F32),
                (grads.dstate.as_ref(), DType::F32),
            ];
            for ((tensor, dtype), address) in results.into_iter().zip(gradients) {
                if let (Some(tensor), true) = (tensor, address != 0) {
                    session.gpu.copy_to(tensor, address, dtype).map_err(exception)?;
                }
            }
            Ok(())
        }
    })
}
