//! Mamba-1 as Samba has it.
//!
//! ```text
//! [u | z] = x Win^T            u = silu(conv(u) + bias)          [delta | B | C] = u Wx^T
//! dt = softplus(delta Wdt^T + dt_bias)                           A = -exp(A_log), per channel and element
//! S_t = exp(dt_t A) S_{t-1} + (dt_t u_t) B_t^T                   y_t = S_t C_t + D u_t
//! out = (y * silu(z)) Wout^T
//! ```

use fox_cache::LayerState;
use fox_tensor::{Activation, Error, ParamId, Result, Tape, Var};

use super::Mamba1Config;
use super::selective_scan::SelectiveScan;
use crate::config::ModelConfig;
use crate::mixers::{LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations, ShortConv};
use crate::params::Init;

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct Mamba1Layer {
    options: Mamba1Config,
    in_proj: ParamId,
    conv: ShortConv,
    x_proj: ParamId,
    dt_proj: ParamId,
    dt_bias: ParamId,
    a_log: ParamId,
    skip: ParamId,
    out_proj: ParamId,
}

impl Mamba1Layer {
    /// Declares the layer's parameters.
    pub fn declare(
        config: &ModelConfig,
        options: &Mamba1Config,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, inner) = (config.hidden_size, options.inner);
        let (states, rank) = (options.state_size, options.rank);
        let by_inputs = |inputs: usize| 1.0 / (inputs.max(1) as f64).sqrt();
        let (min, max, floor) = options.time_step_init;
        // One row for all channels: a configuration alone must not allocate as much as its weights.
        let a_log = (1..=states).map(|n| (n as f32).ln()).collect();
        let in_proj = layer.uniform("in_proj", (2 * inner, width), by_inputs(width));
        let x_proj = layer.uniform("x_proj", (rank + 2 * states, inner), by_inputs(inner));
        let steps = Init::TimeStep { min, max, floor };
        let out_bound = by_inputs(inner) / (config.num_layers as f64).sqrt();
        Mamba1Layer {
            options: options.clone(),
            in_proj: layer.list.stacked(in_proj, &[inner, inner]),
            conv: ShortConv::declare("conv1d", (inner, options.conv_size), true, None, 0, layer),
            x_proj: layer.list.stacked(x_proj, &[rank, states, states]),
            dt_proj: layer.uniform("dt_proj", (inner, rank), by_inputs(rank)),
            dt_bias: layer.push("dt_proj.bias", &[inner], false, steps),
            a_log: layer.push("A_log", &[inner, states], false, Init::Given(a_log)),
            skip: layer.vector("D", inner, 1.0),
            out_proj: layer.uniform("out_proj", (width, inner), out_bound),
        }
    }
}

impl Mixer for Mamba1Layer {
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
        let both = tape.linear(x, &var(self.in_proj), None)?;
        let [raw, z] = parts(tape.split_columns(&both, &[o.inner, o.inner])?)?;
        let u = self.conv.forward(tape, &raw, context, state.as_deref_mut())?;
        let all = tape.linear(&u, &var(self.x_proj), None)?;
        let [delta, b, c] =
            parts(tape.split_columns(&all, &[o.rank, o.state_size, o.state_size])?)?;
        let dt = tape.linear(&delta, &var(self.dt_proj), Some(&var(self.dt_bias)))?;
        let scan = SelectiveScan {
            channels: o.inner,
            states: o.state_size,
            segments: context.segments.clone(),
            before: state.as_ref().map(|state| state.scan().clone()),
        };
        let (a_log, skip) = (var(self.a_log), var(self.skip));
        let [y, after] = parts(tape.custom(scan, &[&u, &dt, &a_log, &b, &c, &skip])?)?;
        if let Some(state) = state {
            state.stage_scan(after.value().clone());
        }
        let y = tape.gated_norm(&y, None, Some(&z), 1, 0.0, Activation::Silu)?;
        Ok(tape.linear(&y, &var(self.out_proj), None)?.into())
    }

    fn saved_activations(&self) -> SavedActivations {
        let o = &self.options;
        // Raw and convolved channels, gate logits, logits of the time steps, outputs of scan and gate; the rank,
        // keys and queries.
        let kept = 6 * o.inner + 2 * (o.rank + 2 * o.state_size);
        SavedActivations { per_token: kept, cheap_per_token: 0 }
    }
}

fn parts<const N: usize>(parts: Vec<Var>) -> Result<[Var; N]> {
    let wrong = |_| Error::argument("mamba1", format!("a result does not have {N} parts"));
    <[Var; N]>::try_from(parts).map_err(wrong)
}
