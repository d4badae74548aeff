//! Forgetting attention on the GPU: forward, backward, gate scans, pruning.
//!
//! Both directions have the same stages: `tiling` divides segments into tiles (cached), `gates` scans the log gates,
//! `plan` bounds the logits and schedules tiles, then the main kernel runs. `tiles` defines every tile size;
//! `launch_cache` selects kernels and caches tilings, kernels and zeroed memory. `tensors` implements the op traits.

mod backward;
mod forward;
mod gates;
mod launch_cache;
mod plan;
mod rows;
pub(in crate::ops) mod spans;
pub(super) mod tensor_map;
pub(in crate::ops) mod tensors;
pub(in crate::ops) mod tiles;
pub(in crate::ops) mod tiling;
mod two_pass;

pub use backward::AttentionGrads;
pub(in crate::ops) use backward::BackwardPlan;
pub use forward::AttentionOut;
pub(crate) use launch_cache::LaunchCache;

use fox_tensor::{Acp, AttentionSpec, LogitBound, Mask};

use launch_cache::Variant;

use crate::params::KernelParams;
use crate::{Buffer, Error, Float, Generation, Gpu, Result, Source};

/// Operands of forgetting attention, in bf16 or f32.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a, T> {
    /// Queries `[R_q, H * d]`.
    pub q: &'a Buffer<T>,
    /// Keys `[R_k, H_kv * d]`.
    pub k: &'a Buffer<T>,
    /// Values `[R_k, H_kv * d]`. Rows between segments must be finite.
    pub v: &'a Buffer<T>,
    /// Log forget gates of the key rows `[R_k, H]`; `None` means no forgetting.
    pub log_gates: Option<&'a Buffer<f32>>,
}

/// A validated attention call: GPU, options and operands.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a, T> {
    pub(in crate::ops) gpu: &'a Gpu,
    pub(in crate::ops) spec: &'a AttentionSpec,
    pub(in crate::ops) inputs: AttentionInputs<'a, T>,
    q_rows: usize,
    k_rows: usize,
    portable: bool,
    /// Logits of attention sinks `[H]`; used by the backward.
    sinks: Option<&'a Buffer<f32>>,
}

impl<'a, T: Float> Attention<'a, T> {
    /// Validates the operands.
    pub fn new(
        gpu: &'a Gpu,
        spec: &'a AttentionSpec,
        inputs: AttentionInputs<'a, T>,
    ) -> Result<Self> {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = *spec;
        let fail = |detail: String| Err(Error::argument("attention", detail));
        if !head_dim.is_multiple_of(8) || !(8..=256).contains(&head_dim) {
            return fail(format!("head dim {head_dim} is not a multiple of 8 from 8 to 256"));
        }
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return fail(format!("{heads} heads cannot share {kv_heads} key heads"));
        }
        let (q_width, k_width) = (heads * head_dim, kv_heads * head_dim);
        let (q_rows, k_rows) = (inputs.q.len() / q_width, inputs.k.len() / k_width);
        let gates = inputs.log_gates.map_or(k_rows * heads, Buffer::len);
        if inputs.q.len() != q_rows * q_width
            || inputs.k.len() != k_rows * k_width
            || inputs.v.len() != inputs.k.len()
            || gates != k_rows * heads
        {
            return fail(format!(
                "q has {} elements, k {}, v {}, gates {gates}: they do not fit {heads} heads, {kv_heads} key heads of {head_dim}",
                inputs.q.len(),
                inputs.k.len(),
                inputs.v.len()
            ));
        }
        if let Some(s) = spec.segments.as_slice().last()
            && (s.q_start + s.q_len > q_rows || s.k_start + s.k_len > k_rows)
        {
            return fail(format!("{s:?} reaches beyond {q_rows} query or {k_rows} key rows"));
        }
        if spec.window == Some(0) {
            return fail("a window of 0 leaves queries without keys; use 1 or more".into());
        }
        let here = [inputs.q, inputs.k, inputs.v].iter().all(|x| gpu.owns(x));
        if !here || !inputs.log_gates.is_none_or(|x| gpu.owns(x)) {
            return fail("an operand is on another GPU".into());
        }
        check_bounds(spec)?;
        Ok(Attention { gpu, spec, inputs, q_rows, k_rows, portable: false, sinks: None })
    }

    /// Uses the portable kernels on any GPU, for comparisons.
    pub fn portable(mut self) -> Self {
        self.portable = true;
        self
    }

    /// Gradients of attention with these sinks `[H]`.
    pub(in crate::ops) fn with_sinks(mut self, sinks: Option<&'a Buffer<f32>>) -> Self {
        self.sinks = sinks;
        self
    }

    fn uses_wgmma(&self) -> bool {
        self.gpu.generation().has_wgmma() && !self.portable && !T::WIDE
    }

    /// Factor on q.k in the log2 domain.
    fn scale_log2(&self) -> f32 {
        self.spec.scale * std::f32::consts::LOG2_E
    }

    fn mask_code(&self) -> i32 {
        match self.spec.mask {
            Mask::Causal => 0,
            Mask::Bidirectional => 1,
        }
    }

    /// Window size, 0 for none; clamped to the number of keys, which masks the same.
    pub(in crate::ops) fn window(&self) -> usize {
        self.spec.window.map_or(0, |window| window.min(self.k_rows.max(1)))
    }

    /// Launches an auxiliary kernel compiled for the operands' type.
    fn launch_helper<P: KernelParams>(
        &self,
        source: Source,
        entry: &'static str,
        grid: [usize; 3],
        block: usize,
        params: P,
    ) -> Result<()> {
        let defines = || vec![format!("WIDE={}", i32::from(T::WIDE))];
        let kernel = self.kernel(source, entry, Variant::Wide(T::WIDE), defines)?;
        // SAFETY: `new` checked the operands; all other buffers are allocated for this tiling.
        unsafe { kernel.launch(grid, block).params(params)?.run(|| self.shapes()) }
    }

    /// Shapes, for error messages.
    pub(in crate::ops) fn shapes(&self) -> String {
        format!(
            "q [{}, {} x {d}], k [{}, {} x {d}], {} segments, {:?}",
            self.q_rows,
            self.spec.heads,
            self.k_rows,
            self.spec.kv_heads,
            self.spec.segments.len(),
            self.spec.mask,
            d = self.spec.head_dim,
        )
    }
}

/// Checks the shapes of the tensors that bound the logits.
fn check_bounds(spec: &AttentionSpec) -> Result<()> {
    let Acp::On { bound, .. } = &spec.acp else { return Ok(()) };
    let AttentionSpec { heads, kv_heads, head_dim: d, .. } = *spec;
    let fits = match bound {
        LogitBound::Norms => true,
        LogitBound::QkNorm { q, k } => {
            [d, heads * d].contains(&q.len()) && [d, kv_heads * d].contains(&k.len())
        }
        LogitBound::Given(bounds) => bounds.len() == spec.segments.len() * heads,
    };
    match fits {
        true => Ok(()),
        false => Err(Error::argument("attention", format!("{bound:?} do not fit {heads} heads"))),
    }
}

/// All variants, for compilation checks.
pub(super) fn variants(generation: Generation) -> Vec<(Source, Vec<String>)> {
    [tiles::variants(generation), gates::variants(), plan::variants(), rows::variants()].concat()
}
