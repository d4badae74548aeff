//! The layers that look along time: one module per family, one variant of [`Mixer`] each.

mod forgetting;

use fox_tensor::{Result, Segments, Tape, Tensor, Var};

use crate::cache::LayerState;
use crate::config::{MixerConfig, ModelConfig};
use crate::observe::Observer;
use crate::params::{ParamList, Parameters};
use crate::{MemoryShape, Pruning};
use forgetting::Forgetting;

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
    /// Attention blocks visited and in all, `[H, 2]`.
    pub blocks: Tensor,
}

/// A mixer of any family.
#[derive(Debug)]
pub(crate) enum Mixer {
    Forgetting(Forgetting),
}

impl Mixer {
    /// Declares the parameters of one layer under `prefix`.
    pub fn declare(config: &ModelConfig, prefix: &str, list: &mut ParamList) -> Self {
        let MixerConfig::Forgetting(mixer) = &config.mixer;
        Mixer::Forgetting(Forgetting::declare(config, mixer, prefix, list))
    }

    /// `x: [R, D]` to `[R, D]`.
    pub fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let Mixer::Forgetting(layer) = self;
        layer.forward(tape, x, context, state)
    }

    /// Widths of what is kept per token, for memory estimates.
    pub fn memory(&self) -> MemoryShape {
        let Mixer::Forgetting(layer) = self;
        layer.memory()
    }
}
