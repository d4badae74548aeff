//! Options of a hybrid: a pattern of layer kinds, and the configuration of each kind.

use fox_tensor::Rope;

use super::LayerKind;
use crate::Result;
use crate::config::{MlpConfig, ModelConfig, Validator};
use crate::mixers::delta::DeltaConfig;
use crate::mixers::forgetting::{ForgetGate, ForgettingConfig};
use crate::mixers::kda::KdaConfig;
use crate::mixers::mamba1::Mamba1Config;
use crate::mixers::mamba2::Mamba2Config;
use crate::mixers::path::PathConfig;
use crate::mixers::wall::WallConfig;
use crate::mixers::{LayerParams, Mixer, MixerConfig, StateSpec};

/// Layers with different mixers. Every block has an MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    pattern: Vec<LayerKind>,
    layers: LayerConfigs,
    /// One mixer for every layer of the pattern.
    mixers: Vec<Box<dyn MixerConfig>>,
    /// Widths of the MLPs by the kind of the mixer before them; `None`: as the model configures.
    mlp_ratios: Option<MlpRatios>,
}

/// The configuration of every kind of layer. Kinds that a pattern does not use have no effect.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfigs {
    /// `fox` as it is; `attention` and `window` without its gate and with RoPE; its heads also for `path`.
    pub attention: ForgettingConfig,
    /// `gated-delta-net`.
    pub delta: DeltaConfig,
    /// `kda`.
    pub kda: KdaConfig,
    /// `wall`.
    pub wall: WallConfig,
    /// `mamba2`.
    pub mamba2: Mamba2Config,
    /// `mamba1`.
    pub mamba1: Mamba1Config,
}

/// Widths of MLPs relative to the residual stream, as [`MlpConfig::hidden_ratio`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpRatios {
    /// After a recurrent layer.
    pub recurrent: f64,
    /// After attention.
    pub attention: f64,
}

/// Default RoPE base of `attention` and `window` layers.
const ROPE_BASE: f64 = 500_000.0;

impl HybridConfig {
    /// Layers by a repeating pattern; the last repetition may be truncated.
    pub fn new(pattern: Vec<LayerKind>, layers: LayerConfigs) -> Self {
        let mixers = pattern.iter().map(|kind| layers.mixer(*kind)).collect();
        HybridConfig { pattern, layers, mixers, mlp_ratios: None }
    }

    /// Sets the widths of the MLPs.
    #[must_use]
    pub fn with_mlp_ratios(self, mlp_ratios: Option<MlpRatios>) -> Self {
        HybridConfig { mlp_ratios, ..self }
    }

    /// Widths of the MLPs, where they depend on the mixer.
    pub fn mlp_ratios(&self) -> Option<MlpRatios> {
        self.mlp_ratios
    }

    /// The pattern.
    pub fn pattern(&self) -> &[LayerKind] {
        &self.pattern
    }

    /// The configuration of every kind of layer.
    pub fn layers(&self) -> &LayerConfigs {
        &self.layers
    }

    /// The kind of a layer.
    fn kind(&self, layer: usize) -> Option<LayerKind> {
        self.pattern.get(layer % self.pattern.len().max(1)).copied()
    }

    /// The mixer that stands for the model where only one can be named: attention, if it has any.
    fn main(&self) -> Option<&dyn MixerConfig> {
        let attention = self.mixers.iter().find(|mixer| mixer.forgetting().is_some());
        attention.or(self.mixers.first()).map(|mixer| &**mixer)
    }
}

impl LayerConfigs {
    /// PaTH attention with the heads of attention.
    fn path(&self, forget_gate: bool) -> PathConfig {
        PathConfig {
            kv_heads: self.attention.kv_heads,
            forget_gate,
            log_pruning_tolerance: self.attention.log_pruning_tolerance.filter(|_| forget_gate),
            ..PathConfig::published(self.attention.heads)
        }
    }

    fn mixer(&self, kind: LayerKind) -> Box<dyn MixerConfig> {
        let plain = |window: Option<usize>| ForgettingConfig {
            gate: ForgetGate::None,
            log_pruning_tolerance: None,
            rope: Some(self.attention.rope.unwrap_or(Rope::new(ROPE_BASE))),
            window,
            ..self.attention.clone()
        };
        match kind {
            LayerKind::Fox => Box::new(self.attention.clone()),
            LayerKind::Attention => Box::new(plain(None)),
            LayerKind::Window(length) => Box::new(plain(Some(length))),
            LayerKind::Path => Box::new(self.path(false)),
            LayerKind::PathFox => Box::new(self.path(true)),
            LayerKind::GatedDeltaNet => Box::new(self.delta.clone()),
            LayerKind::Kda => Box::new(self.kda.clone()),
            LayerKind::Wall => Box::new(self.wall.clone()),
            LayerKind::Mamba2 => Box::new(self.mamba2.clone()),
            LayerKind::Mamba1 => Box::new(self.mamba1.clone()),
        }
    }
}

impl MixerConfig for HybridConfig {
    fn name(&self) -> &'static str {
        "hybrid"
    }

    fn heads(&self, model: &ModelConfig) -> (usize, usize) {
        self.main().map_or((1, model.hidden_size), |mixer| mixer.heads(model))
    }

    fn key_heads(&self, model: &ModelConfig) -> usize {
        self.main().map_or(1, |mixer| mixer.key_heads(model))
    }

    fn options(&self, model: &ModelConfig) -> Vec<String> {
        let words: Vec<String> = self.pattern.iter().map(LayerKind::to_string).collect();
        let mut options = vec![format!("layers: {}", words.join(", "))];
        for (i, kind) in self.pattern.iter().enumerate() {
            if !self.pattern[..i].contains(kind) {
                options.push(format!("{kind}: {}", self.mixers[i].options(model).join("; ")));
            }
        }
        options
    }

    fn validate(&self, model: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        let (words, layers) = (self.pattern.len(), model.num_layers);
        validator.require((1..=layers).contains(&words), "mixers", || {
            format!("names {words} layers; it must name between 1 and the model's {layers}")
        })?;
        for layer in 0..words {
            validator.range(
                "hidden_ratio",
                self.mlp_width(model, layer),
                1,
                Validator::MAX_MLP_WIDTH,
            )?;
        }
        self.mixers.iter().try_for_each(|mixer| mixer.validate(model, validator))
    }

    fn at(&self, layer: usize) -> Option<&dyn MixerConfig> {
        self.mixers.get(layer % self.mixers.len().max(1)).map(|mixer| &**mixer)
    }

    /// A valid hybrid has a mixer for every layer.
    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        let mixer = self.at(layer.index).unwrap_or(&self.layers.attention);
        mixer.declare(model, layer)
    }

    fn state(&self, model: &ModelConfig) -> StateSpec {
        self.main().unwrap_or(&self.layers.attention).state(model)
    }

    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64 {
        self.main().map_or(0.0, |mixer| mixer.train_flops(model, seq))
    }

    fn mlp_width(&self, model: &ModelConfig, layer: usize) -> usize {
        let (Some(ratios), Some(kind)) = (self.mlp_ratios, self.kind(layer)) else {
            return model.mlp.width(model.hidden_size);
        };
        let hidden_ratio = if kind.is_attention() { ratios.attention } else { ratios.recurrent };
        let mlp = MlpConfig { hidden_ratio, intermediate_size: None, ..model.mlp };
        mlp.width(model.hidden_size)
    }

    /// Of its attention, if it has any: the first kind in the pattern.
    fn forgetting(&self) -> Option<&ForgettingConfig> {
        self.mixers.iter().find_map(|mixer| mixer.forgetting())
    }
}
