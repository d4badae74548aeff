//! Engine arguments of all commands that generate.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fox_data::Tokenizer;
use fox_infer::{EngineOptions, Eviction, WeightFormat};
use fox_tensor::{Device, DeviceKind};

use super::device::DeviceArgs;
use super::hub::HubModel;
use super::pretrained::or_pretrained;
use super::subjects::{Opened, parse};
use super::tolerance::log_tolerance;

/// Tokens of a prefill chunk. Short chunks on a CPU delay other requests less; a GPU needs long ones to be busy.
const CPU_CHUNK: usize = 64;
const GPU_CHUNK: usize = 2048;

/// Default fraction of the free memory for KV caches. Host memory is shared with other programs.
const HOST_FRACTION: f64 = 0.5;
const DEVICE_FRACTION: f64 = 0.8;
/// Bytes for KV caches if the free memory is unknown.
const UNKNOWN_FREE: usize = 2 << 30;

/// Options of an engine.
#[derive(Args)]
pub struct EngineArgs {
    /// Eviction from the KV cache: off, safe (keys with provably at most e^-10 of any later softmax), or the natural
    /// log of another fraction, e.g. -7
    #[arg(long, help_heading = "Engine", value_name = "WHAT", default_value = "safe", value_parser = parse_eviction,
          allow_negative_numbers = true)]
    pub eviction: Eviction,
    /// Memory for caches, in GiB; without it, half of the host's free memory or 80% of a GPU's
    #[arg(long, help_heading = "Engine", value_name = "GIB")]
    pub cache: Option<f64>,
    /// Tokens of a prefill chunk; without it, 64 on a CPU and 2048 elsewhere
    #[arg(long, help_heading = "Engine", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_chunk: Option<u32>,
}

/// Model and engine options of the commands that generate.
#[derive(Args)]
pub struct GenerationArgs {
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, help_heading = "Engine", value_name = "NAME")]
    tokenizer: Option<String>,
    /// Format of the weights
    #[arg(long, help_heading = "Engine", value_enum, default_value_t = Weights::F32)]
    weights: Weights,
    /// Fetch a model that is named ORG/NAME from Hugging Face, unless it is in its cache
    #[arg(long, help_heading = "Engine")]
    download: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

impl GenerationArgs {
    /// A checkpoint or run folder, or the pretrained model, and its tokenizer.
    pub fn open(&self, model: Option<&str>) -> Result<(Opened, Tokenizer)> {
        let model = or_pretrained(model)?;
        if self.download {
            let hub = parse(&model).1.to_str().and_then(HubModel::parse);
            hub.map_or(Ok(()), |hub| hub.download())?;
        }
        let opened = Opened::new(&model, &self.device.open()?)?;
        let tokenizer = opened.tokenizer(self.tokenizer.as_deref())?;
        Ok((opened, tokenizer))
    }

    /// The engine's options for contexts of up to `max_context` tokens of a model on `device`.
    pub fn options(&self, max_context: usize, device: &Device) -> Result<EngineOptions> {
        self.engine.options(max_context, self.weights, device)
    }
}

/// Formats of weights.
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
    /// The engine's format.
    pub fn format(self) -> WeightFormat {
        match self {
            Weights::F32 => WeightFormat::F32,
            Weights::Bf16 => WeightFormat::Bf16,
            Weights::Int8 => WeightFormat::Int8,
        }
    }
}

impl EngineArgs {
    /// The engine's options for contexts of up to `max_context` tokens; the model is on `device` already.
    pub fn options(
        &self,
        max_context: usize,
        weights: Weights,
        device: &Device,
    ) -> Result<EngineOptions> {
        let cache_bytes = match self.cache {
            None => free_for_caches(device),
            Some(size) if size > 0.0 && size < 1e6 => (size * (1u64 << 30) as f64) as usize,
            Some(size) => bail!("--cache must be a size in GiB, not {size}"),
        };
        let default =
            if device.backend().kind() == DeviceKind::Cpu { CPU_CHUNK } else { GPU_CHUNK };
        Ok(EngineOptions {
            cache_bytes,
            prefill_chunk: self.prefill_chunk.map_or(default, |tokens| tokens as usize),
            eviction: self.eviction,
            max_context,
            weights: weights.format(),
            ..EngineOptions::default()
        })
    }
}

/// Bytes for KV caches, from the free memory.
fn free_for_caches(device: &Device) -> usize {
    let scaled = |free: usize, fraction: f64| (free as f64 * fraction) as usize;
    match (device.backend().free_memory(), free_on_host()) {
        (Some(free), _) => scaled(free, DEVICE_FRACTION),
        (None, Some(free)) => scaled(free, HOST_FRACTION),
        (None, None) => UNKNOWN_FREE,
    }
}

/// Available bytes of host memory, if the system reports them.
pub fn free_on_host() -> Option<usize> {
    available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn available(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes << 10)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_available_memory() {
        let text = "MemTotal:       24000000 kB\nMemFree: 5 kB\nMemAvailable:   12000000 kB\n";
        assert_eq!(available(text), Some(12_000_000 << 10));
        assert_eq!(available("MemTotal: 1 kB\n"), None);
        assert_eq!(available("MemAvailable: many kB\n"), None);
    }
}
