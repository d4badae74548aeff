//! `fox bench greedy`: tokens per second of decode steps op by op, without the inference engine.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use fox_model::{Architecture, ForwardOptions, Model, ParamGroup};
use fox_tensor::cases::Rng;
use fox_tensor::{DType, Device};
use serde_json::json;

use super::{architectures, machine, median};
use crate::device::DeviceArgs;
use crate::output;

/// Greedy decoding op by op, without the inference engine
///
/// Every step reads all weights of matmuls and the KV cache: the roofline is the time to read them at the bandwidth of
/// a large copy in this run. A step ends when the next token is known. `fox bench throughput` measures the engine.
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
    /// Accepted for compatibility: this always decodes op by op
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
    let mut config = args.arch.config(sizes.0, sizes.1, sizes.2);
    config.vocab_size = args.vocab as usize;
    config.validate("the flags")?;
    if args.op_by_op {
        output::note("--op-by-op is the default now");
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
    let (mut steps, mut launches) = (Vec::new(), Vec::new());
    for _ in 0..args.tokens {
        let begin = Instant::now();
        let rows: Vec<&[i32]> = next.chunks(1).collect();
        let logits = model.decode(&rows, &mut cache, &options)?;
        launches.push(begin.elapsed().as_secs_f64());
        next = best(&logits.to_f32()?, batch);
        steps.push(begin.elapsed().as_secs_f64());
    }
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
    Ok(ExitCode::SUCCESS)
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
