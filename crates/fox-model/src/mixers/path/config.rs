//! Options of PaTH attention: validation, sizes, arithmetic.

use fox_tensor::{AttentionWeights, PATH_BLOCK, PATH_MAX_HEAD_DIM};

use super::layer::PathLayer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::flops::{ATTENTION_BACKWARD, attention_flops};
use crate::mixers::{
    AttentionStateSpec, ConvStateSpec, LayerParams, Mixer, MixerConfig, StateSpec, enabled,
};

/// PaTH attention.
#[derive(Clone, Debug, PartialEq)]
pub struct PathConfig {
    /// Query heads `H`.
    pub heads: usize,
    /// Heads of keys, values and reflections; query head `h` reads `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Whether the projection of the reflections has rank 32.
    pub low_rank: bool,
    /// The short convolution of the reflections, when there is one.
    pub conv: Option<PathConv>,
    /// Normalise queries and keys per head, with weights that the heads share.
    pub qk_norm: bool,
    /// Forget gates: PaTH-FoX.
    pub forget_gate: bool,
    /// Adaptive computation pruning: natural log of the fraction of attention that may be dropped.
    pub log_pruning_tolerance: Option<f64>,
}

/// The short convolution of the reflections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathConv {
    /// Taps.
    pub taps: usize,
    /// Whether it has a bias.
    pub bias: bool,
}

impl PathConv {
    /// Taps of the published layer.
    pub const TAPS: usize = 3;
}

impl PathConfig {
    /// The published layer, without forget gates.
    pub fn published(heads: usize) -> Self {
        PathConfig {
            heads,
            kv_heads: heads,
            low_rank: true,
            conv: Some(PathConv { taps: PathConv::TAPS, bias: false }),
            qk_norm: false,
            forget_gate: false,
            log_pruning_tolerance: None,
        }
    }

    pub(super) fn head_dim(&self, model: &ModelConfig) -> usize {
        model.hidden_size / self.heads.max(1)
    }
}

impl MixerConfig for PathConfig {
    fn name(&self) -> &'static str {
        if self.forget_gate { "PaTH-FoX" } else { "PaTH" }
    }

    fn kind(&self) -> &'static str {
        "PaTH attention"
    }

    fn heads(&self, model: &ModelConfig) -> (usize, usize) {
        (self.heads, self.head_dim(model))
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        self.kv_heads
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        let found = enabled(&[
            (true, "reflections between keys"),
            (self.low_rank, "reflections of low rank"),
            (self.qk_norm, "QK-norm shared by the heads"),
            (self.forget_gate, "forget gate from the input, inside the scale"),
            (!self.forget_gate, "no forget gate"),
        ]);
        let mut words: Vec<String> = found.into_iter().map(String::from).collect();
        words.extend(self.conv.map(|conv| format!("convolution of {} taps", conv.taps)));
        words.extend(self.log_pruning_tolerance.map(|ln| format!("pruning at e^{ln}")));
        words
    }

    fn validate(&self, model: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        let (width, heads) = (model.hidden_size, self.heads);
        validator.divisor("num_heads", heads, ("hidden_size", width))?;
        let d = self.head_dim(model);
        let fits = d > 0 && d.is_multiple_of(8) && d <= PATH_MAX_HEAD_DIM;
        validator.require(fits, "num_heads", || {
            format!(
                "gives heads of width {d}; PaTH needs a multiple of 8 up to {PATH_MAX_HEAD_DIM}"
            )
        })?;
        validator.divisor("num_kv_heads", self.kv_heads, ("num_heads", heads))?;
        if let Some(ln) = self.log_pruning_tolerance {
            validator.require(ln.is_finite() && ln < 0.0, "log_pruning_tolerance", || {
                format!("is {ln}; it is the logarithm of a probability, so it is negative")
            })?;
            validator.require(self.forget_gate, "log_pruning_tolerance", || {
                "needs `use_forget_gate` true: without forget gates no key loses its weight".into()
            })?;
        }
        self.conv
            .map_or(Ok(()), |conv| validator.range("conv_size", conv.taps, 1, Validator::MAX_TAPS))
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(PathLayer::declare(model, self, layer))
    }

    fn state(&self, model: &ModelConfig) -> StateSpec {
        let (kv_heads, head_dim) = (self.kv_heads, self.head_dim(model));
        let conv =
            |conv: PathConv| ConvStateSpec { channels: kv_heads * head_dim, taps: conv.taps };
        StateSpec::Attention(AttentionStateSpec {
            heads: self.heads,
            kv_heads,
            head_dim,
            gated: self.forget_gate,
            k_shift: false,
            v_shift: false,
            window: None,
            weights: AttentionWeights::Softmax,
            transition: head_dim,
            conv: self.conv.map(conv),
        })
    }

    /// Attention, and a product with a `d x d` matrix for every query and block of keys.
    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64 {
        let d = self.head_dim(model);
        let forward = attention_flops(seq, None, self.heads * d) / seq.max(1) as f64;
        forward * (1.0 + d as f64 / (2 * PATH_BLOCK) as f64) * (1.0 + ATTENTION_BACKWARD)
    }
}
