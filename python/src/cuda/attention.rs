//! Forgetting attention.

use std::borrow::Cow;

use fox_cuda::attention::{Attention, AttentionGrads, AttentionInputs};
use fox_cuda::{Buffer, Float, Gpu};
use fox_tensor::{Acp, AttentionSpec, DType, LogitBound, Mask, Segment, Segments};
use half::bf16;
use pyo3::prelude::*;

use super::{Session, fail, session};
use crate::errors::{exception, value_error};

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
            full_sequence: None,
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
