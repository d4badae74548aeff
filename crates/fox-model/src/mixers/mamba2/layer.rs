//! Mamba-2: a state that decays as a whole, by as much as is written to it.
//!
//! ```text
//! [z | xBC | dtr] = x Win^T              [u | B | C] = silu(conv(xBC) + bias)
//! dt = softplus(dtr + dt_bias)           a = exp(-exp(A_log) dt)
//! S_t = a_t S_{t-1} + B_t (dt_t u_t)^T   y_t = S_t^T C_t + D u_t
//! out = rms(y * silu(z)) Wout^T
//! ```

use fox_cache::LayerState;
use fox_tensor::{Activation, ParamId, Result, ScanVars, Tape, Var};

use super::Mamba2Config;
use crate::config::ModelConfig;
use crate::mixers::{
    LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations, ShortConv, saved_states, scan,
};
use crate::params::Init;

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct Mamba2Layer {
    options: Mamba2Config,
    norm_eps: f32,
    in_proj: ParamId,
    conv: ShortConv,
    dt_bias: ParamId,
    a_log: ParamId,
    skip: ParamId,
    norm: ParamId,
    out_proj: ParamId,
}

impl Mamba2Layer {
    /// Declares the layer's parameters.
    pub fn declare(
        config: &ModelConfig,
        options: &Mamba2Config,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, inner, heads) = (config.hidden_size, options.inner(), options.heads);
        let (min, max, floor) = options.time_step_init;
        let by_head = Init::Given((1..=heads).map(|h| (h as f32).ln()).collect());
        let dt_bias = layer.push("dt_bias", &[heads], false, Init::TimeStep { min, max, floor });
        let a_log = layer.push("A_log", &[heads], false, by_head);
        let skip = layer.vector("D", heads, 1.0);
        let rows = inner + options.conv_width() + heads;
        let out_bound = 1.0 / ((inner * config.num_layers) as f64).sqrt();
        let conv_shape = (options.conv_width(), options.conv_size);
        let in_proj = layer.uniform("in_proj", (rows, width), 1.0 / (width as f64).sqrt());
        // Gates, values, keys, queries, time steps.
        let state = (options.conv_width() - inner) / 2;
        Mamba2Layer {
            options: options.clone(),
            norm_eps: config.norm_eps as f32,
            in_proj: layer.list.stacked(in_proj, &[inner, inner, state, state, heads]),
            conv: ShortConv::declare("conv1d", conv_shape, true, None, 0, layer),
            dt_bias,
            a_log,
            skip,
            norm: layer.vector("norm.weight", inner, 1.0),
            out_proj: layer.uniform("out_proj", (width, inner), out_bound),
        }
    }
}

impl Mixer for Mamba2Layer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let mut state = state.and_then(LayerState::recurrent);
        let var = |id: ParamId| context.params.var(id);
        let o = &self.options;
        let keys = o.groups * o.state_size;
        // The gate alone, and convolved columns and time steps as one matrix, whose columns the convolution divides.
        let widths = [o.inner(), o.conv_width() + o.heads];
        let [z, all] = parts(tape.linear_split(x, &var(self.in_proj), &widths)?)?;
        let widths = [o.inner(), keys, keys];
        let all = self.conv.forward_split(tape, &all, &widths, context, state.as_deref_mut())?;
        let [u, b, c, dt_raw] = parts(all)?;
        let limits = (o.time_step_limit.0 as f32, o.time_step_limit.1 as f32);
        let (dt, log_decay) =
            tape.time_step(&dt_raw, &var(self.dt_bias), &var(self.a_log), limits)?;
        let spec = o.scan().spec(1.0, context.segments);
        let skip = var(self.skip);
        let vars = ScanVars {
            q: &c,
            k: &b,
            v: &u,
            log_decay: Some(&log_decay),
            write: Some(&dt),
            skip: Some(&skip),
        };
        let y = scan(tape, &vars, &spec, state)?;
        let (norm, eps, silu) = (var(self.norm), self.norm_eps, Activation::Silu);
        let y = if o.norm_before_gate {
            tape.gated_norm(&y, Some(&norm), Some(&z), o.groups, eps, silu)?
        } else {
            tape.gate_then_norm(&y, &norm, &z, o.groups, eps, silu)?
        };
        Ok(tape.linear(&y, &var(self.out_proj), None)?.into())
    }

    fn saved_activations(&self) -> SavedActivations {
        let o = &self.options;
        // Gate logits, raw and convolved channels, time steps and their source, the outputs of the
        // scan and of the norm.
        let kept = 3 * o.inner() + 2 * o.conv_width() + 3 * o.heads;
        SavedActivations { per_token: kept + saved_states(o.shape().scan), cheap_per_token: 0 }
    }
}

fn parts<const N: usize>(parts: Vec<Var>) -> Result<[Var; N]> {
    let wrong = |_| fox_tensor::Error::argument("mamba2", format!("a projection has {N} parts"));
    <[Var; N]>::try_from(parts).map_err(wrong)
}
