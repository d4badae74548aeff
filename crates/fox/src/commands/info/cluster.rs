//! `fox info RECIPE --gpus N`: what a step of a run would take on many devices.

use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_model::ModelConfig;
use fox_train::cluster::{Cluster, ClusterPlan, batch_flops};
use fox_train::data::RunData;
use fox_train::recipe::{ParallelRecipe, Shard};
use fox_train::{Recipe, recipe};
use serde_json::json;

use crate::output;

/// FLOP/s of a training step on one H200: FoX (Pro) 760M in bf16 at 16,384 tokens without pruning, 57,105 tokens/s
/// (`fox bench train`, bench/results).
const H200_RATE: f64 = 509e12;

/// Devices, what connects them, and how fast they are.
#[derive(clap::Args)]
pub struct ClusterArgs {
    /// Devices in a node: MODEL is then a recipe, and the memory, bytes and time of a training step are printed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    gpus: Option<u16>,
    /// Nodes
    #[arg(long, value_name = "N", default_value_t = 1, requires = "gpus", value_parser = clap::value_parser!(u16).range(1..))]
    nodes: u16,
    /// Bytes per second between the devices of a node, per device and direction
    #[arg(long, value_name = "RATE", default_value = "450GB/s", requires = "gpus", value_parser = rate)]
    link: f64,
    /// Bytes per second between nodes, per device and direction
    #[arg(long, value_name = "RATE", default_value = "50GB/s", requires = "gpus", value_parser = rate)]
    network: f64,
    /// FLOP/s that a training step reaches on one device, e.g. 509T, which is an H200 in bf16
    #[arg(long, value_name = "RATE", requires = "gpus", conflicts_with = "step", value_parser = quantity)]
    flops: Option<f64>,
    /// Instead: seconds of a step of this recipe on one device
    #[arg(long, value_name = "SECONDS", requires = "gpus")]
    step: Option<f64>,
    /// Share of the earlier keys that parts of a sequence fetch (`exchanged` in metrics.jsonl)
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, requires = "gpus")]
    fetched: f64,
    /// Share of the attention that pruning leaves (1 - `pruned` in metrics.jsonl)
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, requires = "gpus")]
    visited: f64,
    /// Bytes of memory of a device
    #[arg(long, value_name = "BYTES", default_value = "141GB", requires = "gpus", value_parser = rate)]
    memory: f64,
    /// Activations in f32, as on the CPU
    #[arg(long, requires = "gpus")]
    f32: bool,
    /// Change a key of the recipe, e.g. data.sequence_length=1048576
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "gpus")]
    overrides: Vec<String>,
}

impl ClusterArgs {
    /// Whether a cluster is asked for.
    pub fn is_given(&self) -> bool {
        self.gpus.is_some()
    }
}

/// Prints all ways to divide a recipe among the devices.
pub fn run(name: &str, args: &ClusterArgs, as_json: bool) -> Result<ExitCode> {
    let recipe = recipe::load(name, &args.overrides)?;
    let config = model(&recipe)?;
    for (name, share) in [("--fetched", args.fetched), ("--visited", args.visited)] {
        if !(0.0..=1.0).contains(&share) {
            bail!("{name} is {share}; use a fraction between 0 and 1");
        }
    }
    let rate = match (args.flops, args.step) {
        (Some(rate), _) => rate,
        (None, Some(seconds)) if seconds > 0.0 => {
            batch_flops(&recipe, &config, args.visited) / seconds
        }
        (None, Some(seconds)) => bail!("--step is {seconds}; give the seconds of a measured step"),
        (None, None) => H200_RATE,
    };
    let cluster = Cluster {
        gpus: usize::from(args.gpus.unwrap_or(1)),
        nodes: usize::from(args.nodes),
        link: args.link,
        network: args.network,
        rate,
        fetched: args.fetched,
        visited: args.visited,
        narrow: !args.f32,
    };
    let plans = ClusterPlan::all(&recipe, &config, &cluster)?;
    if plans.is_empty() {
        bail!(
            "{name}: no way to divide training.batch={} x data.sequence_length={} among {} ranks; set training.batch to a multiple or a divisor of their number",
            recipe.training.batch,
            recipe.data.sequence_length,
            cluster.ranks()
        );
    }
    let fits = |plan: &&ClusterPlan| plan.memory <= args.memory;
    let best = plans.iter().filter(fits).min_by(|a, b| a.overlapped().total_cmp(&b.overlapped()));
    let shard = match recipe.parallel.shard {
        Shard::Optimizer => Shard::Weights,
        Shard::Weights => Shard::Optimizer,
    };
    let parallel = ParallelRecipe { shard, ..recipe.parallel };
    let others = ClusterPlan::all(&Recipe { parallel, ..recipe.clone() }, &config, &cluster)?;
    let other = others.iter().filter(fits).min_by(|a, b| a.overlapped().total_cmp(&b.overlapped()));
    // Not worth a word below a percent. Gathers are assumed to be hidden entirely, so shards are advised for memory only.
    let other = other.filter(|other| {
        best.is_none_or(|best| {
            other.shard == Shard::Optimizer && 1.01 * other.overlapped() < best.overlapped()
        })
    });
    let text = match as_json {
        true => json_text(&plans, best),
        false => text(&recipe, &config, &cluster, &plans, (best, other), args.memory),
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// One line about the best plan with the other sharding, where it is worth a line: it alone fits, or it is faster.
fn comparison(other: &ClusterPlan, best: Option<&ClusterPlan>) -> String {
    let name = match other.shard {
        Shard::Optimizer => "optimizer",
        Shard::Weights => "weights",
    };
    let (memory, step) = (output::bytes(other.memory), seconds(other.overlapped()));
    match best {
        None => format!(
            "parallel.shard=\"{name}\" fits with parallel.context={}: {memory}, {step} a step",
            other.context
        ),
        Some(best) => format!(
            "parallel.shard=\"{name}\" is {:.0}% faster and fits too: {memory}, {step} a step",
            100.0 * (best.overlapped() / other.overlapped() - 1.0)
        ),
    }
}

/// The model of a recipe; its vocabulary may be that of the data.
pub fn model(recipe: &Recipe) -> Result<ModelConfig> {
    let vocabulary = match recipe.model.contains_key("vocab_size") {
        true => 0,
        false => RunData::open(recipe)?.train.vocab_size(),
    };
    Ok(recipe.model_config(vocabulary)?)
}

fn text(
    recipe: &Recipe,
    config: &ModelConfig,
    cluster: &Cluster,
    plans: &[ClusterPlan],
    (best, other): (Option<&ClusterPlan>, Option<&ClusterPlan>),
    memory: f64,
) -> String {
    let parameters: usize = config.param_specs().iter().map(|spec| spec.count()).sum();
    let mut rows = vec![
        [
            "context",
            "data",
            "memory",
            "gradients",
            "weights",
            "keys",
            "compute",
            "step",
            "overlapped",
            "tokens/s",
            "whole run",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let is_sharded = plans.iter().any(|plan| plan.weight_bytes > 0.0);
    let tokens = recipe.tokens_per_step() as f64;
    for plan in plans {
        let steps = recipe.training.tokens as f64 / tokens;
        rows.push(vec![
            plan.context.to_string(),
            plan.data.to_string(),
            output::bytes(plan.memory),
            output::bytes(plan.gradient_bytes),
            output::bytes(plan.weight_bytes),
            output::bytes(plan.key_bytes),
            seconds(plan.compute),
            seconds(plan.step()),
            seconds(plan.overlapped()),
            output::grouped((tokens / plan.overlapped()) as u64),
            seconds(plan.overlapped() * steps),
        ]);
    }
    if !is_sharded {
        // All of them are 0.
        rows.iter_mut().for_each(|row| drop(row.remove(4)));
    }
    let end = match best {
        Some(plan) => format!(
            "best: parallel.context={}, {} x {} ranks",
            plan.context, plan.data, plan.context
        ),
        None => {
            let mut less = Vec::new();
            if recipe.micro_batch() > 1 {
                less.push("training.micro_batch=1");
            }
            if !recipe.training.recompute {
                less.push("training.recompute=true");
            }
            let or = if less.is_empty() { "" } else { ", or set " };
            format!(
                "none fits {}; take more devices{or}{}",
                output::bytes(memory),
                less.join(" and ")
            )
        }
    };
    let end = match other {
        None => end,
        Some(other) => format!("{end}\n{}", comparison(other, best)),
    };
    format!(
        "{}: {} parameters, {} x {} tokens a step, on {} x {} devices\n{:.0} TFLOP/s each, {:.0} GB/s within a node, {:.1} GB/s between nodes, {:.0}% of the earlier keys, {:.0}% of the attention\n{}{end}\n",
        recipe.name,
        output::grouped(parameters),
        recipe.training.batch,
        output::grouped(recipe.data.sequence_length),
        cluster.nodes,
        cluster.gpus,
        cluster.rate / 1e12,
        cluster.link / 1e9,
        cluster.network / 1e9,
        100.0 * cluster.fetched,
        100.0 * cluster.visited,
        output::table(&rows),
    )
}

fn json_text(plans: &[ClusterPlan], best: Option<&ClusterPlan>) -> String {
    let plan = |plan: &ClusterPlan| {
        json!({
            "context": plan.context, "data": plan.data, "memory_bytes": plan.memory,
            "gradient_bytes": plan.gradient_bytes, "key_bytes": plan.key_bytes,
            "weight_bytes": plan.weight_bytes, "weight_seconds": plan.weights,
            "shard": plan.shard,
            "compute_seconds": plan.compute, "gradient_seconds": plan.gradients,
            "key_seconds": plan.keys, "step_seconds": plan.step(),
            "overlapped_seconds": plan.overlapped(),
        })
    };
    let best = best.map(|plan| plan.context);
    format!(
        "{:#}\n",
        json!({ "plans": plans.iter().map(plan).collect::<Vec<_>>(), "best_context": best })
    )
}

/// A time for people.
fn seconds(s: f64) -> String {
    match s {
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.2} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s if s < 2.0 * 86400.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} d", s / 86400.0),
    }
}

/// `450GB/s`, `141GB`, `1.5e9`: decimal units.
fn rate(text: &str) -> std::result::Result<f64, String> {
    let bare = text.strip_suffix("/s").unwrap_or(text);
    quantity(bare.strip_suffix('B').unwrap_or(bare))
        .map_err(|_| format!("`{text}` must be a number of bytes, e.g. 450GB/s"))
}

/// `509T`: a number above 0 with a decimal prefix.
fn quantity(text: &str) -> std::result::Result<f64, String> {
    let (digits, factor) = match text.chars().last() {
        Some('k' | 'K') => (&text[..text.len() - 1], 1e3),
        Some('M') => (&text[..text.len() - 1], 1e6),
        Some('G') => (&text[..text.len() - 1], 1e9),
        Some('T') => (&text[..text.len() - 1], 1e12),
        Some('P') => (&text[..text.len() - 1], 1e15),
        _ => (text, 1.0),
    };
    let number = digits.trim().parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0);
    number.map(|x| x * factor).ok_or_else(|| format!("`{text}` must be a number, e.g. 509T"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_rates_with_units() {
        assert_eq!(rate("450GB/s"), Ok(450e9));
        assert_eq!(rate("141GB"), Ok(141e9));
        assert_eq!(rate("2.5e9"), Ok(2.5e9));
        assert_eq!(quantity("509T"), Ok(509e12));
        assert_eq!(rate("fast").unwrap_err(), "`fast` must be a number of bytes, e.g. 450GB/s");
        assert!(rate("-1GB/s").is_err() && rate("0").is_err() && quantity("").is_err());
    }

    #[test]
    fn formats_times() {
        let all = [0.0123, 1.5, 600.0, 36_000.0, 864_000.0].map(seconds);
        assert_eq!(all, ["12.3 ms", "1.50 s", "10.0 min", "10.0 h", "10.0 d"]);
    }
}
