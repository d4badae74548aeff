//! Forgetting attention on the CPU.

use fox_tensor::{
    Acp, AttentionInputs, AttentionOut, AttentionSpec, Device, LogitBound, Mask, Segment, Segments,
    Tensor,
};
use pyo3::prelude::*;

use crate::array::{Array, Raw};
use crate::errors::{exception, value_error};
use crate::runtime::runtime;

/// Scale, whether causal, window, log tolerance of pruning, bounds on the logits `[1, segments, H]`, first visible key
/// of each sequence, ends of packed sequences.
type Options =
    (f32, bool, Option<usize>, Option<f32>, Option<Raw>, Option<Vec<usize>>, Option<Vec<usize>>);

/// Queries, keys, values, log gates.
struct Operands {
    q: Array,
    k: Array,
    v: Array,
    gates: Option<Array>,
    options: Options,
    /// Width of heads in computations: that of keys or of values, rounded up to a multiple of 8.
    width: usize,
}

/// The operands as tensors.
struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Option<Tensor>,
    spec: AttentionSpec,
}

impl Operands {
    fn new(q: Raw, k: Raw, v: Raw, gates: Option<Raw>, options: Options) -> PyResult<Self> {
        let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
        let gates = gates.map(|gates| Array::new("log_fgate", gates)).transpose()?;
        let ([batch, m, heads, d], [_, n, kv_heads, value_dim]) = (q.shape(), v.shape());
        k.expect("k", [batch, n, kv_heads, d])?;
        v.expect("v", [batch, n, kv_heads, value_dim])?;
        if let Some(gates) = &gates {
            gates.expect("log_fgate", [batch, n, 1, heads])?;
        }
        let widest = d.max(value_dim);
        if d == 0 || value_dim == 0 || widest > 256 {
            return Err(value_error(format!("head dim {widest} is not from 1 to 256")));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(value_error(format!(
                "{heads} query heads do not share {kv_heads} key heads"
            )));
        }
        if m > n {
            return Err(value_error(format!("{m} queries, but only {n} keys")));
        }
        Ok(Operands { q, k, v, gates, options, width: widest.next_multiple_of(8) })
    }

    fn segments(&self) -> PyResult<Segments> {
        let ([batch, m, ..], [_, n, ..]) = (self.q.shape(), self.k.shape());
        let (starts, ends) = (&self.options.5, &self.options.6);
        if let Some(ends) = ends {
            if batch != 1 || m != n || starts.is_some() || ends.last() != Some(&n) {
                let words = format!(
                    "cu_seqlens needs batch 1, as many queries as keys, no seq_start, and {n} as its last entry"
                );
                return Err(value_error(words));
            }
            return Segments::packed(ends).map_err(exception);
        }
        let none = vec![0; batch];
        let starts = starts.as_ref().unwrap_or(&none);
        if starts.len() != batch || starts.iter().any(|&start| start > n) {
            return Err(value_error(format!("seq_start must be {batch} numbers from 0 to {n}")));
        }
        let segment = |(b, &start): (usize, &usize)| {
            let q_len = m.min(n - start);
            Segment { q_start: b * m + m - q_len, q_len, k_start: b * n + start, k_len: n - start }
        };
        Segments::new(starts.iter().enumerate().map(segment).collect()).map_err(exception)
    }

    fn spec(&self, device: &Device) -> PyResult<AttentionSpec> {
        let (scale, causal, window, log_tolerance, bounds, ..) = self.options.clone();
        let segments = self.segments()?;
        let ([_, _, heads, _], [_, _, kv_heads, _]) = (self.q.shape(), self.k.shape());
        let bound = match bounds {
            Some(bounds) => {
                let bounds = Array::new("adaptive_threshold", bounds)?;
                bounds.expect("adaptive_threshold", [1, segments.len(), 1, heads])?;
                // SAFETY: as for the operands.
                LogitBound::Given(unsafe { bounds.read(device, heads) }?)
            }
            None => LogitBound::Norms,
        };
        if window == Some(0) {
            return Err(value_error("a window of 0 keys; use 1 or more"));
        }
        if log_tolerance.is_some_and(|tolerance| tolerance.is_nan() || tolerance > 0.0) {
            return Err(value_error("log_tolerance must be at most 0"));
        }
        Ok(AttentionSpec {
            heads,
            kv_heads,
            head_dim: self.width,
            scale,
            mask: if causal { Mask::Causal } else { Mask::Bidirectional },
            window,
            acp: log_tolerance.map_or(Acp::Off, |log_tolerance| Acp::On { log_tolerance, bound }),
            segments,
            full_sequence: None,
        })
    }

    /// # Safety
    /// The arrays must lie where they say and stay unchanged while the tensors live.
    unsafe fn tensors(&self, device: &Device) -> PyResult<Tensors> {
        let (width, heads) = (self.width, self.q.shape()[2]);
        // SAFETY: the caller's promise.
        let read = |array: &Array, width| unsafe { array.read(device, width) };
        Ok(Tensors {
            q: read(&self.q, width)?,
            k: read(&self.k, width)?,
            v: read(&self.v, width)?,
            gates: self.gates.as_ref().map(|gates| read(gates, heads)).transpose()?,
            spec: self.spec(device)?,
        })
    }
}

impl Tensors {
    fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs { q: &self.q, k: &self.k, v: &self.v, log_gates: self.gates.as_ref() }
    }
}

/// Writes the output to `o` `[B, M, H, dv]` and the log of the softmax denominators to `lse` `[B, M, H]`, f32.
#[pyfunction]
pub fn attention_forward(
    py: Python<'_>,
    q: Raw,
    k: Raw,
    v: Raw,
    gates: Option<Raw>,
    o: Raw,
    lse: Raw,
    options: Options,
) -> PyResult<()> {
    let operands = Operands::new(q, k, v, gates, options)?;
    let [batch, m, heads, _] = operands.q.shape();
    let (o, lse) = (Array::new("o", o)?, Array::new("lse", lse)?);
    o.expect("o", [batch, m, heads, operands.v.shape()[3]])?;
    lse.expect("lse", [batch, m, 1, heads])?;
    let runtime = runtime()?;
    let work = || {
        // SAFETY: the package holds the arrays during the call, and made the outputs.
        unsafe {
            let tensors = operands.tensors(&runtime.device)?;
            let backend = runtime.device.backend();
            let out = backend.attention_fwd(&tensors.inputs(), &tensors.spec).map_err(exception)?;
            o.write(&out.o, operands.width)?;
            lse.write(&out.lse, heads)
        }
    };
    py.detach(|| runtime.run(work))
}

/// Writes the gradients of `q`, `k`, `v` and, if there are, of the log gates, each shaped as what it belongs to.
#[pyfunction]
pub fn attention_backward(
    py: Python<'_>,
    d_out: Raw,
    q: Raw,
    k: Raw,
    v: Raw,
    gates: Option<Raw>,
    o: Raw,
    lse: Raw,
    gradients: (Raw, Raw, Raw, Option<Raw>),
    options: Options,
) -> PyResult<()> {
    let operands = Operands::new(q, k, v, gates, options)?;
    let [batch, m, heads, _] = operands.q.shape();
    let (d_out, o, lse) =
        (Array::new("d_out", d_out)?, Array::new("o", o)?, Array::new("lse", lse)?);
    for (name, array) in [("d_out", &d_out), ("o", &o)] {
        array.expect(name, [batch, m, heads, operands.v.shape()[3]])?;
    }
    lse.expect("lse", [batch, m, 1, heads])?;
    let (dq, dk, dv) = (
        Array::new("dq", gradients.0)?,
        Array::new("dk", gradients.1)?,
        Array::new("dv", gradients.2)?,
    );
    dq.expect("dq", operands.q.shape())?;
    dk.expect("dk", operands.k.shape())?;
    dv.expect("dv", operands.v.shape())?;
    let dgates = gradients.3.map(|raw| Array::new("dlog_fgate", raw)).transpose()?;
    if let (Some(dgates), Some(gates)) = (&dgates, &operands.gates) {
        dgates.expect("dlog_fgate", gates.shape())?;
    }
    let (runtime, width) = (runtime()?, operands.width);
    let work = || {
        let device = &runtime.device;
        // SAFETY: as in the forward.
        unsafe {
            let tensors = operands.tensors(device)?;
            let out = AttentionOut {
                o: o.read(device, width)?,
                lse: lse.read(device, heads)?,
                tiles: device.zeros([heads, 4], fox_tensor::DType::I32).map_err(exception)?,
            };
            let d_out = d_out.read(device, width)?;
            let grads = device
                .backend()
                .attention_bwd(&d_out, &tensors.inputs(), &out, &tensors.spec)
                .map_err(exception)?;
            dq.write(&grads.dq, width)?;
            dk.write(&grads.dk, width)?;
            dv.write(&grads.dv, width)?;
            match (&dgates, &grads.dlog_gates) {
                (Some(array), Some(gradient)) => array.write(gradient, heads),
                _ => Ok(()),
            }
        }
    };
    py.detach(|| runtime.run(work))
}
