//! Sampling arguments of the commands that generate.

use clap::Args;
use fox_infer::{GenerationConfig, Sampling};

/// Temperature where neither a flag nor the checkpoint sets one.
const TEMPERATURE: f32 = 0.8;

/// Sampling parameters. A parameter that is not given is that of the checkpoint's `generation_config.json`.
#[derive(Args)]
pub struct SamplingArgs {
    /// Randomness; 0 always takes the likeliest token; by default that of generation_config.json, or 0.8
    #[arg(long, short, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 keeps all
    #[arg(long, value_name = "N")]
    top_k: Option<u32>,
    /// Keep the likeliest tokens until they have this share of the probability
    #[arg(long, value_name = "X")]
    top_p: Option<f32>,
    /// Keep tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "X")]
    min_p: Option<f32>,
    /// Make tokens that occurred less likely when above 1
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Make tokens that occurred in the answer less likely when above 0
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// The same, for every time they occurred
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Seed of the random choices
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = parse_seed, allow_negative_numbers = true)]
    pub seed: u64,
}

fn parse_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "a whole number from 0 on, e.g. 7".into())
}

impl SamplingArgs {
    /// The parameters of the answer with this number; each has another seed.
    pub fn sampling(&self, config: &GenerationConfig, answer: u64) -> Sampling {
        let usual = config.sampling(Sampling { temperature: TEMPERATURE, ..Sampling::default() });
        Sampling {
            temperature: self.temperature.unwrap_or(usual.temperature),
            top_k: self.top_k.map_or(usual.top_k, |count| count as usize),
            top_p: self.top_p.unwrap_or(usual.top_p),
            min_p: self.min_p.unwrap_or(usual.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(usual.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.wrapping_add(answer),
        }
    }
}
