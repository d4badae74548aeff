//! How an engine runs.

use fox_tensor::WeightFormat;

use crate::{Error, Result};

/// What is dropped from the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Eviction {
    /// Nothing that a query may see.
    Off,
    /// What provably has at most a share of `e^-10` of any later softmax.
    #[default]
    Safe,
    /// What provably has at most a share of `e^x` of any later softmax, for a negative `x`.
    Tolerance(f32),
}

impl Eviction {
    /// Natural log of the softmax mass that may be dropped; `None` when nothing may.
    pub fn log_tolerance(self) -> Option<f32> {
        match self {
            Eviction::Off => None,
            Eviction::Safe => Some(-10.0),
            Eviction::Tolerance(log) => Some(log),
        }
    }
}

/// Limits and choices of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Bytes that all caches together may take, shared prefixes included. Never exceeded; activations
    /// of a step come on top.
    pub cache_bytes: usize,
    /// Sequences that decode together, at most.
    pub max_batch: usize,
    /// Tokens of a piece of a prompt. Longer pieces are read faster, shorter ones delay others less; the
    /// last bits of log-probabilities depend on it.
    pub prefill_chunk: usize,
    /// Tokens of prompts that a step may read beside the sequences that decode, at most; a step has one piece
    /// in any case, and as many as take about as long as its decode rows.
    pub step_tokens: usize,
    /// What is dropped from the cache.
    pub eviction: Eviction,
    /// Tokens of prompt and answer together, at most.
    pub max_context: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// How the weight matrices are kept. Activations, gates, norms and the cache are f32 in any case.
    pub weights: WeightFormat,
    /// Whether prompts that begin alike share that part of the cache.
    pub share_prefixes: bool,
    /// Whether the state of decoding sequences stays on the device, in slots, where the device has them for the model.
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
                "an eviction tolerance is the natural log of a share, so negative; not {x}"
            ))),
            _ => Ok(()),
        }
    }
}
