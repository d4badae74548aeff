//! `fox bench greedy`: tokens per second of decode steps without the inference engine, op by op and in slots.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use fox_base::difference::relative_error;
use fox_model::{Architecture, ForwardOptions, Model, ParamGroup, SequenceState};
use fox_tensor::cases::Rng;
use fox_tensor::{DType, Device};
use serde_json::json;

use super::{architectures, machine, median};
use crate::device::DeviceArgs;
use crate::output;

/// Greedy decoding without the inference engine, op by op and, as evaluation does, in slots
///
/// Every step reads all weights of matmuls and the KV cache: the roofline is the time to read them at the bandwidth of
/// a large copy in this run. A step ends when the next token is known. Steps in slots are fed the tokens of those op by
/// op and must have close logits. `fox bench throughput` measures the engine.
#[derive(clap::Args)]
pub struct Args {
    /// The model
    #[arg(long, default_value = "fox-pro", value_parser = architectures())]
    arch: Architecture,
    /// Width of the model
    #[arg(long, default_value_t = 768, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    d_model: u32,
    /// Blocks
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: u32,
    /// Heads
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1024))]
    heads: u32,
    /// Size of the vocabulary
    #[arg(long, default_value_t = 50304, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    vocab: u32,
    /// Sequences
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens to generate; the median step counts
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Accepted for compatibility: both ways of decoding are measured
    #[arg(long, hide = true)]
    op_by_op: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let sizes = (args.d_model as usize, args.layers as usize, args.heads as usize);
    let config = args.arch.config(sizes.0, sizes.1, sizes.2).with_vocab(args.vocab as usize);
    config.validate("the flags")?;
    if args.op_by_op {
        output::note("--op-by-op has no effect: op by op is always measured");
    }
    let device = args.device.open()?;
    let model = Model::init(&config, 0, &device)?;
    let (batch, prompt) = (args.batch as usize, args.prompt as usize);
    let room = prompt + args.tokens as usize + 1;
    let mut cache = model.new_cache(batch, room)?;
    let mut rng = Rng::new(3);
    let mut draw = || rng.between(0, config.vocab_size - 1) as i32;
    let prompts: Vec<Vec<i32>> =
        (0..batch).map(|_| (0..prompt).map(|_| draw()).collect()).collect();
    let rows: Vec<&[i32]> = prompts.iter().map(Vec::as_slice).collect();
    let options = ForwardOptions::default();
    let begin = Instant::now();
    let mut next = best(&model.decode(&rows, &mut cache, &options)?.to_f32()?, batch);
    let prefill = begin.elapsed().as_secs_f64();
    let (mut steps, mut launches, mut fed) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = Vec::new();
    for _ in 0..args.tokens {
        fed.push(next.clone());
        let begin = Instant::now();
        let rows: Vec<&[i32]> = next.chunks(1).collect();
        let logits = model.decode(&rows, &mut cache, &options)?;
        launches.push(begin.elapsed().as_secs_f64());
        last = logits.to_f32()?;
        next = best(&last, batch);
        steps.push(begin.elapsed().as_secs_f64());
    }
    drop(cache);
    let slots = in_slots(&model, &prompts, &fed, &last)?;
    let (step, launch) = (median(steps), median(launches));
    let weight = device.backend().caps().activation_type.size();
    let read = |spec: &&fox_model::ParamSpec| {
        spec.dims.len() == 2 && (spec.group != ParamGroup::Embedding || config.tie_word_embeddings)
    };
    let specs = config.param_specs();
    let weights: usize = specs.iter().filter(read).map(|spec| spec.count() * weight).sum();
    let tokens = batch * (prompt + args.tokens as usize / 2);
    let keys = 2 * config.num_layers * config.hidden_size * weight * tokens;
    let rate = copy_rate(&device)?;
    let roofline = (weights + keys) as f64 / rate;
    let report = json!({
        "machine": machine(&device),
        "parameters": specs.iter().map(|spec| spec.count()).sum::<usize>(),
        "batch": batch, "prompt": prompt, "tokens": args.tokens,
        "first_token_ms": prefill * 1e3, "ms_per_step": step * 1e3,
        "launch_ms": launch * 1e3,
        "tokens_per_s": batch as f64 / step,
        "bytes_per_step": weights + keys, "copy_bytes_per_s": rate,
        "roofline_fraction": roofline / step,
        "slots": slots.as_ref().map(|slots| json!({
            "ms_per_step": slots.step * 1e3, "tokens_per_s": batch as f64 / slots.step,
            "roofline_fraction": roofline / slots.step,
            "equal_tokens": slots.equal, "logit_error": slots.error,
        })),
        "peak_bytes": device.memory().peak,
    });
    if args.json {
        output::print(&format!("{report:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&format!(
        "decoding {batch} x {prompt} + {} tokens, {}\n\
         {:.3} ms per step, {:.3} ms of it until all is launched: {:.0} tokens/s; the prompt {:.1} ms\n\
         {:.1}% of the roofline ({} per step at {}/s)\n",
        args.tokens,
        machine(&device),
        step * 1e3,
        launch * 1e3,
        batch as f64 / step,
        prefill * 1e3,
        100.0 * roofline / step,
        output::bytes((weights + keys) as f64),
        output::bytes(rate),
    ))?;
    output::print(&match slots {
        None => "no slots on this device for this model and batch\n".into(),
        Some(slots) => format!(
            "in slots {:.3} ms per step: {:.0} tokens/s, {:.1}% of the roofline; {} of {} tokens are those of steps \
             op by op, the last logits are off by {:.1e}\n",
            slots.step * 1e3,
            batch as f64 / slots.step,
            100.0 * roofline / slots.step,
            slots.equal,
            batch * args.tokens as usize,
            slots.error,
        ),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Steps in slots.
struct SlotSteps {
    /// Seconds of the median step.
    step: f64,
    /// Tokens that are the same as op by op.
    equal: usize,
    /// Relative error of the logits of the last step.
    error: f64,
}

/// Feeds the prompts and then the tokens `fed: [steps][batch]` to slots; `last` are the logits after them, op by op.
/// `None` if the device has no slots for the model, or too few.
fn in_slots(
    model: &Model,
    prompts: &[Vec<i32>],
    fed: &[Vec<i32>],
    last: &[f32],
) -> Result<Option<SlotSteps>> {
    let mut decoder = model.token_decoder(ForwardOptions::default());
    let room = prompts[0].len() + fed.len();
    if decoder.reserve(room)? < prompts.len().max(2) {
        return Ok(None);
    }
    let mut states = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let mut cache = decoder.new_cache(room)?;
        decoder.prefill(prompt, &mut cache)?;
        states.push(SequenceState::from(cache));
    }
    let (mut steps, mut equal, mut logits) = (Vec::new(), 0, Vec::new());
    for (n, tokens) in fed.iter().enumerate() {
        let begin = Instant::now();
        let mut own: Vec<&mut SequenceState> = states.iter_mut().collect();
        logits = decoder.step(&mut own, tokens)?.concat();
        let next = best(&logits, prompts.len());
        steps.push(begin.elapsed().as_secs_f64());
        let wanted = fed.get(n + 1).cloned().unwrap_or_else(|| best(last, prompts.len()));
        equal += next.iter().zip(wanted).filter(|(a, b)| **a == *b).count();
    }
    let real = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let error = relative_error(&real(&logits), &real(last), f64::MIN_POSITIVE);
    Ok(Some(SlotSteps { step: median(steps), equal, error }))
}

/// The most likely token of each row.
fn best(logits: &[f32], rows: usize) -> Vec<i32> {
    let top = |row: &[f32]| {
        // Lanes, so that it takes less time than the copy from the device.
        const LANES: usize = 16;
        let mut tops = [f32::NEG_INFINITY; LANES];
        for part in row.chunks(LANES) {
            for (top, &x) in tops.iter_mut().zip(part) {
                *top = if x > *top { x } else { *top };
            }
        }
        let best = tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter().position(|&x| x == best).unwrap_or(0) as i32
    };
    logits.chunks(logits.len() / rows).map(top).collect()
}

/// Bytes read per second by a large copy, of which as many are written.
fn copy_rate(device: &Device) -> Result<f64> {
    let rows = 1 << 16;
    let from = device.full([rows, 1024], 1.0)?;
    let mut to = device.zeros([rows, 1024], DType::F32)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let begin = Instant::now();
        for _ in 0..4 {
            device.backend().copy_rows(&from, 0, &mut to, 0, rows)?;
        }
        device.backend().synchronize()?;
        best = best.min(begin.elapsed().as_secs_f64() / 4.0);
    }
    // A step only reads: what a copy reads and writes is what the memory can move.
    Ok(2.0 * (rows * 1024 * 4) as f64 / best)
}
