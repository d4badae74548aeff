//! `fox bench train`: whole training steps of a model of any size.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_base::difference::{largest, relative_error};
use fox_model::{Architecture, ForwardOptions, Model, ModelConfig, Pruning};
use fox_tensor::cases::{self, Rng};
use fox_tensor::speed::matmul_rate;
use fox_tensor::{
    DType, Device, Gradients, OpTime, Segments, Tape, Tensor, WeightFormat, tile_counts,
};
use fox_train::{OptimizerRecipe, Updater};
use serde_json::json;

use super::{architectures, check_host_memory, machine, median, seconds};
use crate::device::DeviceArgs;
use crate::output;
use crate::tolerance::log_tolerance;

/// A training step: forward, backward, clipping and the optimizer
///
/// The roofline is 6 FLOPs per matmul weight and token, plus causal attention forward and backward (without pruned
/// blocks) or the products of a chunkwise scan, at the rate of the fastest square matrix product in this run.
#[derive(clap::Args)]
pub struct Args {
    /// The model
    #[arg(long, default_value = "fox-llama", value_parser = architectures())]
    arch: Architecture,
    /// Width of the model
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    d_model: u32,
    /// Blocks
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: u32,
    /// Heads
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    heads: u32,
    /// Width of the MLP; the model's default without it
    #[arg(long)]
    mlp: Option<u32>,
    /// Tokens per sequence
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Sequences
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Size of the vocabulary
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    vocab: u32,
    /// Prune attention blocks whose softmax weight is provably below e^LN, e.g. -10
    #[arg(long, value_name = "LN", num_args = 0..=1, default_missing_value = "-10",
          allow_negative_numbers = true, value_parser = log_tolerance)]
    acp: Option<f32>,
    /// Recompute the activations of each block in the backward pass
    #[arg(long)]
    recompute: bool,
    /// The optimizer: adamw or muon
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    optimizer: String,
    /// Steps to measure; the median counts
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Also print the time of a step by op (GPU)
    #[arg(long)]
    profile: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    fn config(&self) -> ModelConfig {
        let sizes = (self.d_model as usize, self.layers as usize, self.heads as usize);
        let mut config =
            self.arch.config(sizes.0, sizes.1, sizes.2).with_vocab(self.vocab as usize);
        if let Some(width) = self.mlp {
            config.mlp.intermediate_size = Some(width as usize);
        }
        config
    }

    fn options(&self) -> ForwardOptions {
        ForwardOptions {
            pruning: self.acp.map_or(Pruning::Off, Pruning::Tolerance),
            recompute: self.recompute,
            ..ForwardOptions::default()
        }
    }
}

/// A batch of random tokens with next-token labels.
pub(super) struct Batch {
    tokens: Tensor,
    labels: Tensor,
    weights: Tensor,
    segments: Segments,
}

impl Batch {
    pub(super) fn new(device: &Device, batch: usize, seq: usize, vocab: usize) -> Result<Self> {
        // A token, its label and its weight, and the list they are drawn into.
        check_host_memory(16, batch, seq)?;
        let (rows, mut rng) = (batch * seq, Rng::new(7));
        let ids: Vec<i32> = (0..=rows).map(|_| rng.between(0, vocab - 1) as i32).collect();
        Ok(Batch {
            tokens: device.from_i32(&ids[..rows], [rows])?,
            labels: device.from_i32(&ids[1..], [rows])?,
            weights: device.full([rows], 1.0 / rows as f32)?,
            segments: Segments::uniform(batch, seq),
        })
    }

    /// Losses `[R]` and tiles visited; gradients are added to `gradients`.
    pub(super) fn gradients(
        &self,
        model: &Model,
        options: &ForwardOptions,
        gradients: &mut Gradients,
    ) -> Result<(Tensor, Vec<Tensor>, f64, f64)> {
        let mut tape = Tape::recording(model.device());
        let backend = model.device().backend();
        let (loss, forward) = seconds(|| {
            let loss = model.loss(
                &mut tape,
                &self.tokens,
                &self.labels,
                &self.weights,
                &self.segments,
                options,
            )?;
            backend.synchronize()?;
            Ok(loss)
        })?;
        let ((), backward) = seconds(|| {
            tape.backward(gradients)?;
            Ok(backend.synchronize()?)
        })?;
        Ok((loss.per_token, loss.tiles, forward, backward))
    }
}

/// The largest relative error of loss and gradients of a short batch against the oracle.
fn check(device: &Device, args: &Args) -> Result<f64> {
    // A sequence across a block border, few layers, few heads and tokens: the oracle is slow.
    let (seq, layers) = (args.seq.min(80) as usize, args.layers.min(2) as usize);
    let heads = args.heads.min(4);
    let width = (args.d_model / args.heads * heads) as usize;
    let mut config =
        args.arch.config(width, layers, heads as usize).with_vocab(args.vocab.min(1000) as usize);
    config.mlp.intermediate_size = args.mlp.map(|mlp| mlp as usize * width / args.d_model as usize);
    check_model(device, &config, seq, &args.options())
}

/// A sequence of `seq` tokens through a small model, against the oracle.
pub(super) fn check_model(
    device: &Device,
    config: &ModelConfig,
    seq: usize,
    options: &ForwardOptions,
) -> Result<f64> {
    let run = |device: &Device| -> Result<Vec<Vec<f64>>> {
        let model = Model::init(config, 0, device)?;
        let batch = Batch::new(device, 1, seq, config.vocab_size)?;
        let mut gradients = Gradients::default();
        let (loss, ..) = batch.gradients(&model, options, &mut gradients)?;
        let mut values = vec![loss.to_f64()?];
        for (_, gradient) in gradients.iter() {
            values.push(gradient.to_f64()?);
        }
        Ok(values)
    };
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (got, want) = (run(device)?, run(&Device::naive())?);
    let largest_norm = want[1..].iter().map(|x| norm(x)).fold(0.0, f64::max);
    let gradients = got[1..].iter().zip(&want[1..]);
    let errors = gradients.map(|(got, want)| relative_error(got, want, 1e-3 * largest_norm));
    let worst = largest(errors.chain([cases::relative_error(&got[0], &want[0])]));
    let tolerance = match device.backend().caps().activation_type {
        DType::F32 => 1e-4,
        _ => 5e-2,
    };
    if worst > tolerance {
        bail!(
            "a result differs from the oracle by {worst:.1e}; results must be correct before they are timed"
        );
    }
    Ok(worst)
}

/// The fraction of pruned tiles over all layers.
pub(super) fn pruned(layers: &[Tensor]) -> Result<f64> {
    let (mut visited, mut total) = (0.0, 0.0);
    for layer in layers {
        for pair in tile_counts(layer)? {
            visited += pair[0] as f64;
            total += pair[1] as f64;
        }
    }
    Ok(if total > 0.0 { 1.0 - visited / total } else { 0.0 })
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let config = args.config();
    config.validate("the flags")?;
    let device = args.device.open()?;
    let error = check(&device, args)?;
    let (batch_size, seq) = (args.batch as usize, args.seq as usize);
    let mut model = Model::init(&config, 0, &device)?;
    model.pack_weights(WeightFormat::F32)?;
    let settings = OptimizerRecipe::named(&args.optimizer)?;
    let mut updater = Updater::new(&settings, None, model.params(), &device)?;
    let batch = Batch::new(&device, batch_size, seq, config.vocab_size)?;
    let (mut steps, mut parts) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
    let (mut rate, mut last_loss, mut first_loss) = (0.0f64, 0.0, None);
    let (mut pruned_fraction, mut reserved) = (0.0, 0);
    device.reset_peak();
    let warm_up = 2;
    for round in 0..args.repeat + warm_up {
        rate = rate.max(matmul_rate(&device)?);
        if round == warm_up {
            reserved = device.memory().reserved;
        }
        let mut gradients = Gradients::default();
        let (loss, tiles, forward, backward) =
            batch.gradients(&model, &args.options(), &mut gradients)?;
        let (_, update) = seconds(|| {
            updater.step(model.params_mut(), gradients, settings.peak_lr)?;
            Ok(device.backend().synchronize()?)
        })?;
        last_loss = mean(&loss.to_f64()?);
        first_loss.get_or_insert(last_loss);
        pruned_fraction = pruned(&tiles)?;
        if round >= warm_up {
            steps.push(forward + backward + update);
            for (part, value) in parts.iter_mut().zip([forward, backward, update]) {
                part.push(value);
            }
        }
    }
    let memory = device.memory();
    let profile = match args.profile {
        true => profile(&mut model, &mut updater, settings.peak_lr, &batch, args)?,
        false => Vec::new(),
    };
    let tokens = (batch_size * seq) as f64;
    let plain = config.train_flops_per_token(seq);
    let attention = plain - config.train_flops_per_token(0);
    let work = plain - attention * pruned_fraction;
    let step = median(steps);
    let [forward, backward, update] = parts.map(median);
    let fraction = tokens * work / rate / step;
    let report = json!({
        "machine": machine(&device),
        "parameters": config.param_specs().iter().map(|spec| spec.count()).sum::<usize>(),
        "batch": batch_size, "seq": seq, "optimizer": args.optimizer, "acp": args.acp, "recompute": args.recompute,
        "error_vs_oracle": error, "first_loss": first_loss, "last_loss": last_loss,
        "fwd_ms": forward * 1e3, "bwd_ms": backward * 1e3, "update_ms": update * 1e3,
        "ms_per_step": step * 1e3, "tokens_per_s": tokens / step,
        "gflops": tokens * work / step / 1e9, "gemm_gflops": rate / 1e9,
        "floor_fraction": fraction, "pruned_fraction": pruned_fraction,
        "profile": profile.iter().map(|t| json!({ "op": t.op, "calls": t.calls, "ms": t.seconds * 1e3 })).collect::<Vec<_>>(),
        "peak_bytes": memory.peak, "reserved_bytes": memory.reserved, "new_bytes_in_steady_steps": memory.reserved - reserved,
    });
    if args.json {
        output::print(&format!("{report:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = format!(
        "training step, {batch_size} x {seq} tokens, {}\n\
         worst error against the oracle {error:.1e}; loss {:.4} -> {last_loss:.4}\n\
         {:.1} ms per step (forward {:.1}, backward {:.1}, update {:.1}): {:.0} tokens/s\n\
         {:.1} GFLOP/s, {:.1}% of the roofline (matrix product {:.1} GFLOP/s); blocks pruned {:.1}%\n\
         peak memory {}, {} allocated from the system; new memory in steady steps {}\n",
        machine(&device),
        first_loss.unwrap_or(f64::NAN),
        step * 1e3,
        forward * 1e3,
        backward * 1e3,
        update * 1e3,
        tokens / step,
        tokens * work / step / 1e9,
        100.0 * fraction,
        rate / 1e9,
        100.0 * pruned_fraction,
        output::bytes(memory.peak as f64),
        output::bytes(memory.reserved as f64),
        output::bytes((memory.reserved - reserved) as f64),
    );
    output::print(&text)?;
    if args.profile {
        output::print(&profile_table(&profile))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Profiles one more step: the time of every op on the device.
fn profile(
    model: &mut Model,
    updater: &mut Updater,
    lr: f64,
    batch: &Batch,
    args: &Args,
) -> Result<Vec<OpTime>> {
    let device = model.device().clone();
    device.backend().profile(true);
    let mut gradients = Gradients::default();
    batch.gradients(model, &args.options(), &mut gradients)?;
    updater.step(model.params_mut(), gradients, lr)?;
    device.backend().profile(false);
    Ok(device.backend().take_profile()?)
}

fn profile_table(times: &[OpTime]) -> String {
    let all: f64 = times.iter().map(|t| t.seconds).sum();
    let row = |op: &str, calls: usize, seconds: f64| {
        let percent = format!("{:.1}%", 100.0 * seconds / all);
        vec![op.to_string(), calls.to_string(), format!("{:.2} ms", seconds * 1e3), percent]
    };
    let mut rows: Vec<_> = times.iter().map(|t| row(t.op, t.calls, t.seconds)).collect();
    rows.push(row("all", times.iter().map(|t| t.calls).sum(), all));
    output::table(&rows)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
