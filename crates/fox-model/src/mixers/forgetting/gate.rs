//! The forget gate of a layer: its parameters, and the log gates that they give.

use fox_tensor::{Activation, ConvSpec, ParamId, Result, Segments, Tape, Var};

use super::{DecayTime, ForgetGate, ForgettingConfig};
use crate::mixers::LayerParams;
use crate::params::{Init, ParamGroup, Parameters};

/// Source of the log gates.
#[derive(Debug)]
pub(super) enum Gate {
    None,
    Projected {
        weight: ParamId,
        bias: ParamId,
    },
    /// One gate for this many heads.
    Shared {
        weight: ParamId,
        bias: ParamId,
        heads: usize,
    },
    Constant {
        bias: ParamId,
    },
    /// Factors on the keys of these heads, each of which is so wide.
    KeyScale {
        weight: ParamId,
        bias: ParamId,
        heads: usize,
        head_dim: usize,
    },
}

impl Gate {
    /// Declares its parameters, initialised with this deviation.
    pub(super) fn declare(
        options: &ForgettingConfig,
        width: usize,
        std: f64,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let heads = options.heads;
        let constant = |decay_time: Option<DecayTime>| match decay_time {
            Some(time) => Init::Given(time.gate_biases(heads)),
            None => Init::Constant(0.0),
        };
        match options.gate {
            ForgetGate::None => Gate::None,
            ForgetGate::Full | ForgetGate::Shared => {
                let shared = options.gate == ForgetGate::Shared;
                let gates = if shared { 1 } else { heads };
                let weight = layer.matrix("fgate_proj", (gates, width), std);
                let bias = layer.vector("fgate_proj.bias", gates, 0.0);
                match shared {
                    true => Gate::Shared { weight, bias, heads },
                    false => Gate::Projected { weight, bias },
                }
            }
            ForgetGate::BiasOnly { decay_time } => {
                let init = constant(decay_time);
                Gate::Constant { bias: layer.push("fgate_bias", &[heads], false, init) }
            }
            ForgetGate::Fixed { decay_time } => {
                let (name, init) = (format!("{}.fgate_bias", layer.prefix), constant(decay_time));
                let bias = layer.list.buffer(ParamGroup::Mixer, name, vec![heads], init);
                Gate::Constant { bias }
            }
            ForgetGate::KeyScale => {
                let (heads, head_dim) = (options.kv_heads, options.head_width(width));
                // The filters of a convolution of one tap.
                let (dims, init) = ([heads * head_dim, 1, 1], Init::Normal { std, zero_row: None });
                Gate::KeyScale {
                    weight: layer.push("key_scale.weight", &dims, true, init),
                    bias: layer.vector("key_scale.bias", heads, 0.0),
                    heads,
                    head_dim,
                }
            }
        }
    }

    /// `[R, H]`, all at most 0; `None` when nothing is forgotten. `logits` are those of projected gates.
    pub(super) fn log_gates(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        logits: Option<&Var>,
        params: &Parameters,
    ) -> Result<Option<Var>> {
        let rows = x.value().rows();
        match self {
            Gate::None | Gate::KeyScale { .. } => Ok(None),
            Gate::Projected { bias, .. } => {
                tape.log_gate(logits, Some(&params.var(*bias)), rows).map(Some)
            }
            Gate::Shared { weight, bias, heads } => {
                let z = tape.linear(x, &params.var(*weight), Some(&params.var(*bias)))?;
                // Every head's logit is the one there is.
                let ones = Var::constant(tape.device().full([*heads, 1], 1.0)?);
                let z = tape.linear(&z, &ones, None)?;
                tape.log_gate(Some(&z), None, rows).map(Some)
            }
            Gate::Constant { bias } => {
                tape.log_gate(None, Some(&params.var(*bias)), rows).map(Some)
            }
        }
    }

    /// Keys `[R, H_kv * d]` times their factors, where the gate has factors.
    pub(super) fn scale_keys(
        &self,
        tape: &mut Tape<'_>,
        k: Var,
        segments: &Segments,
        params: &Parameters,
    ) -> Result<Var> {
        let Gate::KeyScale { weight, bias, heads, head_dim } = *self else { return Ok(k) };
        // A convolution of one tap multiplies channels.
        let spec = ConvSpec { activation: None, l2_norm: None, segments: segments.clone() };
        let products = tape.short_conv(&k, &params.var(weight), None, None, &spec)?;
        let width = heads * head_dim;
        let of_head = |head: usize, channel: usize| f32::from(u8::from(channel / head_dim == head));
        let sums: Vec<f32> = (0..heads * width).map(|i| of_head(i / width, i % width)).collect();
        let spread: Vec<f32> = (0..width * heads).map(|i| of_head(i % heads, i / heads)).collect();
        let device = tape.device().clone();
        let sums = Var::constant(device.from_f32(&sums, [heads, width])?);
        let spread = Var::constant(device.from_f32(&spread, [width, heads])?);
        let z = tape.linear(&products, &sums, Some(&params.var(bias)))?;
        let z = tape.linear(&z, &spread, None)?;
        tape.gated_norm(&k, None, Some(&z), 1, 0.0, Activation::Sigmoid)
    }
}
