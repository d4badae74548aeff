//! The short causal convolution that DeltaNet and Mamba-2 have in common.

use fox_cache::RecurrentState;
use fox_tensor::{Activation, ConvSpec, L2Norm, ParamId, Result, Tape, Var};

use super::{LayerParams, MixerContext};
use crate::params::Init;

/// A convolution of every channel with its own taps, then silu and, for queries and keys of the delta
/// rule, division by the norm of each head.
#[derive(Debug)]
pub struct ShortConv {
    weight: ParamId,
    bias: Option<ParamId>,
    l2_norm: Option<L2Norm>,
    /// Which of the layer's convolutions it is.
    index: usize,
}

impl ShortConv {
    /// Declares `name.weight` `[channels, 1, taps]` and, optionally, `name.bias`.
    pub fn declare(
        name: &str,
        (channels, taps): (usize, usize),
        bias: bool,
        l2_norm: Option<L2Norm>,
        index: usize,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let init = Init::Uniform { bound: 1.0 / (taps as f64).sqrt() };
        let inits = (init.clone(), bias.then_some(init));
        Self::declare_with(name, (channels, taps), inits, l2_norm, index, layer)
    }

    /// [`ShortConv::declare`] with these initial values of the weight and, where there is one, of the bias.
    pub fn declare_with(
        name: &str,
        (channels, taps): (usize, usize),
        (weight, bias): (Init, Option<Init>),
        l2_norm: Option<L2Norm>,
        index: usize,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        ShortConv {
            weight: layer.push(&format!("{name}.weight"), &[channels, 1, taps], true, weight),
            bias: bias.map(|init| layer.push(&format!("{name}.bias"), &[channels], false, init)),
            l2_norm,
            index,
        }
    }

    /// `x: [R, C]` to `[R, C]`; with a state, its rows come before the first of each sequence.
    pub fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut RecurrentState>,
    ) -> Result<Var> {
        let spec = self.spec(context);
        let (weight, bias) =
            (context.params.var(self.weight), self.bias.map(|id| context.params.var(id)));
        if let Some(rows) = tape.preceding_rows() {
            return rows.short_conv(tape, x, &weight, bias.as_ref(), &spec);
        }
        let before = state.as_ref().map(|state| state.conv(self.index).clone());
        if let Some(state) = state {
            state.stage_conv(self.index, x.value(), context.segments)?;
        }
        tape.short_conv(x, &weight, bias.as_ref(), before.as_ref(), &spec)
    }

    /// [`ShortConv::forward`] of the first columns of `x: [R, W]`, as many as there are channels, divided by columns
    /// into matrices of these widths; then the other columns as they are.
    pub fn forward_split(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        widths: &[usize],
        context: &MixerContext<'_>,
        state: Option<&mut RecurrentState>,
    ) -> Result<Vec<Var>> {
        if state.is_some() || tape.preceding_rows().is_some() {
            let width = widths.iter().sum();
            let mut parts = tape.split_columns(x, &[width, x.value().cols() - width])?;
            let rest = parts.split_off(1);
            let y = self.forward(tape, &parts[0], context, state)?;
            parts = tape.split_columns(&y, widths)?;
            parts.extend(rest);
            return Ok(parts);
        }
        let (weight, bias) =
            (context.params.var(self.weight), self.bias.map(|id| context.params.var(id)));
        tape.short_conv_split(x, &weight, bias.as_ref(), widths, &self.spec(context))
    }

    fn spec(&self, context: &MixerContext<'_>) -> ConvSpec {
        ConvSpec {
            activation: Some(Activation::Silu),
            l2_norm: self.l2_norm,
            segments: context.segments.clone(),
        }
    }
}
