//! Options of an engine.

use fox_tensor::WeightFormat;

use crate::{Error, Result};

/// Which pages are evicted from the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Eviction {
    /// None that a query may attend to.
    Off,
    /// Pages that provably have at most a fraction `e^-10` of any later softmax.
    #[default]
    Safe,
    /// Pages that provably have at most a fraction `e^x` of any later softmax, for a negative `x`.
    Tolerance(f32),
}

impl Eviction {
    /// Natural log of the softmax mass that may be evicted; `None` for [`Eviction::Off`].
    pub fn log_tolerance(self) -> Option<f32> {
        match self {
            Eviction::Off => None,
            Eviction::Safe => Some(-10.0),
            Eviction::Tolerance(log) => Some(log),
        }
    }
}

/// Limits and modes of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Bytes of all KV caches together, cached prefixes included. Never exceeded; activations of a step come on top.
    pub cache_bytes: usize,
    /// Largest number of running sequences.
    pub max_batch: usize,
    /// Tokens of a prefill chunk. Longer chunks are faster, shorter ones delay decoding less; the last bits of
    /// log-probabilities depend on it.
    pub prefill_chunk: usize,
    /// Largest number of prompt tokens that a step prefills beside its decode batch. A step prefills at least one chunk,
    /// and about as many as take the time of its decode batch.
    pub step_tokens: usize,
    /// Which pages are evicted.
    pub eviction: Eviction,
    /// Largest number of tokens of prompt and answer together.
    pub max_context: usize,
    /// Capacity of the request queue.
    pub max_queue: usize,
    /// Format of the weight matrices; one that the device does not support is an error. On a CPU, activations and the KV
    /// cache are f32 whatever the format; on a GPU they have the type of the backend (bf16 or f32).
    pub weights: WeightFormat,
    /// Whether prompts with a common prefix share its KV cache.
    pub share_prefixes: bool,
    /// Whether decoding sequences stay in slots on the device, where it supports that for the model.
    pub resident: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            cache_bytes: 1 << 30,
            max_batch: 32,
            prefill_chunk: 64,
            step_tokens: 2048,
            eviction: Eviction::Safe,
            max_context: 1 << 16,
            max_queue: 256,
            weights: WeightFormat::F32,
            share_prefixes: true,
            resident: true,
        }
    }
}

impl EngineOptions {
    pub(crate) fn check(&self) -> Result<()> {
        let positive = [
            ("cache_bytes", self.cache_bytes),
            ("max_batch", self.max_batch),
            ("prefill_chunk", self.prefill_chunk),
            ("max_context", self.max_context),
            ("max_queue", self.max_queue),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(Error::Option(format!("{name} must be at least 1")));
        }
        match self.eviction {
            Eviction::Tolerance(x) if x.is_nan() || x >= 0.0 => Err(Error::Option(format!(
                "an eviction tolerance is the natural log of a fraction, so negative; not {x}"
            ))),
            _ => Ok(()),
        }
    }
}
