//! `fox bench throughput`: decode and prefill throughput of an engine with many sequences.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Instant;

use anyhow::{Result, bail};
use fox_infer::{Engine, EngineOptions, Event, FinishReason, Request, ScoredToken};
use fox_tensor::cases::Rng;
use fox_tensor::speed::memory_rate;
use fox_tensor::{DType, Span};
use serde_json::{Value, json};

use super::decode::open;
use super::{machine, median};
use crate::device::DeviceArgs;
use crate::engine::{EngineArgs, Weights};
use crate::output;

/// Decode and prefill throughput with many sequences: tokens per second
///
/// Decoding is measured between the first token of the last sequence and the last token of the first, while all of
/// them decode. The roofline is the time to read all weights and KV caches once per step at the memory bandwidth
/// measured in the same run (the best sum over 512 MiB). One sequence also runs alone: its log-probabilities must have
/// the same bits. Models have random weights; prompts are random tokens.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder, or a published model such as fox-pro-760m
    #[arg(value_name = "MODEL", default_value = "fox-pro-125m")]
    model: String,
    /// Format of the weights
    #[arg(long, value_enum, default_value_t = Weights::F32)]
    weights: Weights,
    /// Batch sizes: sequences that decode together
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 8, 64, 256],
          value_parser = clap::value_parser!(u32).range(1..=256))]
    sequences: Vec<u32>,
    /// Old name of --sequences
    #[arg(long, hide = true, value_name = "N,...", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=256))]
    streams: Option<Vec<u32>>,
    /// Tokens of each sequence before those that are measured
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Tokens that each sequence generates
    #[arg(long, value_name = "N", default_value_t = 192, value_parser = clap::value_parser!(u32).range(8..))]
    tokens: u32,
    /// Tokens of a long prompt that is prefilled alone, three times; 0 for none
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    prompt: u32,
    /// Whether sequences decode in slots of the device
    #[arg(long, value_name = "yes|no", default_values_t = ["yes".to_string()],
          value_delimiter = ',', value_parser = ["yes", "no"])]
    resident: Vec<String>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Also report the median device time of a step
    #[arg(long)]
    profile: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let batches = match &args.streams {
        Some(old) => {
            output::note("--streams is now called --sequences");
            old
        }
        None => &args.sequences,
    };
    let mut rate = memory_rate(&device)?;
    let (mut rows, mut prompts, mut same_bits) = (Vec::new(), Vec::new(), true);
    for resident in &args.resident {
        let model = open(&args.model, &device)?;
        let (bytes, vocab) =
            (model.weight_bytes_per_step(args.weights.format()), model.config().vocab_size);
        // A GPU that computes in bf16 reads f32 weights as bf16.
        let bytes = if device.backend().caps().activation_type == DType::Bf16 {
            bytes.min(bytes_in_bf16(&model))
        } else {
            bytes
        };
        let longest = (args.context + args.tokens).max(args.prompt) as usize + 2;
        let most = batches.iter().copied().max().unwrap_or(1) as usize;
        let options = EngineOptions {
            share_prefixes: false,
            max_batch: most,
            resident: resident == "yes",
            ..args.engine.options(longest, args.weights, &device)?
        };
        let begin = Instant::now();
        let engine = Engine::start(model, options)?;
        let start_s = begin.elapsed().as_secs_f64();
        let request = |seed: u64, len: u32, tokens: u32| {
            let mut rng = Rng::new(seed);
            let ids = (0..len).map(|_| rng.between(0, vocab - 1) as i32).collect();
            Request::greedy(ids, tokens as usize)
        };
        let alone = together(&engine, vec![request(1, args.context, args.tokens)])?;
        for &sequences in batches {
            let all =
                (1..=u64::from(sequences)).map(|seed| request(seed, args.context, args.tokens));
            device.backend().profile(args.profile);
            let run = together(&engine, all.collect())?;
            device.backend().profile(false);
            let mut medians = BTreeMap::new();
            for (op, times) in times_by_op(&device.backend().take_timeline()?) {
                let (calls, step) = (times.len(), 1e3 * median(times));
                output::note(&format!("  {op}: {calls} times, median {step:.4} ms"));
                medians.insert(op, step);
            }
            let same = run.first == alone.first;
            // Reported at once: a later batch size may fail.
            output::note(&format!(
                "{sequences} sequences, slots {resident}: {:.0} tokens/s",
                run.rate
            ));
            same_bits &= same || resident == "no";
            rows.push(json!({
                "resident": resident, "slots": engine.stats().slots, "sequences": sequences,
                "tokens_per_s": run.rate, "bytes_per_step": bytes + run.cache_bytes,
                "same_bits_as_alone": same, "median_ms": medians,
            }));
            rate = rate.max(memory_rate(&device)?);
        }
        if args.prompt > 0 {
            let times = (0..3).map(|n| read_prompt(&engine, request(50 + n, args.prompt, 1)));
            let times = times.collect::<Result<Vec<f64>>>()?;
            let speed: Vec<f64> = times.iter().map(|time| f64::from(args.prompt) / time).collect();
            prompts.push(json!({
                "resident": resident, "tokens": args.prompt, "tokens_per_s": speed,
                "first_request_tokens_per_s": alone.rate, "engine_start_s": start_s,
            }));
        }
    }
    for row in &mut rows {
        let step =
            row["sequences"].as_f64().unwrap_or(0.0) / row["tokens_per_s"].as_f64().unwrap_or(0.0);
        row["roofline_fraction"] =
            json!(row["bytes_per_step"].as_f64().unwrap_or(0.0) / rate / step);
    }
    let report = json!({
        "machine": machine(&device), "model": args.model, "memory_gb_per_s": rate / 1e9,
        "context": args.context, "batches": rows, "prompts": prompts,
    });
    output::print(&if args.json { format!("{report:#}\n") } else { describe(&report) })?;
    // Decoding in slots is batch-invariant.
    Ok(if same_bits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Seconds of each call of every op.
fn times_by_op(timeline: &[Span]) -> BTreeMap<&'static str, Vec<f64>> {
    let mut all: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for span in timeline {
        all.entry(span.op).or_default().push(span.end - span.begin);
    }
    all
}

/// Bytes of weights that a decode step reads in bf16.
fn bytes_in_bf16(model: &fox_model::Model) -> f64 {
    model.weight_bytes_per_step(fox_infer::WeightFormat::Bf16)
}

/// Measurements of sequences that decode together.
struct Together {
    /// Tokens per second of all sequences, while all decode.
    rate: f64,
    /// Bytes of all KV caches at the end.
    cache_bytes: f64,
    /// The tokens of the first sequence.
    first: Vec<ScoredToken>,
}

fn together(engine: &Engine, requests: Vec<Request>) -> Result<Together> {
    let (sender, events) = channel();
    let count = requests.len();
    let mut tickets = Vec::with_capacity(count);
    for (n, request) in requests.into_iter().enumerate() {
        let sender = sender.clone();
        // After an error nothing receives events.
        let sink = move |event: Event| drop(sender.send((n, Instant::now(), event)));
        tickets.push(engine.submit_to(request, sink)?);
    }
    drop(sender);
    let mut times: Vec<Vec<Instant>> = vec![Vec::new(); count];
    let (mut first, mut cache_bytes, mut ended) = (Vec::new(), 0.0, 0);
    while ended < count {
        let Ok((n, time, event)) = events.recv() else { bail!("the engine ended early") };
        match event {
            Event::Token(scored) => {
                times[n].push(time);
                if n == 0 {
                    first.push(scored);
                }
            }
            Event::Finished(finished) => {
                if let FinishReason::Failed(words) = finished.reason {
                    bail!(words);
                }
                cache_bytes += finished.cache.bytes as f64;
                ended += 1;
            }
            _ => {}
        }
    }
    let begin = times.iter().filter_map(|times| times.first()).max().copied();
    let end = times.iter().filter_map(|times| times.last()).min().copied();
    let (Some(begin), Some(end)) = (begin, end) else { bail!("a sequence without tokens") };
    let inside = times.iter().flatten().filter(|time| **time > begin && **time <= end).count();
    let seconds = end.saturating_duration_since(begin).as_secs_f64();
    if inside == 0 || seconds == 0.0 {
        bail!(
            "{count} sequences never decoded all at once; ask for more --tokens or a shorter --context"
        );
    }
    Ok(Together { rate: inside as f64 / seconds, cache_bytes, first })
}

/// Seconds of a prefill.
fn read_prompt(engine: &Engine, request: Request) -> Result<f64> {
    for event in engine.submit(request)? {
        if let Event::Finished(finished) = event {
            return match finished.reason {
                FinishReason::Failed(words) => bail!(words),
                _ => Ok(finished.usage.prefill_s),
            };
        }
    }
    bail!("the engine ended early")
}

fn describe(report: &Value) -> String {
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let word = |row: &Value, key: &str| row[key].as_str().unwrap_or("").to_string();
    let header = |cells: &[&str]| cells.iter().map(|cell| cell.to_string()).collect();
    let list = |key: &str| report[key].as_array().cloned().unwrap_or_default();
    let mut batches: Vec<Vec<String>> = vec![header(&[
        "in slots",
        "sequences",
        "tokens/s",
        "ms a step",
        "of roofline",
        "same bits alone",
    ])];
    for row in list("batches") {
        let in_slots = if number(&row, "slots") > 0.0 { "yes" } else { "no" };
        let same = if row["same_bits_as_alone"] == json!(true) { "yes" } else { "no" };
        batches.push(vec![
            in_slots.into(),
            format!("{}", row["sequences"]),
            format!("{:.0}", number(&row, "tokens_per_s")),
            format!("{:.3}", 1e3 * number(&row, "sequences") / number(&row, "tokens_per_s")),
            format!("{:.1}%", 100.0 * number(&row, "roofline_fraction")),
            same.into(),
        ]);
    }
    let mut text = format!(
        "{}, {}; memory {:.1} GB/s\n{} tokens of context\n{}",
        word(report, "model"),
        word(report, "machine"),
        number(report, "memory_gb_per_s"),
        report["context"],
        output::table(&batches),
    );
    for row in list("prompts") {
        let speeds = row["tokens_per_s"].as_array().cloned().unwrap_or_default();
        let speeds: Vec<String> = speeds
            .iter()
            .map(|speed| format!("{:.0}", speed.as_f64().unwrap_or(f64::NAN)))
            .collect();
        text += &format!(
            "slots {}: prefill of {} tokens at {} tokens/s (three times); the first request decoded at {:.0} tokens/s; \
             the engine started in {:.1} s\n",
            word(&row, "resident"),
            row["tokens"],
            speeds.join(", "),
            number(&row, "first_request_tokens_per_s"),
            number(&row, "engine_start_s"),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_has_batches_and_prefills() {
        let row = json!({
            "resident": "yes", "slots": 64, "sequences": 64, "tokens_per_s": 32_000.0,
            "roofline_fraction": 0.5, "same_bits_as_alone": true,
        });
        let prompt = json!({
            "resident": "yes", "tokens": 100, "tokens_per_s": [1.0, 2.0, 3.0],
            "first_request_tokens_per_s": 700.0, "engine_start_s": 1.5,
        });
        let report = json!({
            "machine": "a machine", "model": "m", "memory_gb_per_s": 10.0, "context": 128,
            "batches": [row], "prompts": [prompt],
        });
        let want = "m, a machine; memory 10.0 GB/s\n128 tokens of context\n\
            in slots  sequences  tokens/s  ms a step  of roofline  same bits alone\n\
            yes              64     32000      2.000        50.0%              yes\n\
            slots yes: prefill of 100 tokens at 1, 2, 3 tokens/s (three times); the first request decoded at 700 \
            tokens/s; the engine started in 1.5 s\n";
        assert_eq!(describe(&report), want);
    }
}
