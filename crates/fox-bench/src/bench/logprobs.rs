//! `fox bench logprobs`: where and by how much the log-probabilities of training and of decoding differ.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_infer::{Engine, EngineOptions, Event, FinishReason, Request, Sampling, ScoredToken};
use fox_model::{ForwardOptions, Model};
use fox_tensor::cases::Rng;
use fox_tensor::{Segments, Tape};
use serde_json::{Value, json};

use super::decode::open;
use super::machine;
use crate::device::DeviceArgs;
use crate::engine::{EngineArgs, Weights};
use crate::output;

/// Log-probabilities of a sampled sequence: the training forward pass against the engine
///
/// A sequence is sampled at temperature 1. Its tokens are then scored by the training forward pass and loss, by the
/// forward pass of evaluation, and by prefilling the sequence. The table states in how many positions two of them have
/// the same bits, where they differ first, and by how much: the log of the ratio that reinforcement learning corrects
/// for.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder, or a published model such as fox-pro-760m, with random weights
    #[arg(value_name = "MODEL", default_value = "fox-pro-125m")]
    model: String,
    /// Format of the engine's weights
    #[arg(long, value_enum, default_value_t = Weights::F32)]
    weights: Weights,
    /// Tokens of the random prompt
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens to sample
    #[arg(long, value_name = "N", default_value_t = 192, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let model = open(&args.model, &device)?;
    let prompt = args.prompt as usize;
    let mut rng = Rng::new(1);
    let last = model.config().vocab_size - 1;
    let mut ids: Vec<i32> = (0..prompt).map(|_| rng.between(0, last) as i32).collect();
    let longest = prompt + args.tokens as usize + 2;
    let options = EngineOptions {
        share_prefixes: false,
        max_batch: 1,
        ..args.engine.options(longest, args.weights, &device)?
    };
    let engine = Engine::start(open(&args.model, &device)?, options)?;
    let sampling = Sampling { seed: 1, ..Sampling::default() };
    // With alternatives, scores are computed on the host from the logits, like those of a prompt.
    let request =
        Request { sampling, top_logprobs: 1, ..Request::greedy(ids.clone(), args.tokens as usize) };
    let decoded = scores(&engine, request)?;
    ids.extend(decoded.iter().map(|scored| scored.id));
    let echo = Request { echo: true, ..Request::greedy(ids.clone(), 0) };
    let prefilled = scores(&engine, echo)?.split_off(prompt - 1);
    let logprobs =
        |scored: &[ScoredToken]| scored.iter().map(|scored| scored.logprob).collect::<Vec<f32>>();
    let all = [
        ("training", forward(&model, &ids, Tape::recording(&device))?.split_off(prompt - 1)),
        ("evaluation", forward(&model, &ids, Tape::inference(&device))?.split_off(prompt - 1)),
        ("prefill", logprobs(&prefilled)),
        ("decoding", logprobs(&decoded)),
    ];
    let pairs = [(0, 1), (1, 2), (2, 3), (0, 3)].map(|(a, b)| {
        let compared = Compared::new(&all[a].1, &all[b].1);
        json!({
            "first": all[a].0, "second": all[b].0, "positions": compared.positions,
            "same_bits": compared.same_bits, "first_difference": compared.first_difference,
            "largest": compared.largest, "rms": compared.rms,
        })
    });
    let report = json!({
        "machine": machine(&device), "model": args.model, "prompt": prompt, "pairs": pairs,
    });
    output::print(&if args.json { format!("{report:#}\n") } else { describe(&report) })?;
    Ok(ExitCode::SUCCESS)
}

/// The scores of a request: of its prompt from the second token on, with `echo`, then of its answer.
fn scores(engine: &Engine, request: Request) -> Result<Vec<ScoredToken>> {
    let mut all = Vec::new();
    for event in engine.submit(request)? {
        match event {
            Event::Prompt(scored) => all.extend(scored),
            Event::Token(scored) => all.push(scored),
            Event::Finished(finished) => {
                if let FinishReason::Failed(words) = finished.reason {
                    bail!(words);
                }
            }
            _ => {}
        }
    }
    Ok(all)
}

/// Log-probabilities of the tokens from the second on, by the loss of one forward pass.
fn forward<'m>(model: &'m Model, ids: &[i32], mut tape: Tape<'m>) -> Result<Vec<f32>> {
    let device = model.device();
    let (count, Some((_, labels))) = (ids.len() - 1, ids.split_first()) else {
        bail!("a sequence without tokens")
    };
    let tokens = device.from_i32(&ids[..count], [count])?;
    let labels = device.from_i32(labels, [count])?;
    let weights = device.from_f32(&vec![1.0; count], [count])?;
    let segments = Segments::uniform(1, count);
    let options = ForwardOptions::default();
    let loss = model.loss(&mut tape, &tokens, &labels, &weights, &segments, &options)?;
    Ok(loss.per_token.to_f32()?.into_iter().map(|loss| -loss).collect())
}

/// Two lists of log-probabilities.
struct Compared {
    positions: usize,
    same_bits: usize,
    first_difference: Option<usize>,
    largest: f64,
    rms: f64,
}

impl Compared {
    fn new(a: &[f32], b: &[f32]) -> Self {
        let pairs = || a.iter().zip(b);
        let differences = || pairs().map(|(a, b)| f64::from(*a) - f64::from(*b));
        let positions = a.len().max(b.len());
        let squares: f64 = differences().map(|d| d * d).sum();
        Compared {
            positions,
            same_bits: pairs().filter(|(a, b)| a.to_bits() == b.to_bits()).count(),
            first_difference: pairs().position(|(a, b)| a.to_bits() != b.to_bits()),
            largest: fox_base::difference::largest_error(a, b),
            rms: (squares / positions as f64).sqrt(),
        }
    }
}

fn describe(report: &Value) -> String {
    let word = |row: &Value, key: &str| row[key].as_str().unwrap_or("").to_string();
    let mut table: Vec<Vec<String>> = vec![
        ["first", "second", "same bits", "first difference", "largest", "rms"]
            .map(str::to_string)
            .into(),
    ];
    for pair in report["pairs"].as_array().into_iter().flatten() {
        let number = |key: &str| format!("{:.1e}", pair[key].as_f64().unwrap_or(f64::NAN));
        let at = pair["first_difference"].as_u64();
        table.push(vec![
            word(pair, "first"),
            word(pair, "second"),
            format!("{} of {}", pair["same_bits"], pair["positions"]),
            at.map_or("none".into(), |at| format!("token {at}")),
            number("largest"),
            number("rms"),
        ]);
    }
    format!(
        "{}, {}; log-probabilities of tokens sampled after {} tokens, in nats\n{}",
        word(report, "model"),
        word(report, "machine"),
        report["prompt"],
        output::table(&table)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_counted_by_bits() {
        let found = Compared::new(&[-1.0, -2.0, -3.0], &[-1.0, -2.5, -3.0]);
        assert_eq!((found.positions, found.same_bits, found.first_difference), (3, 2, Some(1)));
        assert_eq!((found.largest, found.rms), (0.5, (0.25f64 / 3.0).sqrt()));
        // A missing position is a difference.
        assert_eq!(Compared::new(&[-1.0], &[]).largest, f64::INFINITY);
    }
}
