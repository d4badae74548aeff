//! The choices of an inference engine, common to the commands that generate.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fox_data::Tokenizer;
use fox_infer::{EngineOptions, Eviction, WeightFormat};

use crate::commands::eval::subjects::Opened;
use crate::device::DeviceArgs;
use crate::tolerance::log_tolerance;

/// How an engine runs.
#[derive(Args)]
pub struct EngineArgs {
    /// What the cache drops: off, safe (what provably has at most e^-10 of any later softmax), or the natural log
    /// of another share, e.g. -7
    #[arg(long, value_name = "WHAT", default_value = "safe", value_parser = parse_eviction,
          allow_negative_numbers = true)]
    pub eviction: Eviction,
    /// Memory for caches, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 2.0)]
    pub cache: f64,
    /// Tokens of a prompt that are read in one step
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_chunk: u32,
}

/// How a model is opened and run by the commands that generate.
#[derive(Args)]
pub struct GenerationArgs {
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// How the weights are kept
    #[arg(long, value_enum, default_value_t = Weights::F32)]
    weights: Weights,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

impl GenerationArgs {
    /// A checkpoint or run folder, and its tokenizer.
    pub fn open(&self, model: &str) -> Result<(Opened, Tokenizer)> {
        let opened = Opened::new(model, &self.device.open()?)?;
        let tokenizer = opened.tokenizer(self.tokenizer.as_deref())?;
        Ok((opened, tokenizer))
    }

    /// The engine's options for contexts of up to `max_context` tokens.
    pub fn options(&self, max_context: usize) -> Result<EngineOptions> {
        self.engine.options(max_context, self.weights)
    }
}

/// The formats of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// As they are
    F32,
    /// Rounded to bfloat16
    Bf16,
    /// Rounded to 8 bits with a scale for every 64
    Int8,
}

impl Weights {
    /// For the engine.
    pub fn format(self) -> WeightFormat {
        match self {
            Weights::F32 => WeightFormat::F32,
            Weights::Bf16 => WeightFormat::Bf16,
            Weights::Int8 => WeightFormat::Int8,
        }
    }
}

impl EngineArgs {
    /// The engine's options for contexts of up to `max_context` tokens.
    pub fn options(&self, max_context: usize, weights: Weights) -> Result<EngineOptions> {
        if !(self.cache > 0.0 && self.cache < 1e6) {
            bail!("--cache must be a size in GiB, not {}", self.cache);
        }
        Ok(EngineOptions {
            cache_bytes: (self.cache * (1u64 << 30) as f64) as usize,
            prefill_chunk: self.prefill_chunk as usize,
            eviction: self.eviction,
            max_context,
            weights: weights.format(),
            ..EngineOptions::default()
        })
    }
}

fn parse_eviction(text: &str) -> Result<Eviction, String> {
    match text {
        "off" => Ok(Eviction::Off),
        "safe" => Ok(Eviction::Safe),
        number => match log_tolerance(number) {
            Ok(x) => Ok(Eviction::Tolerance(x)),
            Err(_) => Err("off, safe or a negative number, e.g. -7".into()),
        },
    }
}
