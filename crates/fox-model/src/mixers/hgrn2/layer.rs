//! HGRN2: every row of the state decays at a separate rate, and keys are one minus the forget gate.
//!
//! ```text
//! q = silu(x Wq^T)       f = lb + (1 - lb) sigmoid(x Wf^T)       k = 1 - f       v = x Wi^T
//! S_t = diag(f_t) S_{t-1} + k_t v_t^T                            o_t = S_t^T q_t / sqrt(e)
//! out = rms(o) Wo^T                                              one norm over the full width
//! ```

use fox_cache::LayerState;
use fox_tensor::{Activation, ParamId, Result, ScanVars, Tape, Var};

use super::{Hgrn2Config, LowerBounds};
use crate::config::ModelConfig;
use crate::mixers::{
    LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations, saved_states, scan,
    xavier_bound,
};

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct Hgrn2Layer {
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

impl Hgrn2Layer {
    /// Declares the layer's parameters.
    pub fn declare(
        config: &ModelConfig,
        options: &Hgrn2Config,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, gates) = (config.hidden_size, options.heads * options.expand_ratio);
        let matrix = |layer: &mut LayerParams<'_>, name: &str, rows: usize| {
            layer.uniform(name, (rows, width), xavier_bound((rows, width)))
        };
        let [q_proj, f_proj, i_proj] = [("q_proj", gates), ("f_proj", gates), ("i_proj", width)]
            .map(|(name, rows)| matrix(layer, name, rows));
        // The first layer's bounds are 0.
        let used = options.lower_bounds == LowerBounds::Used && layer.index > 0;
        Hgrn2Layer {
            options: options.clone(),
            width,
            layer: layer.index,
            lower_bounds: layer.shared.filter(|_| used),
            q_proj,
            f_proj,
            i_proj,
            output_norm: layer.vector("g_norm.weight", width, 1.0),
            o_proj: matrix(layer, "o_proj", width),
        }
    }
}

impl Mixer for Hgrn2Layer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let var = |id: ParamId| context.params.var(id);
        let (q, z) =
            (tape.linear(x, &var(self.q_proj), None)?, tape.linear(x, &var(self.f_proj), None)?);
        let v = tape.linear(x, &var(self.i_proj), None)?;
        let lower = match self.lower_bounds {
            Some(table) => Some(tape.lower_bound(&var(table), self.layer)?),
            None => None,
        };
        let (q, k, log_f) = tape.hgrn_gates(&q, &z, lower.as_ref())?;
        let scale = 1.0 / (self.options.expand_ratio as f32).sqrt();
        let spec = self.options.scan(self.width).spec(scale, context.segments);
        let vars =
            ScanVars { q: &q, k: &k, v: &v, log_decay: Some(&log_f), write: None, skip: None };
        let o = scan(tape, &vars, &spec, state.and_then(LayerState::recurrent))?;
        let (norm, eps) = (var(self.output_norm), self.options.output_norm_eps as f32);
        let y = tape.gated_norm(&o, Some(&norm), None, 1, eps, Activation::Sigmoid)?;
        Ok(tape.linear(&y, &var(self.o_proj), None)?.into())
    }

    /// Raw projections, gates, the output and its norm.
    fn saved_activations(&self) -> SavedActivations {
        let gates = self.options.heads * self.options.expand_ratio;
        let states = saved_states(self.options.shape(self.width).scan);
        SavedActivations { per_token: 5 * gates + 3 * self.width + states, cheap_per_token: 0 }
    }
}
