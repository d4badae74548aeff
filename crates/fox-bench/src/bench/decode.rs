//! `fox bench decode`: how fast a model generates, against the memory it has to read.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_base::difference::largest;
use fox_infer::{
    Engine, EngineOptions, Event, Eviction, FinishReason, Finished, Request, ScoredToken,
};
use fox_model::{ForwardOptions, Model, Preset};
use fox_tensor::cases::Rng;
use fox_tensor::speed::memory_rate;
use fox_tensor::{Device, Segments, Tape};
use serde_json::{Value, json};

use super::{machine, seconds};
use crate::device::DeviceArgs;
use crate::engine::{EngineArgs, Weights};
use crate::output;
use fox_lab::args::corpus::documents;
use fox_lab::args::subjects::Opened;

/// Generation: tokens per second by context length, weight format and batch
///
/// The roofline is the time to read every weight (in its format) and the sequence's cache once per token, at the rate
/// of the best sum over 512 MiB in the same run. Log-probabilities are checked against the training forward
/// first. A published model has random weights and reads random tokens; a checkpoint of the embedded corpus reads
/// a document of it.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder, or a published model such as fox-pro-760m
    #[arg(value_name = "MODEL", default_value = "fox-pro-125m")]
    model: String,
    /// Formats of the weights
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Weights::F32, Weights::Bf16, Weights::Int8])]
    weights: Vec<Weights>,
    /// Tokens in the cache before the measured ones
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [128, 1024],
          value_parser = clap::value_parser!(u32).range(1..))]
    contexts: Vec<u32>,
    /// Tokens to generate for each measurement
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Requests at the same time, each of 32 prompt tokens
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 16],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    batches: Vec<u32>,
    /// Also compare the log-probabilities of this many tokens with those without eviction
    #[arg(long, value_name = "N", default_value_t = 0)]
    agree: u32,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Tokens of a prompt of the batch measurement.
const BATCH_PROMPT: usize = 32;

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let mut rate = memory_rate(&device)?;
    let (mut singles, mut batches, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    let text = Text::new(args, &device)?;
    let agreement = match args.agree {
        0 => Value::Null,
        length => agreement(args, &device, &text, length as usize)?,
    };
    for &weights in &args.weights {
        let model = open(&args.model, &device)?;
        let bytes = model.weight_bytes_per_step(weights.format());
        let longest = args.contexts.iter().max().map_or(0, |n| *n as usize);
        // One more than is measured, and the check is short.
        let context = longest.max(BATCH_PROMPT) + args.tokens as usize + 1;
        let options = EngineOptions {
            share_prefixes: false,
            max_batch: 64,
            ..args.engine.options(context, weights, &device)?
        };
        let engine = Engine::start(model, options)?;
        errors.push(check(&engine, &text)?);
        rate = rate.max(memory_rate(&device)?);
        let name = format!("{weights:?}").to_lowercase();
        for &context in &args.contexts {
            let prompt = text.ids(1, context as usize);
            singles.push(single(&engine, &name, prompt, args.tokens as usize, bytes)?);
        }
        for &batch in &args.batches {
            batches.push(together(&engine, &name, &text, batch as usize, args.tokens as usize)?);
        }
        rate = rate.max(memory_rate(&device)?);
    }
    for sequence in &mut singles {
        let roofline = sequence["bytes_per_token"].as_f64().unwrap_or(0.0) / rate;
        sequence["roofline_fraction"] =
            json!(roofline * sequence["tokens_per_s"].as_f64().unwrap_or(0.0));
    }
    let report = json!({
        "machine": machine(&device), "model": args.model, "memory_gb_per_s": rate / 1e9,
        "error_vs_training_forward": largest(errors), "single": singles, "batched": batches,
        "agreement": agreement,
    });
    let printed = if args.json { format!("{report:#}\n") } else { describe(&report) };
    output::print(&printed)?;
    Ok(ExitCode::SUCCESS)
}

/// A checkpoint, or a published model with random weights.
pub(super) fn open(name: &str, device: &Device) -> Result<Model> {
    if let Some(preset) = Preset::by_name(name) {
        return Ok(Model::init(&preset.config(), 1, device)?);
    }
    if !std::path::Path::new(name).exists() {
        bail!("`{name}` is neither a checkpoint folder nor one of {}", Preset::names());
    }
    Ok(Opened::new(name, device)?.model)
}

/// What the model reads.
struct Text {
    /// A document of the embedded corpus; empty when the model has another vocabulary.
    document: Vec<i32>,
    vocab: usize,
}

impl Text {
    fn new(args: &Args, device: &Device) -> Result<Text> {
        let longest = args.contexts.iter().copied().max().unwrap_or(0).max(args.agree).max(64);
        if let Some(preset) = Preset::by_name(&args.model) {
            return Ok(Text { document: Vec::new(), vocab: preset.config().vocab_size });
        }
        let opened = Opened::new(&args.model, device)?;
        let vocab = opened.model.config().vocab_size;
        let data = documents(None, &opened, opened.tokenizer(None), longest as usize, 1);
        let mut document = vec![0; longest as usize];
        match data {
            Ok(data) if data.lengths().len_of(0) >= Some(u64::from(longest)) => {
                data.read(0, 0, &mut document)?;
            }
            _ => document.clear(),
        }
        Ok(Text { document: document.into_iter().map(|id| id as i32).collect(), vocab })
    }

    /// Some ids; random ones when there is no document.
    fn ids(&self, seed: u64, len: usize) -> Vec<i32> {
        let mut rng = Rng::new(seed);
        match self.document.len().checked_sub(len) {
            Some(room) => self.document[rng.between(0, room)..][..len].to_vec(),
            None => (0..len).map(|_| rng.between(0, self.vocab - 1) as i32).collect(),
        }
    }
}

/// Log-probabilities of `length` tokens with eviction as asked for, against those without.
fn agreement(args: &Args, device: &Device, text: &Text, length: usize) -> Result<Value> {
    let run = |eviction: Eviction| {
        let options = EngineOptions {
            eviction,
            share_prefixes: false,
            ..args.engine.options(length, Weights::F32, device)?
        };
        let engine = Engine::start(open(&args.model, device)?, options)?;
        let request = Request { echo: true, ..Request::greedy(text.ids(2, length), 0) };
        finish(engine.submit(request)?)
    };
    let ((full, _), (pruned, finished)) = (run(Eviction::Off)?, run(args.engine.eviction)?);
    let differences = full.iter().zip(&pruned).map(|(a, b)| f64::from(a.logprob - b.logprob).abs());
    Ok(json!({
        "tokens": length, "worst_difference": largest(differences.clone()),
        "mean_difference": differences.sum::<f64>() / full.len() as f64,
        "evicted_fraction": finished.cache.evicted_fraction(),
        "cache_bytes": finished.cache.bytes, "full_bytes": finished.cache.full_bytes,
    }))
}

/// Tokens and the end of an answer.
fn finish(events: impl Iterator<Item = Event>) -> Result<(Vec<ScoredToken>, Finished)> {
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Prompt(mut scores) => tokens.append(&mut scores),
            Event::Token(scored) => tokens.push(scored),
            Event::Finished(finished) => match finished.reason {
                FinishReason::Failed(words) => bail!(words),
                _ => return Ok((tokens, *finished)),
            },
            _ => {}
        }
    }
    bail!("the engine ended early")
}

/// The largest difference of a log-probability from that of the training forward.
fn check(engine: &Engine, text: &Text) -> Result<f64> {
    let model = engine.model();
    let request = Request { echo: true, ..Request::greedy(text.ids(7, 20), 12) };
    let mut ids = request.prompt.clone();
    let (scores, _) = finish(engine.submit(request)?)?;
    ids.extend(scores[ids.len() - 1..].iter().map(|scored| scored.id));
    let tokens = model.device().from_i32(&ids, [ids.len()])?;
    let mut tape = Tape::inference(model.device());
    let (segments, options) = (Segments::uniform(1, ids.len()), ForwardOptions::default());
    let hidden = model.forward(&mut tape, &tokens, &segments, None, &options)?;
    let logits = model.logits(&mut tape, &hidden.states)?.value().to_f64()?;
    let rows = logits.chunks(model.config().vocab_size).zip(&scores);
    Ok(largest(rows.map(|(row, scored)| {
        let norm = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        (row[scored.id as usize] - norm - f64::from(scored.logprob)).abs()
    })))
}

/// One request after a prompt.
fn single(
    engine: &Engine,
    weights: &str,
    prompt: Vec<i32>,
    tokens: usize,
    bytes: f64,
) -> Result<Value> {
    let context = prompt.len();
    // The first token comes with the prompt.
    let request = Request::greedy(prompt, tokens + 1);
    let (_, finished) = finish(engine.submit(request)?)?;
    // The engine's clock: tokens may reach this thread late and together.
    let rate = tokens as f64 / finished.usage.decode_s;
    let bytes = bytes + finished.cache.bytes as f64;
    Ok(json!({
        "weights": weights, "context": context, "tokens_per_s": rate, "bytes_per_token": bytes,
        "prompt_tokens_per_s": context as f64 / finished.usage.prefill_s,
        "gb_per_s": bytes * rate / 1e9,
        "cache_bytes": finished.cache.bytes, "evicted_fraction": finished.cache.evicted_fraction(),
    }))
}

/// Several requests at once, prompts included.
fn together(
    engine: &Engine,
    weights: &str,
    text: &Text,
    batch: usize,
    tokens: usize,
) -> Result<Value> {
    let request = |seed| Request::greedy(text.ids(seed, BATCH_PROMPT), tokens);
    let (generated, time) = seconds(|| {
        let answers = (0..batch as u64).map(|seed| engine.submit(request(seed)));
        let answers = answers.collect::<std::result::Result<Vec<_>, _>>()?;
        let ends = answers.into_iter().map(|answer| Ok(finish(answer)?.0.len()));
        Ok(ends.collect::<Result<Vec<usize>>>()?.into_iter().sum::<usize>())
    })?;
    Ok(json!({ "weights": weights, "batch": batch, "tokens_per_s": generated as f64 / time }))
}

fn describe(report: &Value) -> String {
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let word = |row: &Value| row["weights"].as_str().unwrap_or("").to_string();
    let list = |key: &str| report[key].as_array().cloned().unwrap_or_default();
    let header = |cells: &[&str]| cells.iter().map(|cell| cell.to_string()).collect();
    let mut single: Vec<Vec<String>> = vec![header(&[
        "weights",
        "context",
        "tokens/s",
        "GB/s",
        "of roofline",
        "cache",
        "evicted",
        "prompt tokens/s",
    ])];
    for row in list("single") {
        single.push(vec![
            word(&row),
            format!("{}", row["context"]),
            format!("{:.2}", number(&row, "tokens_per_s")),
            format!("{:.1}", number(&row, "gb_per_s")),
            format!("{:.1}%", 100.0 * number(&row, "roofline_fraction")),
            output::bytes(number(&row, "cache_bytes")),
            format!("{:.1}%", 100.0 * number(&row, "evicted_fraction")),
            format!("{:.0}", number(&row, "prompt_tokens_per_s")),
        ]);
    }
    let mut batched: Vec<Vec<String>> = vec![header(&["weights", "batch", "tokens/s"])];
    for row in list("batched") {
        let rate = format!("{:.1}", number(&row, "tokens_per_s"));
        batched.push(vec![word(&row), format!("{}", row["batch"]), rate]);
    }
    let agreement = match &report["agreement"] {
        Value::Null => String::new(),
        found => format!(
            "log-probabilities of {} tokens against those without eviction: worst difference {:.1e}, mean {:.1e}; \
             cache {} of {}\n",
            found["tokens"],
            number(found, "worst_difference"),
            number(found, "mean_difference"),
            output::bytes(number(found, "cache_bytes")),
            output::bytes(number(found, "full_bytes")),
        ),
    };
    format!(
        "decoding {}, {}; memory {:.1} GB/s\nworst log-probability error against the training forward {:.1e}\n{agreement}{}\n{}",
        report["model"].as_str().unwrap_or(""),
        report["machine"].as_str().unwrap_or(""),
        number(report, "memory_gb_per_s"),
        number(report, "error_vs_training_forward"),
        output::table(&single),
        output::table(&batched),
    )
}
