//! Linear recurrences on the CPU: the delta rule, gated linear attention, Mamba-2.

use fox_tensor::{Device, ScanExtras, ScanInputs, ScanSpec, Segments, StateUpdate, Tensor};
use pyo3::prelude::*;

use crate::array::{Array, Raw};
use crate::errors::{exception, value_error};
use crate::runtime::{Runtime, runtime};

/// Scale, whether the delta rule, ends of packed sequences.
pub type Options = (f32, bool, Option<Vec<usize>>);

/// Queries and keys `[B, T, G, dk]`, values `[B, T, H, dv]`; log decay `[B, T, H, 1]` or `[B, T, H, dk]`; write
/// strength `[B, T, H]`; skip `[1, 1, H]`; states `[1, segments, H * dk * dv]`.
struct Operands {
    q: Array,
    k: Array,
    v: Array,
    decay: Option<Array>,
    write: Option<Array>,
    skip: Option<Array>,
    state: Option<Array>,
    spec: ScanSpec,
}

/// Operands on a device.
pub struct Tensors {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub decay: Option<Tensor>,
    pub write: Option<Tensor>,
    pub skip: Option<Tensor>,
    pub state: Option<Tensor>,
}

/// Rows of the same length, or packed sequences with these ends.
pub fn segments(batch: usize, time: usize, ends: Option<&[usize]>) -> PyResult<Segments> {
    match ends {
        None => Ok(Segments::uniform(batch, time)),
        Some(ends) if batch == 1 && ends.last() == Some(&time) => {
            Segments::packed(ends).map_err(exception)
        }
        Some(_) => {
            let words = format!("cu_seqlens needs batch 1 and {time} as its last entry");
            Err(value_error(words))
        }
    }
}

/// The options for shapes of queries `[B, T, G, dk]` and values `[B, T, H, dv]`.
pub fn scan_spec(q: [usize; 4], v: [usize; 4], options: &Options) -> PyResult<ScanSpec> {
    let ([batch, time, key_heads, key_dim], [_, _, heads, value_dim]) = (q, v);
    let (scale, delta, ends) = options;
    if key_heads == 0 || !heads.is_multiple_of(key_heads) {
        return Err(value_error(format!("{heads} heads do not share {key_heads} heads of keys")));
    }
    if key_dim == 0 || value_dim == 0 {
        return Err(value_error("a state without rows or columns"));
    }
    let segments = segments(batch, time, ends.as_deref())?;
    let update = if *delta { StateUpdate::Delta } else { StateUpdate::Add };
    Ok(ScanSpec { heads, key_heads, key_dim, value_dim, scale: *scale, update, segments })
}

impl Operands {
    fn new(
        [q, k, v]: [Raw; 3],
        [decay, write, skip, state]: [Option<Raw>; 4],
        options: &Options,
    ) -> PyResult<Self> {
        let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
        let spec = scan_spec(q.shape(), v.shape(), options)?;
        let ([batch, time, ..], heads) = (q.shape(), spec.heads);
        k.expect("k", q.shape())?;
        v.expect("v", [batch, time, heads, spec.value_dim])?;
        let optional = |name, raw: Option<Raw>| raw.map(|raw| Array::new(name, raw)).transpose();
        let decay = optional("g", decay)?;
        if let Some(decay) = &decay {
            let by_channel = decay.shape()[3] != 1;
            if by_channel && spec.key_heads != heads && spec.update == StateUpdate::Add {
                return Err(value_error("a decay per channel needs keys per head"));
            }
            decay.expect("g", [batch, time, heads, if by_channel { spec.key_dim } else { 1 }])?;
        }
        let (write, skip) = (optional("beta", write)?, optional("D", skip)?);
        let state = optional("initial_state", state)?;
        if let Some(write) = &write {
            write.expect("beta", [batch, time, 1, heads])?;
        }
        if let Some(skip) = &skip {
            skip.expect("D", [1, 1, 1, heads])?;
        }
        if let Some(state) = &state {
            state.expect("initial_state", [1, spec.segments.len(), 1, spec.state_len()])?;
        }
        Ok(Operands { q, k, v, decay, write, skip, state, spec })
    }

    /// # Safety
    /// The arrays must lie where they say and stay unchanged while the tensors live.
    unsafe fn tensors(&self, device: &Device) -> PyResult<Tensors> {
        // SAFETY: the caller's promise.
        let read = |array: &Array| unsafe { array.read(device, array.shape()[3]) };
        let maybe = |array: &Option<Array>| array.as_ref().map(read).transpose();
        let skip = maybe(&self.skip)?;
        Ok(Tensors {
            q: read(&self.q)?,
            k: read(&self.k)?,
            v: read(&self.v)?,
            decay: maybe(&self.decay)?,
            write: maybe(&self.write)?,
            skip: skip.map(|x| x.reshape([x.len()])).transpose().map_err(exception)?,
            state: maybe(&self.state)?,
        })
    }
}

impl Tensors {
    pub fn inputs(&self) -> ScanInputs<'_> {
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

/// Writes a tensor to the array if both are there.
///
/// # Safety
/// As [`Array::write`].
unsafe fn write(array: &Option<Array>, tensor: Option<&Tensor>) -> PyResult<()> {
    match (array, tensor) {
        // SAFETY: the caller's promise.
        (Some(array), Some(tensor)) => unsafe { array.write(tensor, array.shape()[3]) },
        _ => Ok(()),
    }
}

fn arrays<const N: usize>(raws: [(&str, Option<Raw>); N]) -> PyResult<[Option<Array>; N]> {
    let mut arrays = [const { None }; N];
    for (slot, (name, raw)) in arrays.iter_mut().zip(raws) {
        *slot = raw.map(|raw| Array::new(name, raw)).transpose()?;
    }
    Ok(arrays)
}

/// Writes the output to `o` `[B, T, H, dv]` and, if it is there, the last states to `[1, segments, H * dk * dv]`.
#[pyfunction]
pub fn scan_forward(
    py: Python<'_>,
    operands: [Raw; 3],
    extras: [Option<Raw>; 4],
    o: Raw,
    state: Option<Raw>,
    options: Options,
) -> PyResult<()> {
    let operands = Operands::new(operands, extras, &options)?;
    let [o, state] = arrays([("o", Some(o)), ("state", state)])?;
    let runtime: &Runtime = runtime()?;
    let keep = ScanExtras { state: state.is_some(), backward: false };
    let work = || {
        // SAFETY: the package holds the arrays during the call, and made the outputs.
        unsafe {
            let tensors = operands.tensors(&runtime.device)?;
            let backend = runtime.device.backend();
            let out =
                backend.scan_fwd(&tensors.inputs(), &operands.spec, keep).map_err(exception)?;
            write(&o, Some(&out.o))?;
            write(&state, out.state.as_ref())
        }
    };
    py.detach(|| runtime.run(work))
}

/// Writes the gradients of q, k, v and, where they are there, of decay, write strength, skip and first states, given
/// those of the output and, if there is one, of the last states. The states of the forward are computed again.
#[pyfunction]
pub fn scan_backward(
    py: Python<'_>,
    d_out: Raw,
    d_state: Option<Raw>,
    operands: [Raw; 3],
    extras: [Option<Raw>; 4],
    gradients: [Option<Raw>; 7],
    options: Options,
) -> PyResult<()> {
    let operands = Operands::new(operands, extras, &options)?;
    let d_out = Array::new("d_out", d_out)?;
    d_out.expect("d_out", operands.v.shape())?;
    let [dq, dk, dv, ddecay, dwrite, dskip, dstate] = gradients;
    let [d_state, dq, dk, dv, ddecay, dwrite, dskip, dstate] = arrays([
        ("d_state", d_state),
        ("dq", dq),
        ("dk", dk),
        ("dv", dv),
        ("dg", ddecay),
        ("dbeta", dwrite),
        ("dD", dskip),
        ("d_initial_state", dstate),
    ])?;
    let runtime: &Runtime = runtime()?;
    let work = || {
        // SAFETY: as in the forward.
        unsafe {
            let tensors = operands.tensors(&runtime.device)?;
            let d_out = d_out.read(&runtime.device, d_out.shape()[3])?;
            let d_state = d_state.map(|x| x.read(&runtime.device, x.shape()[3])).transpose()?;
            let backend = runtime.device.backend();
            let grads = backend
                .scan_bwd(&d_out, d_state.as_ref(), &tensors.inputs(), None, &operands.spec)
                .map_err(exception)?;
            write(&dq, Some(&grads.dq))?;
            write(&dk, Some(&grads.dk))?;
            write(&dv, Some(&grads.dv))?;
            write(&ddecay, grads.dlog_decay.as_ref())?;
            write(&dwrite, grads.dwrite.as_ref())?;
            write(&dskip, grads.dskip.as_ref())?;
            write(&dstate, grads.dstate.as_ref())
        }
    };
    py.detach(|| runtime.run(work))
}
