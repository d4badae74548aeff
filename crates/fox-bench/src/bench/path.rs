//! `fox bench path`: forward and backward of one layer's PaTH attention.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_model::{ATTENTION_BACKWARD, attention_flops};
use fox_tensor::cases::{Rng, relative_error};
use fox_tensor::speed::matmul_rate;
use fox_tensor::{
    Acp, AttentionSpec, DType, Device, LogitBound, PATH_BLOCK, PathInputs, Segments, Tensor,
};
use serde_json::json;

use super::train::pruned;
use super::{check_host_memory, machine, median, normals, seconds};
use crate::device::DeviceArgs;
use crate::output;
use crate::tolerance::log_tolerance;

/// PaTH attention, forward and backward
///
/// Gates decay with times log-spaced from 8 to 100,000 tokens over the heads. FLOPs are those of causal attention plus a
/// product with a d x d matrix for every query and 64 keys, 2.5 times that backward; with pruning, the fraction of
/// visited blocks. The roofline is that work at the rate of the fastest square matrix product in this run.
///
/// Results are compared with the oracle at a short length.
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
    /// No forget gates
    #[arg(long)]
    no_gates: bool,
    /// Measurements; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Tokens of the comparison with the oracle: several blocks, the last one not full.
const CHECKED: u32 = 200;

impl Args {
    fn spec(&self, batch: usize, seq: usize) -> AttentionSpec {
        AttentionSpec {
            kv_heads: self.kv_heads.unwrap_or(self.heads) as usize,
            acp: match self.acp {
                None => Acp::Off,
                Some(log_tolerance) => Acp::On { log_tolerance, bound: LogitBound::Norms },
            },
            ..AttentionSpec::causal(
                self.heads as usize,
                self.head_dim as usize,
                Segments::uniform(batch, seq),
            )
        }
    }
}

/// The operands, on a device.
struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    log_gates: Option<Tensor>,
    d_out: Tensor,
}

impl Operands {
    fn new(device: &Device, spec: &AttentionSpec, rows: usize, gates: bool) -> Result<Self> {
        let mut rng = Rng::new(1);
        let (width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let mut normal = |width: usize| -> Result<Tensor> {
            let values = normals(&mut rng, rows * width);
            Ok(device.from_f32(&values, [rows, width])?.to_activations()?)
        };
        let (q, k, v, d_out) =
            (normal(width)?, normal(kv_width)?, normal(kv_width)?, normal(width)?);
        let mut u = normals(&mut rng, rows * kv_width);
        for u in u.chunks_mut(spec.head_dim) {
            // Squared lengths between 0 and 2.
            let norm = u.iter().map(|x| x * x).sum::<f32>();
            let factor = (2.0 * rng.uniform() as f32 / norm).sqrt();
            u.iter_mut().for_each(|x| *x *= factor);
        }
        let decay = |h: usize| {
            let share = h as f64 / (spec.heads - 1).max(1) as f64;
            -1.0 / (8f64.ln() + (1e5f64.ln() - 8f64.ln()) * share).exp()
        };
        let decays: Vec<f32> =
            (0..rows * spec.heads).map(|n| decay(n % spec.heads) as f32).collect();
        let gates = gates.then(|| device.from_f32(&decays, [rows, spec.heads]));
        let u = device.from_f32(&u, [rows, kv_width])?;
        Ok(Operands { q, k, v, u, log_gates: gates.transpose()?, d_out })
    }

    fn inputs(&self) -> PathInputs<'_> {
        let log_gates = self.log_gates.as_ref();
        PathInputs { q: &self.q, k: &self.k, v: &self.v, u: &self.u, log_gates }
    }
}

/// Output and gradients by name, tile counts, and the seconds of a forward and of a backward pass.
struct Measured {
    results: Vec<(&'static str, Tensor)>,
    tiles: Tensor,
    forward: f64,
    backward: f64,
}

fn forward_backward(device: &Device, x: &Operands, spec: &AttentionSpec) -> Result<Measured> {
    let backend = device.backend();
    let (out, forward) = seconds(|| {
        let out = backend.path_attention_fwd(&x.inputs(), spec)?;
        backend.synchronize()?;
        Ok(out)
    })?;
    let (grads, backward) = seconds(|| {
        let grads = backend.path_attention_bwd(&x.d_out, &x.inputs(), &out, spec)?;
        backend.synchronize()?;
        Ok(grads)
    })?;
    let mut results =
        vec![("o", out.o), ("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv), ("du", grads.du)];
    results.extend(grads.dlog_gates.map(|d| ("dlog_gates", d)));
    Ok(Measured { results, tiles: out.tiles, forward, backward })
}

/// The largest relative error of a short sequence against the oracle.
fn check(device: &Device, args: &Args) -> Result<f64> {
    let rows = args.seq.min(CHECKED) as usize;
    let spec = args.spec(1, rows);
    let run = |device: &Device| -> Result<Measured> {
        let x = Operands::new(device, &spec, rows, !args.no_gates)?;
        forward_backward(device, &x, &spec)
    };
    let allowed = match device.backend().caps().activation_type {
        DType::F32 => 1e-4,
        _ => 3e-2,
    };
    let mut worst = 0.0f64;
    for ((name, got), (_, want)) in run(device)?.results.iter().zip(run(&Device::naive())?.results)
    {
        let error = relative_error(&got.to_f64()?, &want.to_f64()?);
        if error.is_nan() || error > allowed {
            bail!(
                "{name} differs from the oracle by {error:.1e}; results must be correct before they are timed"
            );
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let d = args.head_dim as usize;
    if d == 0 || d > fox_tensor::PATH_MAX_HEAD_DIM || !d.is_multiple_of(8) {
        bail!("--head-dim {d} must be a multiple of 8 up to {}", fox_tensor::PATH_MAX_HEAD_DIM);
    }
    let kv_heads = args.kv_heads.unwrap_or(args.heads);
    if kv_heads == 0 || !args.heads.is_multiple_of(kv_heads) {
        bail!("--heads {} must be a multiple of --kv-heads {kv_heads}", args.heads);
    }
    let (batch, seq) = (args.batch as usize, args.seq as usize);
    let values = (2 * args.heads as usize + 3 * kv_heads as usize) * d;
    check_host_memory(values * size_of::<f32>(), batch, seq)?;
    let device = args.device.open()?;
    let error = check(&device, args)?;
    let spec = args.spec(batch, seq);
    let operands = Operands::new(&device, &spec, batch * seq, !args.no_gates)?;
    let (mut forward, mut backward, mut rate) = (Vec::new(), Vec::new(), 0.0f64);
    let (mut pruned_fraction, mut peak) = (0.0, 0);
    for round in 0..=args.repeat {
        rate = rate.max(matmul_rate(&device)?);
        device.reset_peak();
        let measured = forward_backward(&device, &operands, &spec)?;
        peak = peak.max(device.memory().peak);
        pruned_fraction = pruned(std::slice::from_ref(&measured.tiles))?;
        // The first round warms up: it compiles kernels and fills the memory pool.
        if round > 0 {
            forward.push(measured.forward);
            backward.push(measured.backward);
        }
    }
    let (fwd, bwd) = (median(forward), median(backward));
    let heads = batch as f64 * spec.heads as f64;
    let walk = 1.0 + d as f64 / (2 * PATH_BLOCK) as f64;
    let work = heads * attention_flops(seq, None, d) * walk * (1.0 - pruned_fraction);
    let fraction = |flops: f64, seconds: f64| flops / seconds / rate;
    let both = (1.0 + ATTENTION_BACKWARD) * work;
    if args.json {
        let report = json!({
            "machine": machine(&device),
            "batch": batch, "heads": spec.heads, "kv_heads": spec.kv_heads, "seq": seq,
            "head_dim": d, "gates": !args.no_gates, "acp": args.acp,
            "error_vs_oracle": error,
            "fwd_ms": fwd * 1e3, "bwd_ms": bwd * 1e3,
            "gemm_gflops": rate / 1e9,
            "fwd_floor_fraction": fraction(work, fwd),
            "bwd_floor_fraction": fraction(ATTENTION_BACKWARD * work, bwd),
            "floor_fraction": fraction(both, fwd + bwd),
            "pruned_fraction": pruned_fraction,
            "peak_bytes": peak,
        });
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
    output::print(&format!(
        "PaTH attention {batch} x {} heads x {seq} x {d}, {}\nlargest error against the oracle {error:.1e}\n{}\
         matrix product {:.1} GFLOP/s; blocks pruned {:.1}%; peak memory {}\n",
        spec.heads,
        machine(&device),
        output::table(&[
            row("forward", fwd, work),
            row("backward", bwd, ATTENTION_BACKWARD * work),
            row("both", fwd + bwd, both),
        ]),
        rate / 1e9,
        100.0 * pruned_fraction,
        output::bytes(peak as f64),
    ))?;
    Ok(ExitCode::SUCCESS)
}
