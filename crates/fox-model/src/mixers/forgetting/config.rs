//! Options of attention: validation, sizes, arithmetic.

use fox_tensor::{Activation, AttentionWeights, Mask, Rope};

use super::layer::ForgettingLayer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::flops::{ATTENTION_BACKWARD, attention_flops};
use crate::mixers::{AttentionStateSpec, LayerParams, Mixer, MixerConfig, StateSpec, enabled};

/// Epsilon of the QK-norm in both references, independent of `norm_eps`.
pub(crate) const QK_NORM_EPS: f64 = 1e-5;

/// Options of the attention layer. FoX and the Transformer are the same layer with other options.
#[derive(Clone, Debug, PartialEq)]
pub struct ForgettingConfig {
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads; query head `h` reads `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head `d`, where it is not `hidden_size / heads`.
    pub head_dim: Option<usize>,
    /// Which keys a query sees. Bidirectional attention makes an encoder: every position reads the whole sequence, the
    /// log gates between two positions decay their weights in either direction, and decoding is not supported.
    pub mask: Mask,
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// Source of the forget gate.
    pub gate: ForgetGate,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Mix each key with its predecessor.
    pub k_shift: bool,
    /// Mix each value with its predecessor.
    pub v_shift: bool,
    /// Normalise queries and keys per head.
    pub qk_norm: Option<QkNorm>,
    /// Epsilon of that norm.
    pub qk_norm_eps: f64,
    /// The rotary embedding, when there is one.
    pub rope: Option<Rope>,
    /// Sliding window: a query sees this many keys, itself included.
    pub window: Option<usize>,
    /// A learned logit per head in the denominator of the softmax: attention that need not go to any key.
    pub sink: bool,
    /// Normalise the attention output per head.
    pub output_norm: bool,
    /// Gate the attention output.
    pub output_gate: Option<Activation>,
    /// Adaptive computation pruning: natural log of the fraction of attention that may be dropped.
    pub log_pruning_tolerance: Option<f64>,
}

impl ForgettingConfig {
    /// A layer with all options off and the data-dependent gate: FoX (LLaMA).
    pub fn fox_llama(heads: usize) -> Self {
        ForgettingConfig {
            heads,
            kv_heads: heads,
            head_dim: None,
            mask: Mask::Causal,
            weights: AttentionWeights::Softmax,
            gate: ForgetGate::Full,
            qkv_bias: false,
            k_shift: false,
            v_shift: false,
            qk_norm: None,
            qk_norm_eps: QK_NORM_EPS,
            rope: None,
            window: None,
            sink: false,
            output_norm: false,
            output_gate: None,
            log_pruning_tolerance: None,
        }
    }

    /// FoX (Pro): QK-norm, output norm and gate, key and value shift.
    pub fn fox_pro(heads: usize) -> Self {
        ForgettingConfig {
            k_shift: true,
            v_shift: true,
            qk_norm: Some(QkNorm::PerHead),
            output_norm: true,
            output_gate: Some(Activation::Sigmoid),
            ..Self::fox_llama(heads)
        }
    }

    /// Stick-breaking instead of the softmax: order comes from the sticks, so RoPE is off.
    /// Applies to any variant; gates, where there are any, multiply the weights.
    #[must_use]
    pub fn stick_breaking(self) -> Self {
        ForgettingConfig { weights: AttentionWeights::StickBreaking, rope: None, ..self }
    }

    /// The same layer as part of an encoder. The key and value shift still mixes a position with its predecessor only; since
    /// every position may be seen, it leaks nothing, and it is what distinguishes left from right: without it and
    /// without RoPE, constant gates decay equally on both sides.
    #[must_use]
    pub fn bidirectional(self) -> Self {
        ForgettingConfig { mask: Mask::Bidirectional, ..self }
    }

    /// Width of a head in a model of this width.
    pub fn head_width(&self, hidden_size: usize) -> usize {
        self.head_dim.unwrap_or(hidden_size / self.heads.max(1))
    }

    /// Sets the width of a head; stored only where it is not `hidden_size / heads`.
    #[must_use]
    pub fn with_head_dim(self, hidden_size: usize, head_dim: Option<usize>) -> Self {
        let usual = |d: &usize| self.heads.checked_mul(*d) == Some(hidden_size);
        ForgettingConfig { head_dim: head_dim.filter(|d| !usual(d)), ..self }
    }

    /// The Transformer: RoPE instead of forgetting. Applies to either variant.
    #[must_use]
    pub fn without_forgetting(self) -> Self {
        ForgettingConfig { gate: ForgetGate::None, rope: Some(Rope::new(500_000.0)), ..self }
    }
}

/// Source of the forget gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ForgetGate {
    /// Nothing is forgotten.
    None,
    /// From the input: `sigmoid(w_f . x + b_f)`.
    Full,
    /// From the input, one gate for all heads: an ablation.
    Shared,
    /// A learned constant per head.
    BiasOnly {
        /// How the constants start; at a gate of one half without.
        decay_time: Option<DecayTime>,
    },
    /// A constant per head that is stored, but not learned.
    Fixed {
        /// How the constants are set.
        decay_time: Option<DecayTime>,
    },
    /// A factor per key on its logits, `sigmoid(w_f . k_j + b_f)`, per key head: an ablation. It is not a forget gate:
    /// it does not depend on the distance, and nothing is forgotten.
    KeyScale,
}

impl ForgetGate {
    /// Whether logits decay with the distance.
    pub fn forgets(self) -> bool {
        !matches!(self, ForgetGate::None | ForgetGate::KeyScale)
    }
}

/// The heads' memory lengths: geometric from `min` (head 0) to `max` (last head), in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayTime {
    /// Of the first head.
    pub min: f64,
    /// Of the last head.
    pub max: f64,
}

impl DecayTime {
    /// Biases `[heads]` such that head `h` forgets `1 / T_h` nat per token, `T_h` being its memory length.
    pub fn gate_biases(&self, heads: usize) -> Vec<f32> {
        let (low, high) = (self.min.ln(), self.max.ln());
        let bias = |h: usize| {
            let share = if heads > 1 { h as f64 / (heads - 1) as f64 } else { 0.0 };
            let decay = 1.0 / (low + (high - low) * share).exp();
            -decay.exp_m1().ln() as f32
        };
        (0..heads).map(bias).collect()
    }

    fn validate(self, validator: &Validator<'_>) -> Result<()> {
        validator.positive("decay_time_min", self.min, 1e30)?;
        validator.positive("decay_time_max", self.max, 1e30)?;
        validator.require(self.min <= self.max, "decay_time_min", || {
            format!("is {}, above `decay_time_max` {}", self.min, self.max)
        })
    }
}

/// Whether every head has separate norm weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Weights of the full width.
    PerHead,
    /// One vector of `head_dim` weights for all heads.
    Shared,
}

impl MixerConfig for ForgettingConfig {
    fn name(&self) -> &'static str {
        if self.mask == Mask::Bidirectional {
            return if self.gate.forgets() { "FoX encoder" } else { "Transformer encoder" };
        }
        match (self.weights, self.gate, self.k_shift) {
            (AttentionWeights::StickBreaking, ..) => "stick-breaking",
            (AttentionWeights::Softmax, ForgetGate::None, true) => "Transformer (Pro)",
            (AttentionWeights::Softmax, ForgetGate::None, false) => "Transformer",
            (AttentionWeights::Softmax, _, true) => "FoX (Pro)",
            (AttentionWeights::Softmax, _, false) => "FoX",
        }
    }

    fn kind(&self) -> &'static str {
        match self.weights {
            _ if self.mask == Mask::Bidirectional => "bidirectional attention",
            AttentionWeights::Softmax => "softmax attention",
            AttentionWeights::StickBreaking => "stick-breaking attention",
        }
    }

    fn heads(&self, model: &ModelConfig) -> (usize, usize) {
        (self.heads, self.head_width(model.hidden_size))
    }

    fn key_heads(&self, _: &ModelConfig) -> usize {
        self.kv_heads
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        let gate = match self.gate {
            ForgetGate::None => "no forget gate",
            ForgetGate::Full => "forget gate from the input",
            ForgetGate::Shared => "one forget gate for all heads, from the input",
            ForgetGate::BiasOnly { .. } => "forget gate learned per head",
            ForgetGate::Fixed { .. } => "forget gate fixed per head",
            ForgetGate::KeyScale => "no forget gate, a factor per key on its logits",
        };
        let stick = self.weights == AttentionWeights::StickBreaking;
        let found = enabled(&[
            (self.mask == Mask::Bidirectional, "bidirectional attention"),
            (stick, "stick-breaking attention"),
            (true, gate),
            (self.qk_norm == Some(QkNorm::PerHead), "QK-norm per head"),
            (self.qk_norm == Some(QkNorm::Shared), "QK-norm shared by the heads"),
            (self.k_shift, "key shift"),
            (self.v_shift, "value shift"),
            (self.sink, "attention sinks"),
            (self.output_norm, "output norm"),
            (self.output_gate == Some(Activation::Sigmoid), "output gate (sigmoid)"),
            (self.output_gate == Some(Activation::Silu), "output gate (silu)"),
            (self.qkv_bias, "q, k, v bias"),
        ]);
        let mut words: Vec<String> = found.into_iter().map(String::from).collect();
        words.extend(self.rope.map(|rope| format!("RoPE {}", rope.base)));
        words.extend(
            self.rope
                .and_then(|rope| rope.scaling)
                .map(|scaling| format!("slow frequencies of RoPE divided by {}", scaling.factor)),
        );
        let strength = self.rope.map(|rope| rope.strength).filter(|strength| *strength != 1.0);
        words.extend(strength.map(|strength| format!("RoPE angles times {strength}")));
        words.extend(self.window.map(|window| format!("window {window}")));
        words.extend(self.log_pruning_tolerance.map(|ln| format!("pruning at e^{ln}")));
        words
    }

    fn validate(&self, model: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        let (width, heads) = (model.hidden_size, self.heads);
        validator.range("num_heads", heads, 1, width)?;
        let given = self.head_dim.is_some();
        validator.require(given || width.is_multiple_of(heads), "num_heads", || {
            format!("is {heads}, which does not divide `hidden_size` {width}")
        })?;
        let head_dim = self.head_width(width);
        let field = if given { "head_dim" } else { "num_heads" };
        let fits = head_dim > 0 && head_dim.is_multiple_of(8) && head_dim <= 256;
        validator.require(fits, field, || {
            format!("gives heads of width {head_dim}; the width must be a multiple of 8 up to 256")
        })?;
        validator.divisor("num_kv_heads", self.kv_heads, ("num_heads", heads))?;
        if let Some(window) = self.window {
            validator.range("window_size", window, 1, Validator::MAX_LENGTH)?;
        }
        validator.positive("qk_norm_eps", self.qk_norm_eps, 1.0)?;
        if let Some(rope) = self.rope {
            validate_rope(&rope, validator)?;
        }
        if let Some(ln) = self.log_pruning_tolerance {
            validator.require(ln.is_finite() && ln < 0.0, "log_pruning_tolerance", || {
                format!("is {ln}; it is the logarithm of a probability, so it is negative")
            })?;
        }
        let sticks = self.weights == AttentionWeights::StickBreaking;
        let both = self.mask == Mask::Bidirectional;
        validator.require(!(both && sticks), "attention_weights", || {
            "must be \"softmax\" in an encoder: sticks are broken from the newest key to the oldest".to_string()
        })?;
        validator.require(!(both && self.sink), "use_sink", || {
            "must be false in an encoder, whose attention has no sinks".to_string()
        })?;
        validator.require(!(self.sink && sticks), "use_sink", || {
            "needs `attention_weights` \"softmax\": a stick has its own rest".to_string()
        })?;
        validator.require(
            !(self.output_norm && self.output_gate == Some(Activation::Silu)),
            "ogate_act",
            || "must be \"sigmoid\" when `use_output_norm` is true".to_string(),
        )?;
        match self.gate {
            ForgetGate::BiasOnly { decay_time: Some(time) }
            | ForgetGate::Fixed { decay_time: Some(time) } => time.validate(validator),
            _ => Ok(()),
        }
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(ForgettingLayer::declare(model, self, layer))
    }

    fn state(&self, model: &ModelConfig) -> StateSpec {
        StateSpec::Attention(AttentionStateSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_width(model.hidden_size),
            gated: self.gate.forgets(),
            k_shift: self.k_shift,
            v_shift: self.v_shift,
            window: self.window,
            weights: self.weights,
            transition: 0,
            conv: None,
        })
    }

    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64 {
        let width = self.heads * self.head_width(model.hidden_size);
        let sides = if self.mask == Mask::Bidirectional { 2.0 } else { 1.0 };
        let forward = sides * attention_flops(seq, self.window, width) / seq.max(1) as f64;
        forward * (1.0 + ATTENTION_BACKWARD)
    }

    fn continues_sequences(&self) -> bool {
        self.weights == AttentionWeights::Softmax && self.mask == Mask::Causal
    }

    fn forgetting(&self) -> Option<&ForgettingConfig> {
        Some(self)
    }

    fn forgetting_mut(&mut self) -> Option<&mut ForgettingConfig> {
        Some(self)
    }
}

fn validate_rope(rope: &Rope, validator: &Validator<'_>) -> Result<()> {
    validator.positive("rope_base", rope.base, 1e30)?;
    let strength = rope.strength;
    validator.require((0.0..=1.0).contains(&strength), "rope_strength", || {
        format!("is {strength}; it must be between 0 and 1")
    })?;
    let Some(scaling) = rope.scaling else { return Ok(()) };
    validator.positive("factor", scaling.factor, 1e6)?;
    validator.positive("low_freq_factor", scaling.low_freq_factor, 1e6)?;
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    validator.require(high > low && high <= 1e6, "high_freq_factor", || {
        format!("is {high}; it must be above `low_freq_factor` {low}")
    })?;
    let length = scaling.original_length;
    validator.range("original_max_position_embeddings", length, 1, Validator::MAX_LENGTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_times_are_geometric() {
        let bias = DecayTime { min: 2.0, max: 128.0 }.gate_biases(4);
        for (h, b) in bias.iter().enumerate() {
            let log_gate = -(-f64::from(*b)).exp().ln_1p();
            let want = -1.0 / (2.0 * 4f64.powi(h as i32));
            assert!((log_gate / want - 1.0).abs() < 1e-5, "head {h}: {log_gate} {want}");
        }
        assert_eq!(DecayTime { min: 2.0, max: 9.0 }.gate_biases(1).len(), 1);
    }
}
