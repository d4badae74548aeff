//! The forget gate of a layer: its parameters, and the log gates that they give.

use fox_tensor::{ParamId, Result, Tape, Var};

use super::{DecayTime, ForgetGate, ForgettingConfig};
use crate::params::{Init, ParamGroup, ParamList, Parameters};

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
}

impl Gate {
    /// Declares its parameters under `prefix`, initialised with this deviation.
    pub(super) fn declare(
        options: &ForgettingConfig,
        width: usize,
        std: f64,
        prefix: &str,
        list: &mut ParamList,
    ) -> Self {
        let heads = options.heads;
        let constant = |decay_time: Option<DecayTime>| match decay_time {
            Some(time) => Init::Given(time.gate_biases(heads)),
            None => Init::Constant(0.0),
        };
        let name = format!("{prefix}.fgate_bias");
        match options.gate {
            ForgetGate::None => Gate::None,
            ForgetGate::Full | ForgetGate::Shared => {
                let shared = options.gate == ForgetGate::Shared;
                let gates = if shared { 1 } else { heads };
                let name = format!("{prefix}.fgate_proj.weight");
                let weight = list.matrix(ParamGroup::Mixer, name, gates, width, std);
                let name = format!("{prefix}.fgate_proj.bias");
                let bias = list.vector(ParamGroup::Mixer, name, gates, 0.0);
                match shared {
                    true => Gate::Shared { weight, bias, heads },
                    false => Gate::Projected { weight, bias },
                }
            }
            ForgetGate::BiasOnly { decay_time } => {
                let init = constant(decay_time);
                Gate::Constant {
                    bias: list.push(ParamGroup::Mixer, name, vec![heads], false, init),
                }
            }
            ForgetGate::Fixed { decay_time } => {
                let init = constant(decay_time);
                Gate::Constant { bias: list.buffer(ParamGroup::Mixer, name, vec![heads], init) }
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
            Gate::None => Ok(None),
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
}
