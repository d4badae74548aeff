//! `fox bench capacity`: long sequences that fit into a KV cache with and without eviction.

use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::sync::{Arc, RwLock};
use std::time::Instant;

use anyhow::{Result, bail};
use fox_base::difference::largest;
use fox_cache::{SequenceCost, StateSpec};
use fox_infer::{Engine, EngineOptions, Event, Eviction, FinishReason, Request, ScoredToken};
use fox_model::{DecayTime, Model, Preset};
use fox_tensor::Device;
use fox_tensor::cases::Rng;
use serde_json::{Value, json};

use super::decode::open;
use super::machine;
use crate::device::DeviceArgs;
use crate::engine::{EngineArgs, Weights};
use crate::output;

/// Long sequences that fit into the KV cache, with and without eviction
///
/// Both sides get the same memory and the same sequences, more than fit. The result is how many decode at the same
/// time after all prefills, when no further sequence is admitted; the run ends there. Eviction drops keys that provably
/// have a negligible fraction of any later softmax: the log-probabilities of the first sequence are compared between
/// the sides. Prompts are random tokens, prefilled in chunks of at least 32 tokens per sequence unless --prefill-chunk
/// is given.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder, or a published model such as fox-pro-760m, with random weights
    #[arg(value_name = "MODEL", default_value = "fox-pro-125m")]
    model: String,
    /// Format of the weights
    #[arg(long, value_enum, default_value_t = Weights::F32)]
    weights: Weights,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context: u32,
    /// Sequences that request memory; by default 16 times as many as fit without eviction, from 8 to 256
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    sequences: Option<u32>,
    /// Old name of --sequences
    #[arg(long, hide = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    streams: Option<u32>,
    /// Largest number of tokens that a sequence generates; by default enough that the first sequence still decodes
    /// when the last prefill ends, and at most a sixteenth of the context
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    tokens: Option<u32>,
    /// Memory of the first and the last head of every layer in tokens, geometric between, whatever the input, e.g.
    /// 16,1024: instead of the gates of the model, which have learned nothing if its weights are random
    #[arg(long, value_name = "SHORTEST,LONGEST", value_parser = parse_memory)]
    memory: Option<DecayTime>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Default number of sequences, as a multiple of those that fit without eviction.
const ASKING: usize = 16;
/// Smallest number of compared tokens of the first sequence.
const COMPARED: usize = 32;

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.engine.eviction == Eviction::Off {
        bail!("--eviction off leaves nothing to compare; give another, or none");
    }
    let device = args.device.open()?;
    let model = prepare(args, &device)?;
    let mut options = EngineOptions {
        share_prefixes: false,
        ..args.engine.options(args.context as usize, args.weights, &device)?
    };
    let cost = SequenceCost::new(model.config().state_specs(), options.prefill_chunk, &device);
    let (context, budget) = (args.context as usize, options.cache_bytes);
    let asking = (ASKING * (budget / cost.worst_case(context))).clamp(8, 256);
    if args.streams.is_some() {
        output::note("--streams is now called --sequences");
    }
    let sequences = args.sequences.or(args.streams).map_or(asking, |count| count as usize);
    // A step has at least one prefill chunk and one token of each decoding sequence: with long chunks, the first sequence
    // still decodes when the last prefill ends.
    if args.engine.prefill_chunk.is_none() {
        options.prefill_chunk = options.prefill_chunk.max(32 * sequences);
    }
    let enough = context.div_ceil(options.prefill_chunk) * sequences;
    let usual = (enough + 2 * COMPARED).min(context / 16).max(2 * COMPARED);
    let tokens = args.tokens.map_or(usual, |tokens| tokens as usize);
    (options.max_batch, options.max_context) = (sequences, context + tokens);
    let vocab = model.config().vocab_size;
    let requests = || {
        let request = |seed: usize| {
            let mut rng = Rng::new(seed as u64);
            let ids = (0..context).map(|_| rng.between(0, vocab - 1) as i32).collect();
            Request::greedy(ids, tokens)
        };
        (1..=sequences).map(request).collect()
    };
    let keeping = EngineOptions { eviction: Eviction::Off, ..options.clone() };
    let (keeps, kept) = fill("keeps all", model, keeping, requests())?;
    let (forgets, pruned) = fill("forgets", prepare(args, &device)?, options, requests())?;
    // Greedy sequences diverge after the first different token.
    let pairs = kept.iter().zip(&pruned).take_while(|(a, b)| a.id == b.id);
    let differences: Vec<f64> =
        pairs.map(|(a, b)| f64::from(a.logprob - b.logprob).abs()).collect();
    let compared = differences.len();
    let report = json!({
        "machine": machine(&device), "model": args.model, "context": context, "tokens": tokens,
        "asking": sequences, "memory": args.memory.map(|memory| [memory.min, memory.max]),
        "cache_bytes": budget, "ratio": number(&forgets, "sequences") / number(&keeps, "sequences"),
        "sides": [keeps, forgets],
        "compared_tokens": compared, "largest_difference": largest(differences),
    });
    output::print(&if args.json { format!("{report:#}\n") } else { describe(&report) })?;
    Ok(if compared > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The model, with gates of constant memory where they are asked for.
fn prepare(args: &Args, device: &Device) -> Result<Model> {
    if args.memory.is_none() && Preset::by_name(&args.model).is_some() {
        bail!(
            "{} has random weights, whose gates forget half at every token; say how long heads remember, e.g. \
             --memory 16,1024",
            args.model
        );
    }
    let mut model = open(&args.model, device)?;
    let gated = |spec: StateSpec| matches!(spec, StateSpec::Attention(spec) if spec.gated);
    if !model.config().state_specs().any(gated) {
        bail!("{} has no forget gates: its cache keeps all in any case", args.model);
    }
    let Some(memory) = args.memory else { return Ok(model) };
    if !model.init_decay_times(memory)? {
        bail!("--memory sets gates that depend on the input, and {} has none", args.model);
    }
    for (_, spec, weight) in model.params_mut().iter_mut() {
        if spec.name.ends_with(".fgate_proj.weight") {
            *weight = device.full(weight.shape(), 0.0)?;
        }
    }
    Ok(model)
}

/// Submits all sequences at once and waits until the admitted ones decode; the side's report, and the tokens of the first
/// sequence.
fn fill(
    side: &str,
    model: Model,
    options: EngineOptions,
    requests: Vec<Request>,
) -> Result<(Value, Vec<ScoredToken>)> {
    let engine = Engine::start(model, options)?;
    let begin = Instant::now();
    let (sender, events) = channel();
    let (count, tokens) = (requests.len(), requests[0].max_tokens);
    let mut tickets = Vec::with_capacity(count);
    // No sequence gets beyond its first token before all are submitted.
    let asking = Arc::new(RwLock::new(()));
    let held = asking.write();
    for (n, request) in requests.into_iter().enumerate() {
        let (sender, asking) = (sender.clone(), asking.clone());
        let sink = move |event: Event| {
            drop(asking.read());
            // After an error nothing receives events.
            drop(sender.send((n, event)));
        };
        tickets.push(engine.submit_to(request, sink)?);
    }
    drop((held, sender));
    let (mut first, mut ended, mut cache_per_sequence) = (Vec::new(), 0, 0.0);
    let stats = loop {
        let Ok((n, event)) = events.recv() else { bail!("the engine ended early") };
        match event {
            Event::Token(scored) if n == 0 => first.push(scored),
            Event::Finished(finished) => {
                if let FinishReason::Failed(words) = finished.reason {
                    bail!(words);
                }
                (ended, cache_per_sequence) = (ended + 1, finished.cache.bytes as f64);
            }
            _ => {}
        }
        let stats = engine.stats();
        let all_decode = stats.decoding > 0 && stats.decoding == stats.running;
        if all_decode && first.len() >= COMPARED.min(tokens) {
            cache_per_sequence = stats.cache_bytes as f64 / stats.decoding as f64;
            break stats;
        }
        if ended == count {
            break stats;
        }
    };
    let seconds = begin.elapsed().as_secs_f64();
    drop(tickets);
    engine.drain();
    let sequences = stats.peak_decoding;
    output::note(&format!("{side}: {sequences} sequences in {seconds:.1} s"));
    let report = json!({
        "side": side, "sequences": sequences, "cache_per_sequence": cache_per_sequence, "ended_before": ended,
        "peak_cache_bytes": stats.peak_cache_bytes, "preempted": stats.preempted, "seconds": seconds,
    });
    Ok((report, first))
}

fn parse_memory(text: &str) -> Result<DecayTime, String> {
    let wrong = || "two numbers of tokens above 0, the shorter one first, e.g. 16,1024".to_string();
    let (min, max) = text.split_once(',').ok_or_else(wrong)?;
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| wrong());
    let (min, max) = (number(min)?, number(max)?);
    if 0.0 < min && min <= max && max <= 1e30 { Ok(DecayTime { min, max }) } else { Err(wrong()) }
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

fn describe(report: &Value) -> String {
    let word = |row: &Value, key: &str| row[key].as_str().unwrap_or("").to_string();
    let size = |row: &Value, key: &str| output::bytes(number(row, key));
    let sides = report["sides"].as_array().cloned().unwrap_or_default();
    let header = ["cache", "sequences", "cache per sequence", "peak", "preempted", "seconds"];
    let mut rows = vec![header.map(str::to_string).to_vec()];
    let mut notes = String::new();
    for side in &sides {
        let name = word(side, "side");
        rows.push(vec![
            name.clone(),
            side["sequences"].to_string(),
            size(side, "cache_per_sequence"),
            size(side, "peak_cache_bytes"),
            side["preempted"].to_string(),
            format!("{:.1}", number(side, "seconds")),
        ]);
        if side["sequences"] == report["asking"] {
            notes += &format!("{name}: all sequences fit; more --sequences may fit\n");
        } else if side["ended_before"] != json!(0) {
            notes += &format!(
                "{name}: {} sequences ended before all that fit had started; more may fit with more --tokens or a \
                 longer --prefill-chunk\n",
                side["ended_before"]
            );
        }
    }
    format!(
        "{}, {}; {} of cache for {} sequences of {} + {} tokens\n{}ratio {:.2}\n{notes}largest difference of the \
         log-probabilities of the first sequence's first {} tokens {:.1e}\n",
        word(report, "model"),
        word(report, "machine"),
        size(report, "cache_bytes"),
        report["asking"],
        report["context"],
        report["tokens"],
        output::table(&rows),
        number(report, "ratio"),
        report["compared_tokens"],
        number(report, "largest_difference"),
    )
}
