//! Attention with a transition per token between query and key: PaTH (reflections) and Wall (decays per channel).

use fox_tensor::{
    Acp, AttentionOut, AttentionSpec, DType, Device, Mask, PathInputs, Tensor, WallInputs,
};
use pyo3::prelude::*;

use crate::array::{Array, Raw};
use crate::errors::exception;
use crate::runtime::runtime;
use crate::scan::segments;

/// Whether transitions are reflections `[B, T, Hk, d]` rather than log decays `[B, T, H, d]`; scale, window, ends of
/// packed sequences.
pub type Options = (bool, f32, Option<usize>, Option<Vec<usize>>);

/// The options for shapes of queries `[B, T, H, d]` and values `[B, T, Hk, dv]`; heads are filled up to a multiple of 8.
pub fn spec(q: [usize; 4], v: [usize; 4], options: &Options) -> PyResult<AttentionSpec> {
    let ([batch, time, heads, d], [_, _, kv_heads, value_dim]) = (q, v);
    let &(_, scale, window, ref ends) = options;
    Ok(AttentionSpec {
        heads,
        kv_heads,
        head_dim: d.max(value_dim).next_multiple_of(8),
        scale,
        mask: Mask::Causal,
        window,
        acp: Acp::Off,
        segments: segments(batch, time, ends.as_deref())?,
        full_sequence: None,
    })
}

/// Operands on a device, heads filled up. The op checks that they fit each other.
pub struct Tensors {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub transition: Tensor,
    pub gates: Option<Tensor>,
}

/// Gradients in the order of [`Tensors`].
pub struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    pub dtransition: Tensor,
    pub dgates: Option<Tensor>,
}

impl Tensors {
    fn path(&self) -> PathInputs<'_> {
        let Tensors { q, k, v, transition: u, gates } = self;
        PathInputs { q, k, v, u, log_gates: gates.as_ref() }
    }

    fn wall(&self) -> WallInputs<'_> {
        let Tensors { q, k, v, transition: log_decays, gates } = self;
        WallInputs { q, k, v, log_decays, log_gates: gates.as_ref() }
    }

    /// Output `[B T, H d]` and log of the softmax denominators `[B T, H]`.
    pub fn forward(&self, reflections: bool, spec: &AttentionSpec) -> PyResult<AttentionOut> {
        let backend = self.q.device().backend();
        let out = match reflections {
            true => backend.path_attention_fwd(&self.path(), spec),
            false => backend.wall_attention_fwd(&self.wall(), &[], spec),
        };
        out.map_err(exception)
    }

    /// Gradients, given that of the output, and `(o, lse)` of the forward.
    pub fn backward(
        &self,
        d_out: &Tensor,
        (o, lse): (Tensor, Tensor),
        reflections: bool,
        spec: &AttentionSpec,
    ) -> PyResult<Gradients> {
        let device: &Device = self.q.device();
        let tiles = device.zeros([spec.heads, 4], DType::I32).map_err(exception)?;
        let (backend, out) = (device.backend(), AttentionOut { o, lse, tiles });
        if reflections {
            let grads = backend.path_attention_bwd(d_out, &self.path(), &out, spec);
            let grads = grads.map_err(exception)?;
            return Ok(Gradients {
                dq: grads.dq,
                dk: grads.dk,
                dv: grads.dv,
                dtransition: grads.du,
                dgates: grads.dlog_gates,
            });
        }
        let grads = backend.wall_attention_bwd(d_out, &self.wall(), &out, spec);
        let grads = grads.map_err(exception)?;
        Ok(Gradients {
            dq: grads.dq,
            dk: grads.dk,
            dv: grads.dv,
            dtransition: grads.dlog_decays,
            dgates: grads.dlog_gates,
        })
    }
}

/// Queries `[B, T, H, d]`, keys `[B, T, Hk, d]`, values `[B, T, Hk, dv]`, transitions, log gates `[B, T, H]`.
struct Operands {
    q: Array,
    k: Array,
    v: Array,
    transition: Array,
    gates: Option<Array>,
    spec: AttentionSpec,
}

impl Operands {
    fn new(
        [q, k, v, transition]: [Raw; 4],
        gates: Option<Raw>,
        options: &Options,
    ) -> PyResult<Self> {
        let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
        let spec = spec(q.shape(), v.shape(), options)?;
        let ([batch, time, heads, d], [.., value_dim]) = (q.shape(), v.shape());
        k.expect("k", [batch, time, spec.kv_heads, d])?;
        v.expect("v", [batch, time, spec.kv_heads, value_dim])?;
        let transition = Array::new("transition", transition)?;
        let transition_heads = if options.0 { spec.kv_heads } else { heads };
        transition.expect("transition", [batch, time, transition_heads, d])?;
        let gates = gates.map(|gates| Array::new("g", gates)).transpose()?;
        if let Some(gates) = &gates {
            gates.expect("g", [batch, time, 1, heads])?;
        }
        Ok(Operands { q, k, v, transition, gates, spec })
    }

    /// # Safety
    /// The arrays must lie where they say and stay unchanged while the tensors live.
    unsafe fn tensors(&self, device: &Device) -> PyResult<Tensors> {
        let (width, heads) = (self.spec.head_dim, self.spec.heads);
        // SAFETY: the caller's promise.
        let read = |array: &Array, width| unsafe { array.read(device, width) };
        Ok(Tensors {
            q: read(&self.q, width)?,
            k: read(&self.k, width)?,
            v: read(&self.v, width)?,
            transition: read(&self.transition, width)?,
            gates: self.gates.as_ref().map(|gates| read(gates, heads)).transpose()?,
        })
    }

    /// The output `[B, T, H, dv]` and the log sums `[B, T, H]`.
    fn results(&self, o: Raw, lse: Raw) -> PyResult<[Array; 2]> {
        let ([batch, time, heads, _], [.., value_dim]) = (self.q.shape(), self.v.shape());
        let (o, lse) = (Array::new("o", o)?, Array::new("lse", lse)?);
        o.expect("o", [batch, time, heads, value_dim])?;
        lse.expect("lse", [batch, time, 1, heads])?;
        Ok([o, lse])
    }
}

/// Writes the output to `o` `[B, T, H, dv]` and the log of the softmax denominators to `lse` `[B, T, H]`, f32.
#[pyfunction]
pub fn transition_forward(
    py: Python<'_>,
    operands: [Raw; 4],
    gates: Option<Raw>,
    results: [Raw; 2],
    options: Options,
) -> PyResult<()> {
    let operands = Operands::new(operands, gates, &options)?;
    let [o, lse] = results;
    let [o, lse] = operands.results(o, lse)?;
    let (runtime, spec) = (runtime()?, &operands.spec);
    let work = || {
        // SAFETY: the package holds the arrays during the call, and made the outputs.
        unsafe {
            let out = operands.tensors(&runtime.device)?.forward(options.0, spec)?;
            o.write(&out.o, spec.head_dim)?;
            lse.write(&out.lse, spec.heads)
        }
    };
    py.detach(|| runtime.run(work))
}

/// Writes the gradients of q, k, v, transitions and, if there are, of the log gates, each shaped as what it belongs to.
#[pyfunction]
pub fn transition_backward(
    py: Python<'_>,
    d_out: Raw,
    operands: [Raw; 4],
    gates: Option<Raw>,
    results: [Raw; 2],
    gradients: ([Raw; 4], Option<Raw>),
    options: Options,
) -> PyResult<()> {
    let operands = Operands::new(operands, gates, &options)?;
    let [o, lse] = results;
    let ([o, lse], d_out) = (operands.results(o, lse)?, Array::new("d_out", d_out)?);
    d_out.expect("d_out", o.shape())?;
    let [dq, dk, dv, dtransition] = gradients.0;
    let made = [
        ("dq", dq, &operands.q),
        ("dk", dk, &operands.k),
        ("dv", dv, &operands.v),
        ("dtransition", dtransition, &operands.transition),
    ];
    let mut arrays = Vec::with_capacity(made.len());
    for (name, raw, like) in made {
        let array = Array::new(name, raw)?;
        array.expect(name, like.shape())?;
        arrays.push(array);
    }
    let dgates = gradients.1.map(|raw| Array::new("dg", raw)).transpose()?;
    if let (Some(dgates), Some(gates)) = (&dgates, &operands.gates) {
        dgates.expect("dg", gates.shape())?;
    }
    let (runtime, spec) = (runtime()?, &operands.spec);
    let work = || {
        let (device, width) = (&runtime.device, spec.head_dim);
        // SAFETY: as in the forward.
        unsafe {
            let tensors = operands.tensors(device)?;
            let out = (o.read(device, width)?, lse.read(device, spec.heads)?);
            let grads = tensors.backward(&d_out.read(device, width)?, out, options.0, spec)?;
            let tensors = [&grads.dq, &grads.dk, &grads.dv, &grads.dtransition];
            for (array, tensor) in arrays.iter().zip(tensors) {
                array.write(tensor, width)?;
            }
            match (&dgates, &grads.dgates) {
                (Some(array), Some(gradient)) => array.write(gradient, spec.heads),
                _ => Ok(()),
            }
        }
    };
    py.detach(|| runtime.run(work))
}
