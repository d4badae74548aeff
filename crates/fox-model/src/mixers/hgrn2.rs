//! HGRN2: a state whose every row decays at its own rate, and keys that are what was forgotten.
//!
//! ```text
//! q = silu(x Wq^T)       f = lb + (1 - lb) sigmoid(x Wf^T)       k = 1 - f       v = x Wi^T
//! S_t = diag(f_t) S_{t-1} + k_t v_t^T                            o_t = S_t^T q_t / sqrt(e)
//! out = rms(o) Wo^T                                              one norm over the full width
//! ```

use fox_tensor::{Activation, ParamId, Result, ScanSpec, ScanVars, Tape, Update, Var};

use super::{LayerPlace, MixerContext, TOKENS_PER_STATE, xavier_bound};
use crate::MemoryShape;
use crate::config::{Hgrn2Config, LowerBounds, ModelConfig};
use crate::params::{ParamGroup, ParamList};
use crate::recurrent_state::RecurrentState;

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(crate) struct Hgrn2 {
    options: Hgrn2Config,
    width: usize,
    layer: usize,
    /// The table of lower bounds, where it has an effect.
    lower_bounds: Option<ParamId>,
    q_proj: ParamId,
    f_proj: ParamId,
    i_proj: ParamId,
    output_norm: ParamId,
    o_proj: ParamId,
}

impl Hgrn2 {
    /// Declares the layer's parameters under `prefix`, e.g. `model.layers.0.attn`.
    pub fn declare(
        config: &ModelConfig,
        options: &Hgrn2Config,
        place: LayerPlace,
        prefix: &str,
        list: &mut ParamList,
    ) -> Self {
        let (width, gates) = (config.hidden_size, options.heads * options.expand_ratio);
        let matrix = |list: &mut ParamList, name: &str, rows: usize| {
            let (name, dims) = (format!("{prefix}.{name}.weight"), (rows, width));
            list.uniform_matrix(ParamGroup::Mixer, name, dims, xavier_bound(dims))
        };
        let [q_proj, f_proj, i_proj] = [("q_proj", gates), ("f_proj", gates), ("i_proj", width)]
            .map(|(name, rows)| matrix(list, name, rows));
        let norm = format!("{prefix}.g_norm.weight");
        // The first layer's bounds are 0.
        let used = options.lower_bounds == LowerBounds::Used && place.index > 0;
        Hgrn2 {
            options: options.clone(),
            width,
            layer: place.index,
            lower_bounds: place.lower_bounds.filter(|_| used),
            q_proj,
            f_proj,
            i_proj,
            output_norm: list.vector(ParamGroup::Mixer, norm, width, 1.0),
            o_proj: matrix(list, "o_proj", width),
        }
    }

    /// `x: [R, D]`, the normalised stream, to `[R, D]`.
    pub fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut RecurrentState>,
    ) -> Result<Var> {
        let var = |id: ParamId| context.params.var(id);
        let (q, z) =
            (tape.linear(x, &var(self.q_proj), None)?, tape.linear(x, &var(self.f_proj), None)?);
        let v = tape.linear(x, &var(self.i_proj), None)?;
        let lower = match self.lower_bounds {
            Some(table) => Some(tape.lower_bound(&var(table), self.layer)?),
            None => None,
        };
        let (q, k, log_f) = tape.hgrn_gates(&q, &z, lower.as_ref())?;
        let spec = ScanSpec {
            heads: self.options.heads,
            key_heads: self.options.heads,
            key_dim: self.options.expand_ratio,
            value_dim: self.width / self.options.heads,
            scale: 1.0 / (self.options.expand_ratio as f32).sqrt(),
            update: Update::Add,
            segments: context.segments.clone(),
        };
        let before = state.as_ref().map(|state| state.scan().clone());
        let vars =
            ScanVars { q: &q, k: &k, v: &v, log_decay: Some(&log_f), write: None, skip: None };
        let (o, after) = tape.scan(&vars, before.as_ref(), before.is_some(), &spec)?;
        if let Some((state, after)) = state.zip(after) {
            state.stage_scan(after);
        }
        let (norm, eps) = (var(self.output_norm), self.options.output_norm_eps as f32);
        let y = tape.gated_norm(&o, Some(&norm), None, 1, eps, Activation::Sigmoid)?;
        tape.linear(&y, &var(self.o_proj), None)
    }

    /// Widths of what the tape and the cache keep: raw projections, gates, the output and its norm.
    pub fn memory(&self) -> MemoryShape {
        let gates = self.options.heads * self.options.expand_ratio;
        let shape = self.options.shape(self.width);
        MemoryShape {
            cheap_per_token: 0,
            activations_per_token: 5 * gates
                + 3 * self.width
                + shape.scan.div_ceil(TOKENS_PER_STATE),
            cache_per_token: 0,
            cache_per_sequence: shape.len(),
        }
    }
}
