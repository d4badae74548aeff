//! Attention and scans on a GPU, on the caller's stream and memory.
//!
//! Everything here takes addresses of contiguous tensors. The package makes them so; it copies nothing that lies in
//! order already, whether heads come before time or after.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fox_cuda::attention::{Attention, AttentionGrads, AttentionInputs};
use fox_cuda::{Buffer, Cuda, Float, Gpu, Precision};
use fox_tensor::{
    Acp, AttentionSpec, DType, Device, LogitBound, Mask, ScanInputs, ScanKeep, Segment, Segments,
    Tensor,
};
use half::bf16;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

use crate::errors::{exception, value_error};
use crate::scan;

/// A GPU with one stream of the caller's: kernels and scratch memory are ordered by it.
struct Session {
    gpu: Arc<Gpu>,
    narrow: Device,
    wide: Device,
}

/// Number of the GPU, and its stream.
type Place = (usize, u64);

static SESSIONS: Mutex<Option<HashMap<Place, Arc<Session>>>> = Mutex::new(None);

fn fail(error: fox_cuda::Error) -> PyErr {
    let words = error.to_string();
    match error {
        fox_cuda::Error::OutOfMemory { .. } => PyMemoryError::new_err(words),
        _ => PyRuntimeError::new_err(words),
    }
}

fn session(place: Place) -> PyResult<Arc<Session>> {
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let sessions = sessions.get_or_insert_default();
    if let Some(session) = sessions.get(&place) {
        return Ok(Arc::clone(session));
    }
    // SAFETY: PyTorch's streams belong to the primary context and are never destroyed.
    let gpu = Arc::new(unsafe { Gpu::on_stream(place.0, place.1) }.map_err(fail)?);
    let device = |precision| -> PyResult<Device> {
        Ok(Device::new(Cuda::new(Arc::clone(&gpu), precision).map_err(fail)?))
    };
    let (narrow, wide) = (device(Precision::Bf16)?, device(Precision::F32)?);
    let session = Arc::new(Session { gpu, narrow, wide });
    sessions.insert(place, Arc::clone(&session));
    Ok(session)
}

/// Bytes of scratch memory that are held for all streams, beside what PyTorch allocates.
#[pyfunction]
pub fn cuda_memory() -> usize {
    let sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let all = sessions.iter().flat_map(HashMap::values);
    all.map(|session| session.gpu.memory().reserved).sum()
}

/// `[B, M, N, H, Hk, d]`.
type Dims = [usize; 6];

/// The sequences, each head one where heads come before time; `starts` are the first keys of each, `ends` those of packed
/// sequences.
fn segments(
    [b, m, n, h, _, _]: Dims,
    head_first: bool,
    starts: Option<&[usize]>,
    ends: Option<&[usize]>,
) -> PyResult<Segments> {
    if let Some(ends) = ends {
        if head_first || b != 1 || m != n || ends.last() != Some(&n) {
            return Err(value_error("packed sequences need time before heads and batch 1"));
        }
        return Segments::packed(ends).map_err(exception);
    }
    if starts.is_some_and(|s| s.len() != b || s.iter().any(|&start| start > n)) {
        return Err(value_error(format!("seq_start must be {b} numbers from 0 to {n}")));
    }
    let copies = if head_first { h } else { 1 };
    let segment = |row: usize| {
        let start = starts.map_or(0, |starts| starts[row / copies]);
        let q_len = m.min(n - start);
        Segment { q_start: row * m + m - q_len, q_len, k_start: row * n + start, k_len: n - start }
    };
    Segments::new((0..b * copies).map(segment).collect()).map_err(exception)
}

/// Forgetting attention of one shape with one set of options; calls differ in addresses, GPU and stream.
#[pyclass(frozen)]
pub struct CudaAttention {
    dims: Dims,
    /// Whether f32 rather than bf16.
    wide: bool,
    /// The heads of one row, and the options; bounds on the logits come with a call.
    spec: AttentionSpec,
}

#[pymethods]
impl CudaAttention {
    /// `dims` are `[B, M, N, H, Hk, d]`. `log_tolerance` prunes; `starts` and `ends` are `seq_start` and `cu_seqlens`.
    #[new]
    fn new(
        dims: Dims,
        wide: bool,
        head_first: bool,
        scale: f32,
        causal: bool,
        window: Option<usize>,
        log_tolerance: Option<f32>,
        starts: Option<Vec<usize>>,
        ends: Option<Vec<usize>>,
    ) -> PyResult<Self> {
        let [_, m, n, h, hk, d] = dims;
        if m > n || hk == 0 || !h.is_multiple_of(hk) || (head_first && h != hk) {
            return Err(value_error(format!("{m} queries, {n} keys, {h} heads, {hk} key heads")));
        }
        let (heads, kv_heads) = if head_first { (1, 1) } else { (h, hk) };
        let norms = |log_tolerance| Acp::On { log_tolerance, bound: LogitBound::Norms };
        let spec = AttentionSpec {
            heads,
            kv_heads,
            head_dim: d,
            scale,
            mask: if causal { Mask::Causal } else { Mask::Bidirectional },
            window,
            acp: log_tolerance.map_or(Acp::Off, norms),
            segments: segments(dims, head_first, starts.as_deref(), ends.as_deref())?,
            whole: None,
        };
        Ok(CudaAttention { dims, wide, spec })
    }

    /// Queues the forward on the stream; results go to `o` and `lse`. 0 for what there is not: gates, bounds
    /// `[segments, H]`, or an `lse` that is wanted.
    fn forward(
        &self,
        py: Python<'_>,
        device: usize,
        stream: u64,
        q: u64,
        k: u64,
        v: u64,
        gates: u64,
        bounds: u64,
        o: u64,
        lse: u64,
    ) -> PyResult<()> {
        let at = [q, k, v, gates];
        py.detach(|| {
            let session = session((device, stream))?;
            let spec = self.bounded(&session, bounds)?;
            // SAFETY: the package passes tensors of these sizes; PyTorch reuses memory in the order of the stream.
            unsafe {
                match self.wide {
                    true => forward::<f32>(&session.gpu, at, [o, lse], self.dims, &spec),
                    false => forward::<bf16>(&session.gpu, at, [o, lse], self.dims, &spec),
                }
            }
        })
    }

    /// Queues the backward on the stream; gradients go to the last four addresses.
    fn backward(
        &self,
        py: Python<'_>,
        device: usize,
        stream: u64,
        q: u64,
        k: u64,
        v: u64,
        gates: u64,
        bounds: u64,
        o: u64,
        lse: u64,
        d_out: u64,
        dq: u64,
        dk: u64,
        dv: u64,
        dgates: u64,
    ) -> PyResult<()> {
        let (at, saved, gradients) = ([q, k, v, gates], [d_out, o, lse], [dq, dk, dv, dgates]);
        py.detach(|| {
            let session = session((device, stream))?;
            let spec = self.bounded(&session, bounds)?;
            // SAFETY: as in the forward.
            unsafe {
                let backward = if self.wide { backward::<f32> } else { backward::<bf16> };
                backward(&session.gpu, at, saved, gradients, self.dims, &spec)
            }
        })
    }
}

impl CudaAttention {
    /// The options with the bounds at this address, if it is not 0.
    fn bounded(&self, session: &Session, bounds: u64) -> PyResult<Cow<'_, AttentionSpec>> {
        let (Acp::On { log_tolerance, .. }, true) = (&self.spec.acp, bounds != 0) else {
            return Ok(Cow::Borrowed(&self.spec));
        };
        let shape = [self.spec.segments.len(), self.spec.heads];
        // SAFETY: the package made them of this size and holds them during the call; work on them is ordered by
        // the stream, as is the reuse of their memory.
        let tensor = unsafe { session.gpu.tensor(&session.wide, bounds, shape, DType::F32) };
        let bound = LogitBound::Given(tensor.map_err(fail)?);
        let acp = Acp::On { log_tolerance: *log_tolerance, bound };
        Ok(Cow::Owned(AttentionSpec { acp, ..self.spec.clone() }))
    }
}

/// Addresses of q, k, v and log gates (0 for none).
type Addresses = [u64; 4];

struct Operands<T> {
    q: Buffer<T>,
    k: Buffer<T>,
    v: Buffer<T>,
    gates: Option<Buffer<f32>>,
}

impl<T: Float> Operands<T> {
    /// # Safety
    /// The addresses must be those of tensors of these sizes that stay while work on them is queued.
    unsafe fn new(gpu: &Gpu, [q, k, v, gates]: Addresses, [b, m, n, h, hk, d]: Dims) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Operands {
                q: gpu.borrow(q, b * m * h * d),
                k: gpu.borrow(k, b * n * hk * d),
                v: gpu.borrow(v, b * n * hk * d),
                gates: (gates != 0).then(|| gpu.borrow(gates, b * n * h)),
            }
        }
    }

    fn inputs(&self) -> AttentionInputs<'_, T> {
        AttentionInputs { q: &self.q, k: &self.k, v: &self.v, log_gates: self.gates.as_ref() }
    }
}

/// # Safety
/// As [`Operands::new`], for `o` `[B, M, H, d]` and `lse` `[B, M, H]` too.
unsafe fn forward<T: Float>(
    gpu: &Gpu,
    at: Addresses,
    [o, lse]: [u64; 2],
    dims @ [b, m, _, h, _, d]: Dims,
    spec: &AttentionSpec,
) -> PyResult<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let operands = Operands::<T>::new(gpu, at, dims);
        let attention = Attention::new(gpu, spec, operands.inputs()).map_err(fail)?;
        let lse = match lse {
            0 => gpu.alloc(b * m * h).map_err(fail)?,
            lse => gpu.borrow(lse, b * m * h),
        };
        attention.forward_into(gpu.borrow(o, b * m * h * d), lse).map_err(fail)?;
    }
    Ok(())
}

/// # Safety
/// As [`forward`], for the gradients too.
unsafe fn backward<T: Float>(
    gpu: &Gpu,
    at: Addresses,
    [d_out, o, lse]: [u64; 3],
    [dq, dk, dv, dgates]: Addresses,
    dims @ [b, m, n, h, hk, d]: Dims,
    spec: &AttentionSpec,
) -> PyResult<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let operands = Operands::<T>::new(gpu, at, dims);
        let attention = Attention::new(gpu, spec, operands.inputs()).map_err(fail)?;
        let grads = AttentionGrads {
            dq: gpu.borrow(dq, b * m * h * d),
            dk: gpu.borrow(dk, b * n * hk * d),
            dv: gpu.borrow(dv, b * n * hk * d),
            dlog_gates: (at[3] != 0).then(|| gpu.borrow(dgates, b * n * h)),
        };
        let rows = |address| gpu.borrow(address, b * m * h * d);
        let (o, d_out): (Buffer<T>, Buffer<T>) = (rows(o), rows(d_out));
        let lse = gpu.borrow(lse, b * m * h);
        attention.backward_into((&o, &lse), &d_out, &grads).map_err(fail)
    }
}

/// Shapes of queries `[B, T, G, dk]` and values `[B, T, H, dv]`, whether the decay is per channel, whether f32.
type ScanShape = ([usize; 4], [usize; 4], bool, bool);

struct ScanTensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Option<Tensor>,
    write: Option<Tensor>,
    skip: Option<Tensor>,
    state: Option<Tensor>,
}

impl ScanTensors {
    /// q, k, v in f32 or bf16; log decay, write strength, skip and state in f32, 0 where absent.
    ///
    /// # Safety
    /// The addresses must be those of contiguous tensors of these shapes.
    unsafe fn new(
        session: &Session,
        device: &Device,
        at: [u64; 7],
        shape: &ScanShape,
        states: usize,
    ) -> PyResult<Self> {
        let ([b, t, g, dk], [_, _, h, dv], by_channel, wide) = *shape;
        let dtype = if wide { DType::F32 } else { DType::Bf16 };
        let rows = b * t;
        // SAFETY: the caller's promise.
        let tensor = |address: u64, shape: &[usize], dtype: DType| unsafe {
            session.gpu.tensor(device, address, shape, dtype).map_err(fail)
        };
        let maybe = |address: u64, shape: &[usize]| match address {
            0 => Ok(None),
            _ => tensor(address, shape, DType::F32).map(Some),
        };
        Ok(ScanTensors {
            q: tensor(at[0], &[rows, g * dk], dtype)?,
            k: tensor(at[1], &[rows, g * dk], dtype)?,
            v: tensor(at[2], &[rows, h * dv], dtype)?,
            decay: maybe(at[3], &[rows, if by_channel { h * dk } else { h }])?,
            write: maybe(at[4], &[rows, h])?,
            skip: maybe(at[5], &[h])?,
            state: maybe(at[6], &[states, h * dk * dv])?,
        })
    }

    fn inputs(&self) -> ScanInputs<'_> {
        ScanInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            log_decay: self.decay.as_ref(),
            write: self.write.as_ref(),
            skip: self.skip.as_ref(),
            state: self.state.as_ref(),
        }
    }
}

/// Queues a scan; results go to `o` `[B, T, H, dv]` and, if it is not 0, the last states `[segments, H, dk, dv]`, f32.
#[pyfunction]
pub fn cuda_scan_forward(
    py: Python<'_>,
    place: Place,
    at: [u64; 7],
    results: [u64; 2],
    shape: ScanShape,
    options: scan::Options,
) -> PyResult<()> {
    py.detach(|| {
        let session = session(place)?;
        let device = if shape.3 { &session.wide } else { &session.narrow };
        let dtype = if shape.3 { DType::F32 } else { DType::Bf16 };
        let spec = scan::scan_spec(shape.0, shape.1, &options)?;
        let keep = ScanKeep { state: results[1] != 0, backward: false };
        // SAFETY: the package passes tensors of these sizes; PyTorch reuses memory in the order of the stream.
        unsafe {
            let tensors = ScanTensors::new(&session, device, at, &shape, spec.segments.len())?;
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

/// Queues the gradients of a scan: those of q, k, v in their type, those of decay, write strength and skip in f32.
#[pyfunction]
pub fn cuda_scan_backward(
    py: Python<'_>,
    place: Place,
    d_out: u64,
    at: [u64; 7],
    gradients: [u64; 6],
    shape: ScanShape,
    options: scan::Options,
) -> PyResult<()> {
    py.detach(|| {
        let session = session(place)?;
        let device = if shape.3 { &session.wide } else { &session.narrow };
        let dtype = if shape.3 { DType::F32 } else { DType::Bf16 };
        let spec = scan::scan_spec(shape.0, shape.1, &options)?;
        let [b, t, h, dv] = shape.1;
        // SAFETY: as in the forward.
        unsafe {
            let tensors = ScanTensors::new(&session, device, at, &shape, spec.segments.len())?;
            let d_out = session.gpu.tensor(device, d_out, [b * t, h * dv], dtype).map_err(fail)?;
            let backend = device.backend();
            let grads =
                backend.scan_bwd(&d_out, &tensors.inputs(), None, &spec).map_err(exception)?;
            let results = [
                (Some(&grads.dq), dtype),
                (Some(&grads.dk), dtype),
                (Some(&grads.dv), dtype),
                (grads.dlog_decay.as_ref(), DType::F32),
                (grads.dwrite.as_ref(), DType::F32),
                (grads.dskip.as_ref(), DType::F32),
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
