//! `fox bench hybrid`: a training step of a hybrid against the sum of its layers.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_model::{ForwardOptions, Model, ModelConfig};
use fox_tensor::{Device, Gradients, WeightFormat};
use fox_train::{OptimizerRecipe, Updater, recipe};
use serde_json::json;

use super::train::{Batch, check_model};
use super::{machine, median, seconds};
use crate::device::DeviceArgs;
use crate::output;

/// A training step of a hybrid against the sum of its layers
///
/// For every mixer of the hybrid, a model of the same sizes with this mixer in all layers is also timed, alternating
/// with the hybrid. A mixer with n of N layers contributes n / N of its model's step to the sum, so that embeddings, loss
/// and optimizer are counted once.
#[derive(clap::Args)]
pub struct Args {
    /// Recipes with model.mixers
    #[arg(value_name = "RECIPE", default_values_t =
          ["fox-window-125m", "fox-gated-delta-net-125m", "mamba2-window-125m"].map(String::from))]
    recipes: Vec<String>,
    /// Override a key of the recipes, e.g. model.num_hidden_layers=4
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Tokens per sequence
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Sequences
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Size of the vocabulary
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    vocab: u32,
    /// Steps of each model to measure; the median counts
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A model in training and its step times.
struct TimedModel {
    name: String,
    model: Model,
    updater: Updater,
    times: Vec<f64>,
}

impl TimedModel {
    fn new(name: &str, config: &ModelConfig, device: &Device) -> Result<TimedModel> {
        let mut model = Model::init(config, 0, device)?;
        model.pack_weights(WeightFormat::F32)?;
        let updater = Updater::new(&OptimizerRecipe::default(), None, model.params(), device)?;
        Ok(TimedModel { name: name.to_string(), model, updater, times: Vec::new() })
    }

    /// Runs one step; its time is recorded unless it is a warm-up.
    fn step(&mut self, batch: &Batch, counts: bool) -> Result<()> {
        let mut gradients = Gradients::default();
        let options = ForwardOptions::default();
        let (_, _, forward, backward) = batch.gradients(&self.model, &options, &mut gradients)?;
        let (_, update) = seconds(|| {
            self.updater.step(self.model.params_mut(), gradients, 1e-4)?;
            Ok(self.model.device().backend().synchronize()?)
        })?;
        if counts {
            self.times.push(forward + backward + update);
        }
        Ok(())
    }
}

/// The mixers of a recipe, layer by layer.
fn layers(spec: &str, overrides: &[String]) -> Result<Vec<String>> {
    let model = recipe::load(spec, overrides)?.model;
    let names = model.get("mixers").and_then(|list| list.as_array());
    let words: Vec<String> =
        names.into_iter().flatten().filter_map(|w| Some(w.as_str()?.to_string())).collect();
    if words.is_empty() {
        bail!(
            "{spec} has no model.mixers, so it is not a hybrid; name a recipe such as fox-window-125m"
        );
    }
    let count = model.get("num_hidden_layers").and_then(|count| count.as_integer());
    let count = count.map_or(words.len(), |count| count.max(1) as usize);
    Ok(words.iter().cycle().take(count).cloned().collect())
}

/// The overrides of a model with these mixers.
fn with_mixers(overrides: &[String], mixers: &[&str]) -> Vec<String> {
    let names: Vec<String> = mixers.iter().map(|name| format!("{name:?}")).collect();
    let mut all = overrides.to_vec();
    all.push(format!("model.mixers=[{}]", names.join(", ")));
    all
}

/// The model of a recipe, with another vocabulary size.
fn config(spec: &str, overrides: &[String], vocab: usize) -> Result<ModelConfig> {
    let mut all = overrides.to_vec();
    all.push(format!("model.vocab_size={vocab}"));
    Ok(recipe::load(spec, &all)?.model_config(vocab)?)
}

/// Compares a small model that has every mixer once with the oracle; the largest relative error.
fn check(spec: &str, device: &Device, overrides: &[String], mixers: &[&str]) -> Result<f64> {
    let mut small = with_mixers(overrides, mixers);
    let sizes = [("hidden_size", 64), ("num_heads", 4), ("num_hidden_layers", mixers.len())];
    small.extend(sizes.map(|(key, value)| format!("model.{key}={value}")));
    let config = config(spec, &small, 100)?;
    check_model(device, &config, 80, &ForwardOptions::default())
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let (seq, rows, vocab) = (args.seq as usize, args.batch as usize, args.vocab as usize);
    let batch = Batch::new(&device, rows, seq, vocab)?;
    let mut report = Vec::new();
    let head = ["hybrid", "ms per step", "sum of its layers", "step / sum", "tokens/s"];
    let mut table = vec![head.map(String::from).to_vec()];
    let mut notes = String::new();
    for spec in &args.recipes {
        let layers = layers(spec, &args.overrides)?;
        let mut kinds: Vec<&str> = layers.iter().map(String::as_str).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let error = check(spec, &device, &args.overrides, &kinds)?;
        let whole = config(spec, &args.overrides, vocab)?;
        let mut models = vec![TimedModel::new(spec, &whole, &device)?];
        for kind in &kinds {
            let alone = config(spec, &with_mixers(&args.overrides, &[kind]), vocab)?;
            models.push(TimedModel::new(kind, &alone, &device)?);
        }
        let warm_up = 2;
        for round in 0..args.repeat + warm_up {
            for model in &mut models {
                model.step(&batch, round >= warm_up)?;
            }
        }
        let times: Vec<f64> = models.iter().map(|s| median(s.times.clone())).collect();
        let part = |(kind, time): (&&str, &f64)| {
            let count = layers.iter().filter(|layer| layer == kind).count();
            time * count as f64 / layers.len() as f64
        };
        let sum: f64 = kinds.iter().zip(&times[1..]).map(part).sum();
        let tokens = (rows * seq) as f64 / times[0];
        table.push(vec![
            spec.clone(),
            format!("{:.2}", times[0] * 1e3),
            format!("{:.2}", sum * 1e3),
            format!("{:.3}", times[0] / sum),
            output::grouped(tokens.round() as u64),
        ]);
        notes += &format!("{spec}: largest error against the oracle {error:.1e}; alone");
        for (model, time) in models[1..].iter().zip(&times[1..]) {
            notes += &format!(" {} {:.2} ms,", model.name, time * 1e3);
        }
        notes.pop();
        notes += &format!(" in all {} layers\n", layers.len());
        let alone: serde_json::Map<String, serde_json::Value> =
            kinds.iter().zip(&times[1..]).map(|(k, t)| (k.to_string(), json!(t * 1e3))).collect();
        report.push(json!({
            "recipe": spec, "layers": layers, "error_vs_oracle": error,
            "ms_per_step": times[0] * 1e3, "sum_ms": sum * 1e3, "ratio": times[0] / sum,
            "tokens_per_s": tokens, "alone_ms": alone,
        }));
    }
    if args.json {
        let all =
            json!({ "machine": machine(&device), "batch": rows, "seq": seq, "hybrids": report });
        output::print(&format!("{all:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&format!(
        "training steps, {rows} x {seq} tokens, {}\n{notes}{}",
        machine(&device),
        output::table(&table)
    ))?;
    Ok(ExitCode::SUCCESS)
}
