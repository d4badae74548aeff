//! `fox bench compare`: training throughput of every family relative to FoX.

use std::process::ExitCode;

use anyhow::Result;
use fox_model::{ForwardOptions, Model, ModelConfig, Pruning};
use fox_tensor::speed::matmul_rate;
use fox_tensor::{Device, Gradients};
use fox_train::{OptimizerRecipe, Updater};
use serde_json::json;

use super::train::{Batch, pruned};
use super::{machine, median, seconds};
use crate::device::DeviceArgs;
use crate::output;

/// Training steps of FoX and of every baseline, and their speed relative to FoX
///
/// All models have the same width and number of blocks (Mamba-2, which has no MLP, twice as many).
/// Weights are fresh, so FoX forgets fast and pruning skips more than it does in a trained model.
#[derive(clap::Args)]
pub struct Args {
    /// Width of the models
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=1 << 16))]
    d_model: u32,
    /// Blocks
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: u32,
    /// Width of an attention head; heads of the recurrent models are twice as wide
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=256))]
    head_dim: u32,
    /// Tokens per sequence
    #[arg(long, default_value_t = 16384, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Sequences
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Size of the vocabulary
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    vocab: u32,
    /// Steps to measure of each model; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The models, FoX without and with pruning first.
    fn models(&self) -> Vec<(&'static str, ModelConfig, Pruning)> {
        let (width, layers) = (self.d_model as usize, self.layers as usize);
        let heads = (width / self.head_dim as usize).max(1);
        let wide = (heads / 2).max(1);
        let (off, acp) = (Pruning::Off, Pruning::Tolerance(-10.0));
        type Build = fn(usize, usize, usize) -> ModelConfig;
        let list: [(_, Build, _, _, _); 17] = [
            ("FoX (Pro)", ModelConfig::fox_pro, layers, heads, off),
            ("FoX (Pro), pruned", ModelConfig::fox_pro, layers, heads, acp),
            ("FoX (LLaMA)", ModelConfig::fox_llama, layers, heads, off),
            ("FoX (LLaMA), pruned", ModelConfig::fox_llama, layers, heads, acp),
            ("Transformer (LLaMA)", ModelConfig::transformer_llama, layers, heads, off),
            ("Stick-breaking", ModelConfig::stick_breaking, layers, heads, off),
            ("Stick-breaking, pruned", ModelConfig::stick_breaking, layers, heads, acp),
            (
                "Stick-breaking with gates, pruned",
                ModelConfig::stick_breaking_fox,
                layers,
                heads,
                acp,
            ),
            ("PaTH", ModelConfig::path, layers, heads, off),
            ("PaTH-FoX", ModelConfig::path_fox, layers, heads, off),
            ("PaTH-FoX, pruned", ModelConfig::path_fox, layers, heads, acp),
            ("Wall", ModelConfig::wall, layers, heads, off),
            ("Wall with gates", ModelConfig::wall_scalar, layers, heads, off),
            ("DeltaNet", ModelConfig::delta_net, layers, wide, off),
            ("Gated DeltaNet", ModelConfig::gated_delta_net, layers, wide, off),
            ("HGRN2", ModelConfig::hgrn2, layers, wide, off),
            ("Mamba-2", ModelConfig::mamba2, 2 * layers, 2 * heads, off),
        ];
        let config = |(name, build, layers, heads, pruning): (_, Build, _, _, _)| {
            let config = build(width, layers, heads).with_vocab(self.vocab as usize);
            (name, config, pruning)
        };
        list.into_iter().map(config).collect()
    }
}

/// The measurements of one model.
struct Measured {
    name: &'static str,
    parameters: usize,
    tokens_per_s: f64,
    pruned: f64,
    /// Fraction of the roofline: the matrix products at the rate measured between the steps.
    fraction: f64,
}

fn measure(
    device: &Device,
    args: &Args,
    (name, config, pruning): (&'static str, ModelConfig, Pruning),
) -> Result<Measured> {
    config.validate("the flags")?;
    let (batch_size, seq) = (args.batch as usize, args.seq as usize);
    let mut model = Model::init(&config, 0, device)?;
    let settings = OptimizerRecipe::default();
    let mut updater = Updater::new(&settings, None, model.params(), device)?;
    let batch = Batch::new(device, batch_size, seq, config.vocab_size)?;
    let options = ForwardOptions { pruning, ..ForwardOptions::default() };
    let (mut steps, mut rate, mut share) = (Vec::new(), 0.0f64, 0.0);
    for round in 0..=args.repeat {
        rate = rate.max(matmul_rate(device)?);
        let mut gradients = Gradients::default();
        let (_, tiles, forward, backward) = batch.gradients(&model, &options, &mut gradients)?;
        let (_, update) =
            seconds(|| Ok(updater.step(model.params_mut(), gradients, settings.peak_lr)?))?;
        share = pruned(&tiles)?;
        // The first step allocates the memory.
        if round > 0 {
            steps.push(forward + backward + update);
        }
    }
    let (step, tokens) = (median(steps), (batch_size * seq) as f64);
    let plain = config.train_flops_per_token(seq);
    let mixing = plain - config.train_flops_per_token(0);
    Ok(Measured {
        name,
        parameters: model.params().count(),
        tokens_per_s: tokens / step,
        pruned: share,
        fraction: tokens * (plain - mixing * share) / rate / step,
    })
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let mut all = Vec::new();
    for model in args.models() {
        all.push(measure(&device, args, model)?);
    }
    let relative = |m: &Measured, to: usize| m.tokens_per_s / all[to].tokens_per_s;
    if args.json {
        let models: Vec<_> = all
            .iter()
            .map(|m| {
                json!({
                    "name": m.name, "parameters": m.parameters, "tokens_per_s": m.tokens_per_s,
                    "to_fox": relative(m, 0), "to_fox_pruned": relative(m, 1),
                    "floor_fraction": m.fraction, "pruned_fraction": m.pruned,
                })
            })
            .collect();
        let report = json!({
            "machine": machine(&device), "batch": args.batch, "seq": args.seq, "models": models,
        });
        output::print(&format!("{report:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["", "parameters", "tokens/s", "x FoX", "x FoX pruned", "of roofline", "pruned"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(all.iter().map(|m| {
        vec![
            m.name.to_string(),
            output::grouped(m.parameters),
            format!("{:.0}", m.tokens_per_s),
            format!("{:.2}", relative(m, 0)),
            format!("{:.2}", relative(m, 1)),
            format!("{:.0}%", 100.0 * m.fraction),
            format!("{:.0}%", 100.0 * m.pruned),
        ]
    }));
    let (batch, seq) = (args.batch, args.seq);
    let title = format!("training steps, {batch} x {seq} tokens, {}\n", machine(&device));
    output::print(&(title + &output::table(&rows)))?;
    Ok(ExitCode::SUCCESS)
}
