//! `fox bench attention`: forward and backward of one layer's attention.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_model::{ATTENTION_BACKWARD, attention_flops};
use fox_tensor::cases::{Rng, relative_error};
use fox_tensor::speed::matmul_rate;
use fox_tensor::{
    Acp, AttentionInputs, AttentionSpec, DType, Device, LogitBound, Mask, PATH_BLOCK,
    PATH_MAX_HEAD_DIM, PathInputs, Segments, Tensor, WallInputs,
};
use serde_json::json;

use super::sampled::{self, SampledAttention};
use super::train::pruned;
use super::{check_host_memory, machine, median, normals, seconds};
use crate::device::DeviceArgs;
use crate::output;
use crate::tolerance::log_tolerance;

/// Forgetting attention, forward and backward
///
/// Gates decay with times log-spaced from 8 to 100,000 tokens over the heads, plus noise. FLOPs
/// are counted causal: 4 B H T^2 d / 2 forward, 2.5 times that backward; with pruning, the fraction
/// of visited blocks; PaTH adds a product with a d x d matrix for every query and 64 keys. The roofline is that work at
/// the rate of the fastest square matrix product in this run.
///
/// Results are compared with the oracle at a short length, and for random rows at the length that is timed; those of
/// PaTH and Wall attention at the short length only (`fox selftest` compares large cases).
#[derive(clap::Args)]
pub struct Args {
    /// Sequences
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Query heads
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    heads: u32,
    /// Key and value heads; as many as query heads by default
    #[arg(long, value_name = "HEADS")]
    kv_heads: Option<u32>,
    /// Tokens per sequence
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Width of a head
    #[arg(long, default_value_t = 64)]
    head_dim: u32,
    /// Prune blocks whose softmax weight is provably below e^LN, e.g. -10
    #[arg(long, value_name = "LN", num_args = 0..=1, default_missing_value = "-10",
          allow_negative_numbers = true, value_parser = log_tolerance)]
    acp: Option<f32>,
    /// Sliding window
    #[arg(long, value_name = "TOKENS")]
    window: Option<usize>,
    /// No forget gates
    #[arg(long)]
    no_gates: bool,
    /// Wall attention: channels of keys decay by NATS per token, plus noise
    #[arg(long, value_name = "NATS", num_args = 0..=1, default_missing_value = "0.0003",
          conflicts_with = "bidirectional", value_parser = decay_rate)]
    wall: Option<f64>,
    /// PaTH attention: random reflections between keys
    #[arg(long, conflicts_with_all = ["wall", "window", "bidirectional"])]
    path: bool,
    /// See keys on both sides
    #[arg(long)]
    bidirectional: bool,
    /// Measurements; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    fn spec(&self, batch: usize, seq: usize) -> AttentionSpec {
        let (heads, head_dim) = (self.heads as usize, self.head_dim as usize);
        AttentionSpec {
            kv_heads: self.kv_heads.unwrap_or(self.heads) as usize,
            window: self.window,
            mask: if self.bidirectional { Mask::Bidirectional } else { Mask::Causal },
            acp: match self.acp {
                None => Acp::Off,
                Some(log_tolerance) => Acp::On { log_tolerance, bound: LogitBound::Norms },
            },
            ..AttentionSpec::causal(heads, head_dim, Segments::uniform(batch, seq))
        }
    }
}

/// The operands, on a device.
struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gates: Option<Tensor>,
    /// Per channel, of Wall attention.
    log_decays: Option<Tensor>,
    /// Reflections, of PaTH attention.
    u: Option<Tensor>,
    d_out: Tensor,
}

/// Seconds of every round.
#[derive(Default)]
struct Rounds {
    forward: Vec<f64>,
    backward: Vec<f64>,
}

/// A finite log decay per token, not negative.
fn decay_rate(text: &str) -> std::result::Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0);
    rate.ok_or_else(|| "give nats per token, 0 or more".to_string())
}

impl Operands {
    fn new(device: &Device, spec: &AttentionSpec, rows: usize, args: &Args) -> Result<Self> {
        let mut rng = Rng::new(1);
        let (width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let mut normal = |width: usize| -> Result<Tensor> {
            let values = normals(&mut rng, rows * width);
            Ok(device.from_f32(&values, [rows, width])?.to_activations()?)
        };
        let (q, k, v, d_out) =
            (normal(width)?, normal(kv_width)?, normal(kv_width)?, normal(width)?);
        let log_gates = match args.no_gates {
            true => None,
            false => {
                let decay = |h: usize| {
                    let fraction = h as f64 / (spec.heads - 1).max(1) as f64;
                    1.0 / (8f64.ln() + (1e5f64.ln() - 8f64.ln()) * fraction).exp()
                };
                let gate =
                    |n: usize| (-decay(n % spec.heads) * (1.0 + 0.5 * rng.normal()).abs()) as f32;
                let values: Vec<f32> = (0..rows * spec.heads).map(gate).collect();
                Some(device.from_f32(&values, [rows, spec.heads])?)
            }
        };
        let decays = |rate: f64| {
            let values: Vec<f32> =
                (0..rows * width).map(|_| (-2.0 * rate * rng.uniform()) as f32).collect();
            device.from_f32(&values, [rows, width])
        };
        let log_decays = args.wall.map(decays).transpose()?;
        let reflections = || {
            let mut u = normals(&mut rng, rows * kv_width);
            for u in u.chunks_mut(spec.head_dim) {
                // Squared lengths between 0 and 2.
                let norm = u.iter().map(|x| x * x).sum::<f32>();
                let factor = (2.0 * rng.uniform() as f32 / norm).sqrt();
                u.iter_mut().for_each(|x| *x *= factor);
            }
            device.from_f32(&u, [rows, kv_width])
        };
        let u = args.path.then(reflections).transpose()?;
        Ok(Operands { q, k, v, log_gates, log_decays, u, d_out })
    }

    fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs { q: &self.q, k: &self.k, v: &self.v, log_gates: self.log_gates.as_ref() }
    }

    fn wall_inputs(&self) -> Option<WallInputs<'_>> {
        let log_decays = self.log_decays.as_ref()?;
        let AttentionInputs { q, k, v, log_gates } = self.inputs();
        Some(WallInputs { q, k, v, log_decays, log_gates })
    }

    fn path_inputs(&self) -> Option<PathInputs<'_>> {
        let u = self.u.as_ref()?;
        let AttentionInputs { q, k, v, log_gates } = self.inputs();
        Some(PathInputs { q, k, v, u, log_gates })
    }

    fn bytes(&self) -> usize {
        let others = self.log_gates.iter().chain(&self.log_decays).chain(&self.u);
        [&self.q, &self.k, &self.v, &self.d_out].into_iter().chain(others).map(bytes).sum()
    }
}

fn bytes(x: &Tensor) -> usize {
    x.len() * x.dtype().size()
}

/// Minimum seconds of a measurement; short work is repeated.
const LONG_ENOUGH: f64 = 0.03;

/// Output and gradients by name.
type Results = Vec<(&'static str, Tensor)>;

/// Output and gradients, tile counts, and the seconds of a forward and of a backward pass.
struct Measured {
    results: Results,
    lse: Tensor,
    tiles: Tensor,
    forward: f64,
    backward: f64,
}

/// Runs each direction `calls` times and synchronizes once at the end, as a training step does, so that an asynchronous
/// device is never idle between calls.
fn forward_backward(
    device: &Device,
    x: &Operands,
    spec: &AttentionSpec,
    calls: u32,
) -> Result<Measured> {
    let backend = device.backend();
    if let Some(inputs) = x.wall_inputs() {
        let forward = || Ok(backend.wall_attention_fwd(&inputs, &[], spec)?);
        let (out, forward) = repeated(device, calls, forward)?;
        let backward = || Ok(backend.wall_attention_bwd(&x.d_out, &inputs, &out, spec)?);
        let (grads, backward) = repeated(device, calls, backward)?;
        let mut results = vec![("o", out.o), ("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)];
        results.push(("dlog_decays", grads.dlog_decays));
        results.extend(grads.dlog_gates.map(|d| ("dlog_gates", d)));
        return Ok(Measured { results, lse: out.lse, tiles: out.tiles, forward, backward });
    }
    if let Some(inputs) = x.path_inputs() {
        let forward = || Ok(backend.path_attention_fwd(&inputs, spec)?);
        let (out, forward) = repeated(device, calls, forward)?;
        let backward = || Ok(backend.path_attention_bwd(&x.d_out, &inputs, &out, spec)?);
        let (grads, backward) = repeated(device, calls, backward)?;
        let mut results = vec![("o", out.o), ("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)];
        results.push(("du", grads.du));
        results.extend(grads.dlog_gates.map(|d| ("dlog_gates", d)));
        return Ok(Measured { results, lse: out.lse, tiles: out.tiles, forward, backward });
    }
    let forward = || Ok(backend.attention_fwd(&x.inputs(), spec)?);
    let (out, forward) = repeated(device, calls, forward)?;
    let backward = || Ok(backend.attention_bwd(&x.d_out, &x.inputs(), &out, spec)?);
    let (grads, backward) = repeated(device, calls, backward)?;
    let mut results = vec![("o", out.o), ("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)];
    results.extend(grads.dlog_gates.map(|d| ("dlog_gates", d)));
    Ok(Measured { results, lse: out.lse, tiles: out.tiles, forward, backward })
}

/// The result of the last call, and the seconds per call.
fn repeated<T>(
    device: &Device,
    calls: u32,
    mut call: impl FnMut() -> Result<T>,
) -> Result<(T, f64)> {
    let (last, time) = seconds(|| {
        for _ in 1..calls {
            call()?;
        }
        let last = call()?;
        device.backend().synchronize()?;
        Ok(last)
    })?;
    Ok((last, time / f64::from(calls)))
}

/// The allowed error of a device's results, relative to their norm. A logit is a sum of `d` products, off by at most
/// `d u` of what its factors' norms allow, `u` the unit roundoff, and enters an exponent; with its bias it is of size 32 at
/// most where it still counts, and is rounded there; sums over `T` tokens add roundings of either sign, `sqrt(T) u`; the
/// backward chains four such products. In bf16 the probabilities, the gradients of the scores, the output and the result
/// itself are rounded, each by at most 2^-9 of its norm: twice their sum, and a quarter more for the rest.
fn tolerance(device: &Device, head_dim: usize, seq: usize) -> f64 {
    let roundoff = f64::from(f32::EPSILON) / 2.0;
    match device.backend().caps().activation_type {
        DType::F32 => 4.0 * roundoff * (head_dim as f64 + 32.0 + (seq as f64).sqrt()),
        _ => 2e-2,
    }
}

/// The largest relative error of sampled rows against the oracle; 0 for PaTH and Wall attention.
fn check_sampled(device: &Device, args: &Args, x: &Operands, measured: &Measured) -> Result<f64> {
    if args.wall.is_some() || args.path {
        return Ok(0.0);
    }
    let (batch, seq) = (args.batch as usize, args.seq as usize);
    let found = |name: &str| -> Result<Option<Vec<f32>>> {
        let result = measured.results.iter().find(|(own, _)| *own == name);
        Ok(result.map(|(_, x)| x.to_f32()).transpose()?)
    };
    let result = |name: &str| match found(name)? {
        Some(x) => Ok(x),
        None => bail!("attention returned no {name}"),
    };
    let spec = args.spec(batch, seq);
    let run = SampledAttention {
        spec: &spec,
        batch,
        seq,
        q: x.q.to_f32()?,
        k: x.k.to_f32()?,
        v: x.v.to_f32()?,
        log_gates: x.log_gates.as_ref().map(Tensor::to_f32).transpose()?,
        d_out: x.d_out.to_f32()?,
        o: result("o")?,
        lse: measured.lse.to_f32()?,
        dq: result("dq")?,
        dk: result("dk")?,
        dv: result("dv")?,
        dlog_gates: if args.no_gates { None } else { Some(result("dlog_gates")?) },
    };
    sampled::check(&run, tolerance(device, spec.head_dim, seq))
}

/// The largest relative error of a short sequence against the oracle.
fn check(device: &Device, args: &Args) -> Result<f64> {
    let spec = args.spec(1, args.seq.min(200) as usize);
    let run = |device: &Device| -> Result<Results> {
        let rows = args.seq.min(200) as usize;
        let x = Operands::new(device, &spec, rows, args)?;
        Ok(forward_backward(device, &x, &spec, 1)?.results)
    };
    let mut worst = 0.0f64;
    for ((name, got), (_, want)) in run(device)?.iter().zip(run(&Device::naive())?) {
        let error = relative_error(&got.to_f64()?, &want.to_f64()?);
        if error.is_nan() || error > tolerance(device, spec.head_dim, args.seq.min(200) as usize) {
            bail!(
                "{name} differs from the oracle by {error:.1e}; results must be correct before they are timed"
            );
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let widest = if args.path { PATH_MAX_HEAD_DIM as u32 } else { 256 };
    if args.head_dim == 0 || args.head_dim > widest || !args.head_dim.is_multiple_of(8) {
        bail!("--head-dim {} must be a multiple of 8 up to {widest}", args.head_dim);
    }
    let kv_heads = args.kv_heads.unwrap_or(args.heads);
    if kv_heads == 0 || !args.heads.is_multiple_of(kv_heads) {
        bail!("--heads {} must be a multiple of --kv-heads {kv_heads}", args.heads);
    }
    if args.window == Some(0) {
        bail!("--window 0 excludes every key; use 1 or more");
    }
    let (batch, seq) = (args.batch as usize, args.seq as usize);
    // Queries, keys, values and the output's gradient; log decays or reflections.
    let others = match args.wall {
        Some(_) => args.heads as usize,
        None => usize::from(args.path) * kv_heads as usize,
    };
    let values = (2 * (args.heads as usize + kv_heads as usize) + others) * args.head_dim as usize;
    check_host_memory(values * size_of::<f32>(), batch, seq)?;
    let device = args.device.open()?;
    let mut error = check(&device, args)?;
    let spec = args.spec(batch, seq);
    let operands = Operands::new(&device, &spec, batch * seq, args)?;
    device.reset_peak();
    let (mut rounds, mut rate) = (Rounds::default(), 0.0f64);
    let (mut pruned_fraction, mut outputs, mut peak, mut calls) = (0.0, 0, 0, 1);
    for round in 0..=args.repeat {
        rate = rate.max(matmul_rate(&device)?);
        device.reset_peak();
        let measured = forward_backward(&device, &operands, &spec, calls)?;
        peak = peak.max(device.memory().peak);
        outputs = measured.results.iter().map(|(_, x)| bytes(x)).sum();
        pruned_fraction = pruned(std::slice::from_ref(&measured.tiles))?;
        // The first round warms up: it fills the memory pool and determines the number of calls.
        if round > 0 {
            rounds.forward.push(measured.forward);
            rounds.backward.push(measured.backward);
        } else {
            calls = (LONG_ENOUGH / measured.forward).clamp(1.0, 20.0) as u32;
            error = error.max(check_sampled(&device, args, &operands, &measured)?);
        }
    }
    let (fwd, bwd) = (median(rounds.forward), median(rounds.backward));
    let heads = batch as f64 * spec.heads as f64;
    let causal = heads * attention_flops(seq, spec.window, spec.head_dim);
    let all = match (args.bidirectional, args.path) {
        (true, _) => 2.0 * causal,
        (_, true) => causal * (1.0 + spec.head_dim as f64 / (2 * PATH_BLOCK) as f64),
        _ => causal,
    };
    let work = all * (1.0 - pruned_fraction);
    let scratch = peak.saturating_sub(operands.bytes() + outputs);
    let fraction = |flops: f64, seconds: f64| flops / seconds / rate;
    let report = json!({
        "machine": machine(&device),
        "batch": batch, "heads": spec.heads, "kv_heads": spec.kv_heads, "seq": seq,
        "head_dim": spec.head_dim, "window": spec.window, "gates": !args.no_gates,
        "acp": args.acp, "bidirectional": args.bidirectional, "wall": args.wall,
        "path": args.path,
        "error_vs_oracle": error,
        "fwd_ms": fwd * 1e3, "bwd_ms": bwd * 1e3,
        "fwd_gflops": work / fwd / 1e9, "bwd_gflops": ATTENTION_BACKWARD * work / bwd / 1e9,
        "tokens_per_s": (batch * seq) as f64 / (fwd + bwd),
        "gemm_gflops": rate / 1e9,
        "fwd_floor_fraction": fraction(work, fwd),
        "bwd_floor_fraction": fraction(ATTENTION_BACKWARD * work, bwd),
        "floor_fraction": fraction((1.0 + ATTENTION_BACKWARD) * work, fwd + bwd),
        "pruned_fraction": pruned_fraction,
        "peak_bytes": peak, "scratch_bytes": scratch,
    });
    if args.json {
        output::print(&format!("{report:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let row = |name: &str, seconds: f64, flops: f64| {
        vec![
            name.to_string(),
            format!("{:.2} ms", seconds * 1e3),
            format!("{:.1} GFLOP/s", flops / seconds / 1e9),
            format!("{:.1}% of the roofline", 100.0 * fraction(flops, seconds)),
        ]
    };
    let rows = vec![
        row("forward", fwd, work),
        row("backward", bwd, ATTENTION_BACKWARD * work),
        row("both", fwd + bwd, (1.0 + ATTENTION_BACKWARD) * work),
    ];
    let text = format!(
        "attention {batch} x {} heads x {seq} x {}, {}\nlargest error against the oracle {error:.1e}\n{}\
         matrix product {:.1} GFLOP/s; blocks pruned {:.1}%; peak memory {}, beyond inputs and outputs {}\n",
        spec.heads,
        spec.head_dim,
        machine(&device),
        output::table(&rows),
        rate / 1e9,
        100.0 * pruned_fraction,
        output::bytes(peak as f64),
        output::bytes(scratch as f64),
    );
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    /// An error of a thousandth in any result is detected at the timed size.
    #[test]
    fn sampled_check_detects_errors_in_every_result() {
        let device = fox_cpu::device();
        for options in ["", "--window 40", "--bidirectional", "--no-gates", "--acp=-12"] {
            let sizes = "bench --batch 2 --heads 4 --kv-heads 2 --seq 150 --head-dim 8 ";
            let line = format!("{sizes}{options}");
            let args = Cli::try_parse_from(line.split_whitespace()).unwrap().args;
            let spec = args.spec(2, 150);
            let x = Operands::new(&device, &spec, 300, &args).unwrap();
            let mut measured = forward_backward(&device, &x, &spec, 1).unwrap();
            let error = check_sampled(&device, &args, &x, &measured).unwrap();
            assert!(error > 0.0 && error < 1e-4, "{options}: {error:e}");
            let mut noticed = |n: usize, change: &dyn Fn(usize, f32) -> f32| {
                let right = measured.results[n].1.clone();
                let values = right.to_f32().unwrap();
                let wrong: Vec<f32> =
                    values.iter().enumerate().map(|(at, x)| change(at, *x)).collect();
                measured.results[n].1 = device.from_f32(&wrong, right.shape()).unwrap();
                let said = check_sampled(&device, &args, &x, &measured).unwrap_err().to_string();
                assert!(said.starts_with(measured.results[n].0), "{options}: {said}");
                measured.results[n].1 = right;
            };
            for n in 0..5 - usize::from(args.no_gates) {
                noticed(n, &|_, x| x * 1.001);
            }
            // A carry between blocks that is lost once: only the offset is wrong.
            if !args.no_gates {
                noticed(4, &|at, x| if at / 4 % 150 < 64 { x + 0.1 } else { x });
            }
        }
    }
}
