//! The layers that look along time: one module per family, one variant of [`Mixer`] each.

mod convolution;
mod delta;
mod forgetting;
mod gate;
mod hgrn2;
mod mamba2;
mod step;

use fox_tensor::{ParamId, Result, Segments, Tape, Tensor, Var};

use crate::cache::LayerState;
use crate::config::{MixerConfig, ModelConfig};
use crate::observe::Observer;
use crate::params::{ParamList, Parameters};
use crate::{MemoryShape, Pruning};
use delta::Delta;
pub(crate) use forgetting::{Forgetting, Projection};
use hgrn2::Hgrn2;
use mamba2::Mamba2;
pub(crate) use step::{Past, Surroundings};

/// What a mixer needs besides its input.
pub(crate) struct MixerContext<'a> {
    pub params: &'a Parameters,
    /// Queries and keys of each sequence; with a cache, the keys are the cache's rows.
    pub segments: &'a Segments,
    pub pruning: Pruning,
    /// Who is shown what attention works on, and the number of the layer.
    pub observer: Option<(&'a dyn Observer, usize)>,
}

/// What a mixer gives.
pub(crate) struct MixerOutput {
    /// `[R, D]`, to be added to the residual stream.
    pub out: Var,
    /// Attention blocks visited and in all, `[H, 2]`; `None` for what is no attention.
    pub blocks: Option<Tensor>,
}

/// Where a layer stands, and what the layers share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerPlace {
    /// Number of the layer, from 0.
    pub index: usize,
    /// HGRN2's table of lower bounds.
    pub lower_bounds: Option<ParamId>,
}

/// A mixer of any family.
#[derive(Debug)]
pub(crate) enum Mixer {
    Forgetting(Forgetting),
    Delta(Delta),
    Hgrn2(Hgrn2),
    Mamba2(Mamba2),
}

impl Mixer {
    /// Declares the parameters of one layer under `prefix`.
    pub fn declare(
        config: &ModelConfig,
        place: LayerPlace,
        prefix: &str,
        list: &mut ParamList,
    ) -> Self {
        match &config.mixer {
            MixerConfig::Forgetting(mixer) => {
                Mixer::Forgetting(Forgetting::declare(config, mixer, prefix, list))
            }
            MixerConfig::Delta(mixer) => Mixer::Delta(Delta::declare(config, mixer, prefix, list)),
            MixerConfig::Hgrn2(mixer) => {
                Mixer::Hgrn2(Hgrn2::declare(config, mixer, place, prefix, list))
            }
            MixerConfig::Mamba2(mixer) => {
                Mixer::Mamba2(Mamba2::declare(config, mixer, prefix, list))
            }
        }
    }

    /// `x: [R, D]` to `[R, D]`.
    pub fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let recurrent = |out| MixerOutput { out, blocks: None };
        match self {
            Mixer::Forgetting(layer) => layer.forward(tape, x, context, state),
            Mixer::Delta(layer) => layer
                .forward(tape, x, context, state.and_then(LayerState::recurrent))
                .map(recurrent),
            Mixer::Hgrn2(layer) => layer
                .forward(tape, x, context, state.and_then(LayerState::recurrent))
                .map(recurrent),
            Mixer::Mamba2(layer) => layer
                .forward(tape, x, context, state.and_then(LayerState::recurrent))
                .map(recurrent),
        }
    }

    /// Widths of what is kept per token, for memory estimates.
    pub fn memory(&self) -> MemoryShape {
        match self {
            Mixer::Forgetting(layer) => layer.memory(),
            Mixer::Delta(layer) => layer.memory(),
            Mixer::Hgrn2(layer) => layer.memory(),
            Mixer::Mamba2(layer) => layer.memory(),
        }
    }
}

/// The bound of Xavier's uniform initialization with gain `2^-2.5`, for the linear layers of DeltaNet
/// and HGRN2.
fn xavier_bound((rows, cols): (usize, usize)) -> f64 {
    2f64.powf(-2.5) * (6.0 / (rows + cols) as f64).sqrt()
}

/// One state is kept for about this many tokens in training.
const TOKENS_PER_STATE: usize = 64;
