//! DeltaNet, and Gated DeltaNet when the state decays.
//!
//! ```text
//! q, k, v = silu(conv(x Wq^T)), silu(conv(x Wk^T)), silu(conv(x Wv^T))      q, k of length 1 per head
//! b = sigmoid(x Wb^T)                                a = exp(-exp(A_log) softplus(x Wa^T + dt_bias))
//! S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T                   o_t = S_t^T q_t / sqrt(dk)
//! out = (rms(o) * silu(x Wg^T)) Wo^T                                        a and the gate if there are
//! ```

use fox_cache::LayerState;
use fox_tensor::{Activation, ParamId, Result, ScanVars, Tape, Var};

use super::DeltaConfig;
use crate::config::ModelConfig;
use crate::mixers::{
    LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations, ShortConv, delta_norm,
    head_norm, saved_states, scan, write_strength, xavier_bound,
};
use crate::params::Init;

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct DeltaLayer {
    options: DeltaConfig,
    norm_eps: f32,
    q: Branch,
    k: Branch,
    v: Branch,
    b_proj: ParamId,
    decay: Option<Decay>,
    output_gate: Option<ParamId>,
    output_norm: ParamId,
    o_proj: ParamId,
}

/// A projection and its convolution.
#[derive(Debug)]
struct Branch {
    weight: ParamId,
    conv: ShortConv,
}

/// Source of the decay.
#[derive(Debug)]
struct Decay {
    weight: ParamId,
    a_log: ParamId,
    bias: ParamId,
}

impl DeltaLayer {
    /// Declares the layer's parameters.
    pub fn declare(
        config: &ModelConfig,
        options: &DeltaConfig,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, heads) = (config.hidden_size, options.value_heads);
        let (keys, values) = (options.heads * options.key_dim, heads * options.value_dim);
        let matrix = |layer: &mut LayerParams<'_>, name: &str, dims: (usize, usize)| {
            layer.uniform(name, dims, xavier_bound(dims))
        };
        let [wq, wk, wv] = [("q_proj", keys), ("k_proj", keys), ("v_proj", values)]
            .map(|(name, rows)| matrix(layer, name, (rows, width)));
        let b_proj = matrix(layer, "b_proj", (heads, width));
        let decay = options.decay.then(|| {
            let rates = Init::LogOfUniform { low: 0.0, high: 16.0 };
            let steps = Init::TimeStep { min: 0.001, max: 0.1, floor: 1e-4 };
            Decay {
                weight: matrix(layer, "a_proj", (heads, width)),
                a_log: layer.push("A_log", &[heads], false, rates),
                bias: layer.push("dt_bias", &[heads], false, steps),
            }
        });
        let mut conv = |name: &str, channels: usize, index: usize| {
            let norm = (index < 2).then(|| delta_norm(options.key_dim));
            let shape = (channels, options.conv_size);
            ShortConv::declare(name, shape, false, norm, index, layer)
        };
        let convs =
            (conv("q_conv1d", keys, 0), conv("k_conv1d", keys, 1), conv("v_conv1d", values, 2));
        let output_gate = options.output_gate.then(|| matrix(layer, "g_proj", (values, width)));
        DeltaLayer {
            options: options.clone(),
            norm_eps: config.norm_eps as f32,
            q: Branch { weight: wq, conv: convs.0 },
            k: Branch { weight: wk, conv: convs.1 },
            v: Branch { weight: wv, conv: convs.2 },
            b_proj,
            decay,
            output_gate,
            output_norm: layer.vector("o_norm.weight", options.value_dim, 1.0),
            o_proj: matrix(layer, "o_proj", (width, values)),
        }
    }
}

impl Mixer for DeltaLayer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let mut state = state.and_then(LayerState::recurrent);
        let var = |id: ParamId| context.params.var(id);
        let mut branch = |tape: &mut Tape<'_>, branch: &Branch| {
            let raw = tape.linear(x, &var(branch.weight), None)?;
            branch.conv.forward(tape, &raw, context, state.as_deref_mut())
        };
        let (q, k, v) = (branch(tape, &self.q)?, branch(tape, &self.k)?, branch(tape, &self.v)?);
        let write = write_strength(tape, x, &var(self.b_proj), self.options.negative_eigenvalues)?;
        let log_decay = match &self.decay {
            None => None,
            Some(decay) => {
                let z = tape.linear(x, &var(decay.weight), None)?;
                let (bias, a_log) = (var(decay.bias), var(decay.a_log));
                Some(tape.time_step(&z, &bias, &a_log, (0.0, f32::INFINITY))?.1)
            }
        };
        let scale = 1.0 / (self.options.key_dim as f32).sqrt();
        let spec = self.options.scan().spec(scale, context.segments);
        let vars = ScanVars {
            q: &q,
            k: &k,
            v: &v,
            log_decay: log_decay.as_ref(),
            write: Some(&write),
            skip: None,
        };
        let o = scan(tape, &vars, &spec, state)?;
        let norm = var(self.output_norm);
        let y = match self.output_gate {
            None => head_norm(tape, &o, &norm, &spec, self.norm_eps)?,
            Some(id) => {
                let (z, silu) = (tape.linear(x, &var(id), None)?, Activation::Silu);
                tape.gated_norm(&o, Some(&norm), Some(&z), spec.heads, self.norm_eps, silu)?
            }
        };
        Ok(tape.linear(&y, &var(self.o_proj), None)?.into())
    }

    fn saved_activations(&self) -> SavedActivations {
        let (heads, o) = (self.options.value_heads, &self.options);
        let (keys, values) = (o.heads * o.key_dim, heads * o.value_dim);
        // Raw and convolved projections, the logits, the most and the strength of the writes.
        let mut kept = 2 * (2 * keys + values) + 3 * heads;
        kept += if self.decay.is_some() { 2 * heads } else { 0 };
        // Output, its norm, and the gate's logits.
        kept += if self.output_gate.is_some() { 3 * values } else { 2 * values };
        SavedActivations { per_token: kept + saved_states(o.shape().scan), cheap_per_token: 0 }
    }
}
