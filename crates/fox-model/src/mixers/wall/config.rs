//! Options of Wall attention: validation, sizes, arithmetic.

use fox_tensor::WALL_BLOCK;

use super::layer::WallLayer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::flops::{ATTENTION_BACKWARD, attention_flops};
use crate::mixers::{BlockStateSpec, LayerParams, Mixer, MixerConfig, StateSpec, enabled};

/// Wall attention.
#[derive(Clone, Debug, PartialEq)]
pub struct WallConfig {
    /// Query heads, each with its own decays.
    pub heads: usize,
    /// Key and value heads; query head `h` reads `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether queries and keys are normalised per head, with weights of the full width.
    pub qk_norm: bool,
    /// Sliding window: a query sees this many keys, itself included.
    pub window: Option<usize>,
    /// Whether the output is gated.
    pub output_gate: bool,
    /// Whether every head has a forget gate beside the decays of its channels.
    pub scalar_gate: bool,
    /// Initial bias of both gates: 8 forgets 0.03% per token.
    pub gate_init_bias: f64,
}

impl WallConfig {
    /// The published layer: decays per channel, all options off.
    pub fn new(heads: usize) -> Self {
        WallConfig {
            heads,
            kv_heads: heads,
            qkv_bias: false,
            qk_norm: false,
            window: None,
            output_gate: false,
            scalar_gate: false,
            gate_init_bias: 8.0,
        }
    }
}

impl MixerConfig for WallConfig {
    fn name(&self) -> &'static str {
        "Wall"
    }

    fn heads(&self, model: &ModelConfig) -> (usize, usize) {
        (self.heads, model.hidden_size / self.heads.max(1))
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        self.kv_heads
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        let found = enabled(&[
            (true, "decays per channel"),
            (self.scalar_gate, "forget gate per head"),
            (self.qk_norm, "QK-norm per head"),
            (self.output_gate, "output gate (sigmoid)"),
            (self.qkv_bias, "q, k, v bias"),
        ]);
        let mut words: Vec<String> = found.into_iter().map(String::from).collect();
        words.extend(self.window.map(|window| format!("window {window}")));
        words
    }

    fn validate(&self, model: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        let (width, heads) = (model.hidden_size, self.heads);
        validator.divisor("num_heads", heads, ("hidden_size", width))?;
        let head_dim = width / heads;
        let fits = head_dim.is_multiple_of(8) && head_dim <= 256;
        validator.require(fits, "num_heads", || {
            format!("gives heads of width {head_dim}; the width must be a multiple of 8 up to 256")
        })?;
        validator.divisor("num_kv_heads", self.kv_heads, ("num_heads", heads))?;
        if let Some(window) = self.window {
            validator.range("window_size", window, 1, Validator::MAX_LENGTH)?;
        }
        let bias = self.gate_init_bias;
        validator.require((bias as f32).is_finite(), "gate_init_bias", || {
            format!("is {bias}; it must be a finite number, e.g. 8.0")
        })
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(WallLayer::declare(model, self, layer))
    }

    fn state(&self, model: &ModelConfig) -> StateSpec {
        let d = model.hidden_size / self.heads.max(1);
        let (width, kv_width) = (self.heads * d, self.kv_heads * d);
        let gates = if self.scalar_gate { self.heads } else { 0 };
        StateSpec::Blocks(BlockStateSpec {
            // Keys, values, log decays and gates; in a closed block, keys of every query head.
            row: 2 * kv_width + width + gates,
            block: WALL_BLOCK * (width + kv_width + gates) + width,
            window: self.window,
        })
    }

    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64 {
        let forward = attention_flops(seq, self.window, model.hidden_size) / seq.max(1) as f64;
        forward * (1.0 + ATTENTION_BACKWARD)
    }
}
