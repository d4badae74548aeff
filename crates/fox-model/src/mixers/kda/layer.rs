//! One layer of Kimi Delta Attention.
//!
//! ```text
//! q, k, v = silu(conv(x Wq^T)), silu(conv(x Wk^T)), silu(conv(x Wv^T))      q, k of length 1 per head
//! b = sigmoid(x Wb^T)                       g = -exp(A_log) softplus(u), u = x Wf0^T Wf1^T + dt_bias
//! S' = diag(e^g_t) S_{t-1}                  S_t = S' + b_t k_t (v_t - S'^T k_t)^T
//! o_t = S_t^T q_t / sqrt(dk)                out = (rms(o) * sigmoid(x Wg0^T Wg1^T + bias)) Wo^T
//! ```

use fox_cache::LayerState;
use fox_tensor::{Activation, ConvSpec, L2Norm, ParamId, Result, ScanVars, Tape, Var};

use super::KdaConfig;
use crate::config::ModelConfig;
use crate::mixers::{
    LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations, ShortConv, delta_norm,
    saved_states, scan, write_strength,
};
use crate::params::Init;

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct KdaLayer {
    options: KdaConfig,
    norm_eps: f32,
    /// Queries, keys, values.
    branches: [Branch; 3],
    b_proj: ParamId,
    /// Decay: two factors of a low-rank projection, rates, bias.
    f_proj: [ParamId; 2],
    a_log: ParamId,
    dt_bias: ParamId,
    /// Output gate: two factors of a low-rank projection, bias.
    g_proj: [ParamId; 2],
    g_bias: ParamId,
    output_norm: ParamId,
    o_proj: ParamId,
}

/// A projection, its convolution and the norm of its heads.
#[derive(Debug)]
struct Branch {
    weight: ParamId,
    conv: Option<ShortConv>,
    l2_norm: Option<L2Norm>,
}

impl KdaLayer {
    /// Declares the layer's parameters.
    pub fn declare(config: &ModelConfig, options: &KdaConfig, layer: &mut LayerParams<'_>) -> Self {
        let (width, heads) = (config.hidden_size, options.value_heads);
        let (keys, values) = (options.heads * options.key_dim, heads * options.value_dim);
        let rank = options.value_dim;
        let std = config.initializer_range;
        let weights = [("q_proj", keys), ("k_proj", keys), ("v_proj", values)]
            .map(|(name, rows)| layer.matrix(name, (rows, width), std));
        let mut index = 0;
        let branches = weights.map(|weight| {
            let (name, channels) =
                [("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values)][index];
            let l2_norm = (index < 2).then(|| delta_norm(options.key_dim));
            let conv = options.conv_size.map(|taps| {
                ShortConv::declare(name, (channels, taps), false, l2_norm, index, layer)
            });
            index += 1;
            Branch { weight, conv, l2_norm }
        });
        let a_log = match options.safe_gate {
            true => Init::Constant(0.0),
            false => Init::LogOfUniform { low: 1.0, high: 16.0 },
        };
        let steps = Init::TimeStep { min: 0.001, max: 0.1, floor: 1e-4 };
        let decays = heads * options.key_dim;
        KdaLayer {
            options: options.clone(),
            norm_eps: config.norm_eps as f32,
            branches,
            b_proj: layer.matrix("b_proj", (heads, width), std),
            f_proj: [
                layer.matrix("f_proj.0", (rank, width), std),
                layer.matrix("f_proj.1", (decays, rank), std),
            ],
            a_log: layer.push("A_log", &[heads], false, a_log),
            dt_bias: layer.push("dt_bias", &[decays], false, steps),
            g_proj: [
                layer.matrix("g_proj.0", (rank, width), std),
                layer.matrix("g_proj.1", (values, rank), std),
            ],
            g_bias: layer.vector("g_proj.1.bias", values, 0.0),
            output_norm: layer.vector("o_norm.weight", options.value_dim, 1.0),
            o_proj: layer.matrix("o_proj", (width, values), std),
        }
    }
}

impl Mixer for KdaLayer {
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
            match &branch.conv {
                Some(conv) => conv.forward(tape, &raw, context, state.as_deref_mut()),
                None => activate(tape, &raw, branch.l2_norm, context),
            }
        };
        let [q, k, v] = &self.branches;
        let (q, k, v) = (branch(tape, q)?, branch(tape, k)?, branch(tape, v)?);
        let write = write_strength(tape, x, &var(self.b_proj), self.options.negative_eigenvalues)?;
        let z = tape.linear(x, &var(self.f_proj[0]), None)?;
        let z = tape.linear(&z, &var(self.f_proj[1]), None)?;
        let bound = self.options.decay_bound.map(|bound| bound as f32);
        let log_decay = tape.channel_decay(&z, &var(self.dt_bias), &var(self.a_log), bound)?;
        let scale = 1.0 / (self.options.key_dim as f32).sqrt();
        let spec = self.options.scan().spec(scale, context.segments);
        let vars = ScanVars {
            q: &q,
            k: &k,
            v: &v,
            log_decay: Some(&log_decay),
            write: Some(&write),
            skip: None,
        };
        let o = scan(tape, &vars, &spec, state)?;
        let z = tape.linear(x, &var(self.g_proj[0]), None)?;
        let z = tape.linear(&z, &var(self.g_proj[1]), Some(&var(self.g_bias)))?;
        let (norm, sigmoid) = (var(self.output_norm), Activation::Sigmoid);
        let y = tape.gated_norm(&o, Some(&norm), Some(&z), spec.heads, self.norm_eps, sigmoid)?;
        Ok(tape.linear(&y, &var(self.o_proj), None)?.into())
    }

    fn saved_activations(&self) -> SavedActivations {
        let (heads, o) = (self.options.value_heads, &self.options);
        let (keys, values) = (o.heads * o.key_dim, heads * o.value_dim);
        // Raw and convolved projections; logits, most and strength of the writes.
        let mut kept = 2 * (2 * keys + values) + 3 * heads;
        // The low-rank projections, and log decays with their logits.
        kept += 2 * o.value_dim + 2 * heads * o.key_dim;
        // Output, its norm, and the gate's logits.
        kept += 3 * values;
        SavedActivations { per_token: kept + saved_states(o.shape().scan), cheap_per_token: 0 }
    }
}

/// Silu and, for queries and keys, the norm, without a convolution: one of a single tap, whose weight is 1.
fn activate(
    tape: &mut Tape<'_>,
    x: &Var,
    l2_norm: Option<L2Norm>,
    context: &MixerContext<'_>,
) -> Result<Var> {
    let one = Var::constant(tape.device().full([x.value().cols(), 1, 1], 1.0)?);
    let segments = context.segments.clone();
    let spec = ConvSpec { activation: Some(Activation::Silu), l2_norm, segments };
    tape.short_conv(x, &one, None, None, &spec)
}
