//! What a step takes on many devices: memory, bytes and time, from the recipe alone.
//!
//! `n = data x context` ranks, `P` parameters, `b` rows of `T` tokens at each rank of which it holds `T / context`
//! columns. Per rank:
//!
//! ```text
//! compute    C = (products + mixing of the last part) / rate    the last part of a causal sequence has the most pairs:
//!                                                               (2 c - 1) / c^2 of all, for c = context, without a
//!                                                               window; of these pruning leaves a fraction
//! gradients  G = 2 passes of 4 P / n bytes to each other rank   to the owner of each parameter, its new value back
//! keys       X = what the last part fetches of the c - 1 others, in every layer, and its gradients back:
//!                b T (c - 1) / c x share x (2 W_kv + H) values  share: `exchanged` in metrics.jsonl; gates have 4
//!                                                               bytes, the others what the device keeps; a window's
//!                                                               keys at most
//!            blocks that are recomputed run forward, and fetch, twice: C is 4/3 of that above
//! bytes      go over the link within a node and over the network between nodes at once, each per device and direction:
//!            the slower one counts
//! step       C + G + X
//! overlapped C + max(0, G / 2 - 2/3 C) + G / 2 + X              sums of gradients travel during the backward pass
//! memory     weights, gradients and activations as on one device, but only the largest share of the optimizer's state,
//!            and the keys that were fetched
//! ```
//!
//! With sharded weights (`parallel.shard = "weights"`) new values do not travel back, and instead every pass of each
//! micro-batch gathers the weights, batch by batch (about a block each) from their owners, prefetched by one batch:
//!
//! ```text
//! weights    W = for every batch of every pass, the largest 4 P_owned to each other rank; forward all weights, backward
//!                those of the blocks
//! step       C + G / 2 + X + W
//! overlapped max(C, W + G / 2) + X                              both travel while the device computes
//! memory     crate::memory_check
//! ```
//!
//! Latencies are not counted: a step has few large messages.

use fox_dist::owners;
use fox_model::mixers::StateSpec;
use fox_model::{MixerConfig, ModelConfig, ParamGroup, ParamSpec};

use crate::recipe::{ParallelRecipe, Shard};
use crate::sharded_weights::{is_sharded, window as block_bytes};
use crate::{Recipe, Result, memory_check};

/// Bytes of a gradient, a parameter, or an element of the optimizer's state.
const F32: f64 = 4.0;

/// Devices and what connects them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// Devices in a node.
    pub gpus: usize,
    /// Nodes.
    pub nodes: usize,
    /// Bytes per second between two devices of a node, per device and direction.
    pub link: f64,
    /// The same between nodes.
    pub network: f64,
    /// FLOP/s of a training step on one device.
    pub rate: f64,
    /// Share of the earlier keys that a part of a sequence fetches, up to 1.
    pub fetched: f64,
    /// Share of the attention that pruning leaves, up to 1.
    pub visited: f64,
    /// Whether activations are kept in bf16.
    pub narrow: bool,
}

impl Cluster {
    /// Devices in all.
    pub fn ranks(&self) -> usize {
        self.gpus * self.nodes
    }

    /// Seconds to exchange `bytes` with each of `peers` ranks, of which `near` are in the same node.
    fn exchange(&self, bytes: f64, peers: usize, near: usize) -> f64 {
        let far = (peers - near) as f64 * bytes / self.network;
        far.max(near as f64 * bytes / self.link)
    }
}

/// A step with the work divided in one way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterPlan {
    /// Ranks that share a sequence.
    pub context: usize,
    /// Ranks that share the batch.
    pub data: usize,
    /// What is divided among the ranks.
    pub shard: Shard,
    /// Bytes of device memory at the rank that needs the most.
    pub memory: f64,
    /// Bytes of gradients and parameters that a rank sends in a step.
    pub gradient_bytes: f64,
    /// Bytes of weights that a rank sends in a step, where they are sharded.
    pub weight_bytes: f64,
    /// Bytes of keys, values, gates and their gradients that go to and from the last part of a sequence in a step.
    pub key_bytes: f64,
    /// Seconds of arithmetic.
    pub compute: f64,
    /// Seconds for the gradients, there and back.
    pub gradients: f64,
    /// Seconds for the keys.
    pub keys: f64,
    /// Seconds to gather weights, where they are sharded.
    pub weights: f64,
}

impl ClusterPlan {
    /// Seconds of a step, one thing after the other.
    pub fn step(&self) -> f64 {
        self.compute + self.gradients + self.keys + self.weights
    }

    /// Seconds of a step when gradients are added during the backward pass, which is two thirds of the arithmetic, and
    /// sharded weights are gathered ahead.
    pub fn overlapped(&self) -> f64 {
        if self.shard == Shard::Weights {
            return self.compute.max(self.weights + self.gradients) + self.keys;
        }
        let summed = self.gradients / 2.0;
        let visible = (summed - self.compute * 2.0 / 3.0).max(0.0);
        self.compute + visible + summed + self.keys
    }

    /// All ways to divide a recipe's work among all devices of a cluster, by the number of ranks that share a sequence.
    pub fn all(
        recipe: &Recipe,
        config: &ModelConfig,
        cluster: &Cluster,
    ) -> Result<Vec<ClusterPlan>> {
        let ranks = cluster.ranks();
        let mut plans = Vec::new();
        for context in (1..=ranks).filter(|context| ranks.is_multiple_of(*context)) {
            let divided = Recipe {
                parallel: ParallelRecipe { context, ..recipe.parallel },
                ..recipe.clone()
            };
            if divided.check_ranks(ranks).and_then(|()| divided.check_context(config)).is_ok() {
                plans.push(ClusterPlan::new(&divided, config, cluster)?);
            }
        }
        Ok(plans)
    }

    /// The step of a recipe as it is, which must fit the number of devices.
    pub fn new(recipe: &Recipe, config: &ModelConfig, cluster: &Cluster) -> Result<ClusterPlan> {
        let (ranks, context) = (cluster.ranks(), recipe.parallel.context);
        recipe.check_ranks(ranks)?;
        recipe.check_context(config)?;
        let data = ranks / context;
        let (rows, length) = (recipe.training.batch / data, recipe.data.sequence_length);
        let specs = config.param_specs();
        let trained = specs.iter().filter(|s| s.trainable && recipe.training.trains(s));
        let share = F32 * trained.map(ParamSpec::count).sum::<usize>() as f64 / ranks as f64;
        let shard = if ranks > 1 { recipe.parallel.shard } else { Shard::Optimizer };
        // With sharded weights, new values stay with their owner.
        let ways = if shard == Shard::Weights { 1.0 } else { 2.0 };
        let (weight_bytes, weights) = match shard {
            Shard::Optimizer => (0.0, 0.0),
            Shard::Weights => gathers(recipe, config, cluster),
        };
        // Keys that the last part of one row fetches in one layer, where no window is shorter.
        let parts = context as f64;
        let unforgotten = length as f64 * (parts - 1.0) / parts * cluster.fetched;
        let width = if cluster.narrow { 2.0 } else { F32 };
        let (mut fetched, mut held) = (0.0, 0.0);
        for layer in 0..config.num_layers {
            let mixer = config.mixer_of(layer);
            if let StateSpec::Recurrent(state) = mixer.state(config) {
                // The state, and the last rows of the convolutions.
                let convs = state.convs.iter().map(|conv| (conv.taps - 1) * conv.channels);
                fetched += (state.scan + convs.sum::<usize>()) as f64 * F32;
                continue;
            }
            let (heads, head_dim) = mixer.heads(config);
            let keys = (2 * mixer.key_heads(config) * head_dim) as f64;
            let forgets = mixer.forgetting().is_some_and(|mixer| mixer.gate.forgets());
            let gates = if forgets { heads as f64 } else { 0.0 };
            let earlier = unforgotten.min(window(mixer));
            let bytes = earlier * (keys * width + gates * F32);
            (fetched, held) = (fetched + bytes, held + bytes);
        }
        let passes = if recipe.training.recompute { 2.0 } else { 1.0 };
        let key_bytes = rows as f64 * (passes + 1.0) * fetched;
        let peers = context - 1;
        let each = key_bytes / peers.max(1) as f64;
        Ok(ClusterPlan {
            context,
            data,
            memory: memory(recipe, config, cluster, held)?,
            shard,
            gradient_bytes: ways * share * (ranks - 1) as f64,
            weight_bytes,
            weights,
            key_bytes,
            compute: rows as f64 * part_flops(recipe, config, cluster.visited) / cluster.rate,
            gradients: ways * cluster.exchange(share, ranks - 1, cluster.gpus - 1),
            keys: cluster.exchange(each, peers, peers.min(cluster.gpus - 1)),
        })
    }
}

/// Bytes of weights that a rank sends in a step, on average, and the seconds of all gathers. Those of a batch take as long
/// as the rank, or between nodes the node, that owns the most of it sends.
fn gathers(recipe: &Recipe, config: &ModelConfig, cluster: &Cluster) -> (f64, f64) {
    let (specs, ranks) = (config.param_specs(), cluster.ranks());
    let sizes: Vec<usize> = specs.iter().map(ParamSpec::count).collect();
    let sharded: Vec<(&ParamSpec, usize)> =
        specs.iter().zip(owners(&sizes, ranks)).filter(|(spec, _)| is_sharded(spec)).collect();
    let of_blocks = |spec: &ParamSpec| matches!(spec.group, ParamGroup::Mixer | ParamGroup::Mlp);
    let backward = sharded.iter().rev().filter(|(spec, _)| of_blocks(spec));
    let window = block_bytes(&specs, config.num_layers) as f64;
    let (mut bytes, mut seconds, mut batch, mut own) = (0.0, 0.0, 0.0, vec![0.0; ranks]);
    let mut kept = window;
    let mut send = |own: &mut Vec<f64>| {
        let most = |bytes: &[f64]| bytes.iter().copied().fold(0.0, f64::max);
        let near = most(own) * (cluster.gpus - 1) as f64 / cluster.link;
        // The devices of a node share what connects it to others.
        let mean = |node: &[f64]| node.iter().sum::<f64>() / cluster.gpus as f64;
        let nodes: Vec<f64> = own.chunks(cluster.gpus).map(mean).collect();
        let far = most(&nodes) * (ranks - cluster.gpus) as f64 / cluster.network;
        seconds += near.max(far);
        own.fill(0.0);
    };
    for (i, (spec, owner)) in sharded.iter().chain(backward).enumerate() {
        let size = F32 * spec.count() as f64;
        // The last block is still there when the backward pass begins.
        if i >= sharded.len() && kept >= size {
            kept -= size;
            continue;
        }
        kept = if i >= sharded.len() { 0.0 } else { kept };
        if batch + size > window {
            send(&mut own);
            batch = 0.0;
        }
        (batch, bytes) = (batch + size, bytes + size);
        own[*owner] += size;
    }
    send(&mut own);
    let rows = (recipe.training.batch * recipe.parallel.context / ranks) as f64;
    let passes = (rows / memory_check::rows(recipe, ranks) as f64).ceil().max(1.0);
    let others = (ranks - 1) as f64 / ranks as f64;
    (passes * bytes * others, passes * seconds)
}

/// FLOPs of a step over a whole batch of a recipe, on one device, when pruning leaves the fraction `visited` of attention.
pub fn batch_flops(recipe: &Recipe, config: &ModelConfig, visited: f64) -> f64 {
    let whole =
        Recipe { parallel: ParallelRecipe { context: 1, ..recipe.parallel }, ..recipe.clone() };
    recipe.training.batch as f64 * part_flops(&whole, config, visited)
}

/// FLOPs of a step over the last part of a sequence.
fn part_flops(recipe: &Recipe, config: &ModelConfig, visited: f64) -> f64 {
    let (length, parts) = (recipe.data.sequence_length, recipe.parallel.context as f64);
    let (mut mixing, mut of_part) = (0.0, 0.0);
    for layer in 0..config.num_layers {
        let mixer = config.mixer_of(layer);
        let flops = mixer.train_flops(config, length);
        mixing += flops;
        of_part += match mixer.state(config) {
            StateSpec::Recurrent(_) => flops / parts,
            _ => flops * last_pairs(length as f64, parts, window(mixer)) * visited,
        };
    }
    let products = config.train_flops_per_token(length) - mixing;
    let again = if recipe.training.recompute { 4.0 / 3.0 } else { 1.0 };
    again * length as f64 * (products / parts + of_part)
}

/// Tokens that a query sees at most.
fn window(mixer: &dyn MixerConfig) -> f64 {
    let window = mixer.forgetting().and_then(|mixer| mixer.window);
    window.map_or(f64::INFINITY, |window| window as f64)
}

/// Share of the pairs of a causal sequence whose query is in the last of `parts` parts.
fn last_pairs(length: f64, parts: f64, window: f64) -> f64 {
    let pairs_before = |position: f64| {
        let full = window.min(position);
        full * full / 2.0 + full * (position - full)
    };
    1.0 - pairs_before(length - length / parts) / pairs_before(length)
}

/// Bytes at the rank that needs the most; `keys` are those of the earlier keys of one row, over all layers.
fn memory(recipe: &Recipe, config: &ModelConfig, cluster: &Cluster, keys: f64) -> Result<f64> {
    let (kept, recomputed) =
        memory_check::step_bytes(recipe, config, cluster.ranks(), cluster.narrow)?;
    let rows = memory_check::rows(recipe, cluster.ranks()) as f64;
    Ok(match recipe.training.recompute {
        false => kept + rows * keys,
        // Blocks that are recomputed keep no keys from one to the next.
        true => recomputed + rows * keys / config.num_layers.max(1) as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    fn cluster(gpus: usize, nodes: usize) -> Cluster {
        let (link, network, rate) = (450e9, 50e9, 4e14);
        let (fetched, visited, narrow) = (1.0, 1.0, true);
        Cluster { gpus, nodes, link, network, rate, fetched, visited, narrow }
    }

    fn recipe(set: &[&str]) -> (Recipe, ModelConfig) {
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let recipe = recipe::load("fox-pro-760m", &set).unwrap();
        let config = recipe.model_config(50_257).unwrap();
        (recipe, config)
    }

    #[test]
    fn single_device_sends_nothing() {
        let (recipe, config) = recipe(&["training.batch=8"]);
        let one = ClusterPlan::new(&recipe, &config, &cluster(1, 1)).unwrap();
        assert_eq!(
            (one.gradient_bytes, one.key_bytes, one.gradients, one.keys),
            (0.0, 0.0, 0.0, 0.0)
        );
        assert_eq!(one.compute, batch_flops(&recipe, &config, 1.0) / 4e14);
        assert_eq!((one.step(), one.overlapped()), (one.compute, one.compute));
    }

    #[test]
    fn recurrent_layers_send_their_state() {
        let set = ["parallel.context=2".to_string(), "training.batch=8".to_string()];
        let recipe = recipe::load("gated-delta-net-125m", &set).unwrap();
        let config = recipe.model_config(50_257).unwrap();
        let plan = ClusterPlan::new(&recipe, &config, &cluster(2, 1)).unwrap();
        let StateSpec::Recurrent(state) = config.mixer_of(0).state(&config) else {
            panic!("not recurrent")
        };
        let rows = state.convs.iter().map(|conv| (conv.taps - 1) * conv.channels);
        let values = config.num_layers * (state.scan + rows.sum::<usize>());
        // There and back, for 8 sequences.
        assert_eq!(plan.key_bytes, (8 * 2 * 4 * values) as f64);
        let whole = batch_flops(&recipe, &config, 0.5) / 4e14;
        assert!((plan.compute * 2.0 / whole - 1.0).abs() < 1e-12, "both halves cost the same");
    }

    #[test]
    fn eight_devices_by_hand() {
        let (recipe, config) = recipe(&["training.batch=8"]);
        let (one, eight) = (cluster(1, 1), cluster(8, 1));
        let (one, eight) = (
            ClusterPlan::new(&recipe, &config, &one).unwrap(),
            ClusterPlan::new(&recipe, &config, &eight).unwrap(),
        );
        let parameters: usize = config.param_specs().iter().map(ParamSpec::count).sum();
        assert!((eight.compute * 8.0 / one.compute - 1.0).abs() < 1e-12);
        let bytes = 2.0 * 4.0 * parameters as f64 * 7.0 / 8.0;
        assert!((eight.gradient_bytes / bytes - 1.0).abs() < 1e-12);
        assert!((eight.gradients / (bytes / 450e9) - 1.0).abs() < 1e-12);
        // Of the memory for one sequence, only the optimizer's state is divided: 8 bytes of 7 / 8 of the parameters.
        let (single, _) = self::recipe(&["training.batch=1"]);
        let single = ClusterPlan::new(&single, &config, &cluster(1, 1)).unwrap();
        let saved = single.memory - eight.memory;
        assert!((saved / (parameters as f64 * 7.0) - 1.0).abs() < 0.02, "{saved}");
        // Over two nodes, half of the peers are behind the slower network.
        let apart = ClusterPlan::new(&recipe, &config, &cluster(4, 2)).unwrap();
        assert!((apart.gradients / (bytes / 7.0 * 4.0 / 50e9) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn sequences_are_divided_where_the_batch_cannot_be() {
        let (recipe, config) = recipe(&["training.batch=2", "data.sequence_length=131072"]);
        let plans = ClusterPlan::all(&recipe, &config, &cluster(8, 1)).unwrap();
        let contexts: Vec<usize> = plans.iter().map(|plan| plan.context).collect();
        assert_eq!(contexts, [4, 8], "a batch of 2 for at most 2 ranks");
        let (four, eight) = (plans[0], plans[1]);
        assert!(eight.memory < four.memory && eight.key_bytes > four.key_bytes);
        // Keys and values of 24 layers of width 1536 in bf16, gates of 24 heads in f32, and gradients of all, for 7/8 of
        // the tokens of both rows.
        let tokens = 24.0 * 2.0 * 131_072.0 * 7.0 / 8.0;
        let bytes = tokens * (2.0 * 1536.0 * 2.0 + 24.0 * 4.0) * 2.0;
        assert!((eight.key_bytes / bytes - 1.0).abs() < 1e-12, "{} {bytes}", eight.key_bytes);
        let forgetful = Cluster { fetched: 0.1, ..cluster(8, 1) };
        let less = ClusterPlan::all(&recipe, &config, &forgetful).unwrap()[1];
        assert!((less.key_bytes / eight.key_bytes - 0.1).abs() < 1e-12);
        assert!(less.memory < eight.memory && less.step() < eight.step());
    }

    #[test]
    fn windows_bound_context_traffic() {
        let set = ["training.batch=2", "data.sequence_length=131072"].map(String::from);
        let recipe = recipe::load("fox-window-760m", &set).unwrap();
        let config = recipe.model_config(50_257).unwrap();
        let plan = ClusterPlan::all(&recipe, &config, &cluster(8, 1)).unwrap().pop().unwrap();
        assert_eq!(plan.context, 8);
        // Twelve layers see all of both rows and have gates, twelve see 512 tokens and have none.
        let all = 131_072.0 * 7.0 / 8.0 * (2.0 * 1536.0 * 2.0 + 24.0 * 4.0);
        let bytes = 2.0 * 12.0 * (all + 512.0 * 2.0 * 1536.0 * 2.0) * 2.0;
        assert!((plan.key_bytes / bytes - 1.0).abs() < 1e-12, "{} {bytes}", plan.key_bytes);
        let share = |window: f64| last_pairs(1024.0, 4.0, window);
        assert_eq!((share(f64::INFINITY), share(1024.0)), (7.0 / 16.0, 7.0 / 16.0));
        // 256 queries of 100 pairs each; of all, the first hundred have half as many.
        assert!((share(100.0) - 256.0 / (1024.0 - 50.0)).abs() < 1e-12);
        assert_eq!(last_pairs(1024.0, 1.0, 100.0), 1.0);
    }

    #[test]
    fn indivisible_recipes_have_no_plan() {
        // Mamba-1 layers need whole sequences.
        let recipe = recipe::load("samba-760m", &["training.batch=8".to_string()]).unwrap();
        let config = recipe.model_config(50_257).unwrap();
        let plans = ClusterPlan::all(&recipe, &config, &cluster(8, 1)).unwrap();
        assert_eq!(plans.iter().map(|plan| plan.context).collect::<Vec<_>>(), [1]);
        assert!(ClusterPlan::all(&recipe, &config, &cluster(3, 1)).unwrap().is_empty());
    }

    /// Gradients of earlier micro-batches are there while the activations of the next one are.
    #[test]
    fn accumulated_gradients_add_to_activations() {
        let memory = |set: &[&str]| {
            let (recipe, config) = recipe(set);
            ClusterPlan::new(&recipe, &config, &cluster(8, 1)).unwrap().memory
        };
        let (_, config) = recipe(&[]);
        let parameters: usize = config.param_specs().iter().map(ParamSpec::count).sum();
        let gradients = 4.0 * parameters as f64;
        // One sequence of activations is more than the gradients.
        let one = memory(&["training.batch=8", "training.micro_batch=1"]);
        for shard in ["optimizer", "weights"] {
            let shard = format!("parallel.shard=\"{shard}\"");
            let plan = |batch, more| {
                let micro = "training.micro_batch=1";
                memory(&[batch, micro, shard.as_str(), more])
            };
            let single = plan("training.batch=8", "training.reduction=\"running\"");
            let two = plan("training.batch=16", "training.reduction=\"running\"");
            assert!(((two - single) / gradients - 1.0).abs() < 1e-9, "{shard}: {single} {two}");
            let tree = plan("training.batch=32", "training.reduction=\"tree\"");
            assert!(((tree - single) / gradients - 2.0).abs() < 1e-9, "{shard}: {single} {tree}");
            assert!(single <= one);
        }
    }

    #[test]
    fn sums_hide_behind_the_backward_pass() {
        let plan = |gradients: f64| ClusterPlan {
            context: 1,
            data: 8,
            memory: 0.0,
            gradient_bytes: 0.0,
            key_bytes: 0.0,
            compute: 3.0,
            gradients,
            keys: 0.5,
            shard: Shard::Optimizer,
            weight_bytes: 0.0,
            weights: 0.0,
        };
        // Half of the exchange are sums, beside two seconds of arithmetic; the way back is not hidden.
        assert_eq!(plan(4.0).overlapped(), 3.0 + 2.0 + 0.5);
        assert_eq!(plan(5.0).overlapped(), 3.0 + 0.5 + 2.5 + 0.5);
    }

    #[test]
    fn sharded_weights_trade_memory_for_traffic() {
        let (replicated, config) = recipe(&["training.batch=8"]);
        let (sharded, _) = recipe(&["training.batch=8", "parallel.shard=\"weights\""]);
        let plan = |recipe: &Recipe, cluster: &Cluster| {
            ClusterPlan::new(recipe, &config, cluster).unwrap()
        };
        let (one, three) = (plan(&replicated, &cluster(8, 1)), plan(&sharded, &cluster(8, 1)));
        let parameters: usize = config.param_specs().iter().map(ParamSpec::count).sum();
        let bytes = 4.0 * parameters as f64;
        // Weights and gradients are an eighth, but for the blocks in flight and the output projection.
        let saved = (one.memory - three.memory) / (bytes * 7.0 / 8.0);
        assert!((0.5..1.0).contains(&saved), "{saved}");
        assert_eq!(three.gradient_bytes, one.gradient_bytes / 2.0);
        // Forward all, backward all but the tables and the last block.
        let tables = 2.0 * 4.0 * (50_257 * 1536) as f64;
        let block = (bytes - tables) / 24.0;
        let want = (2.0 * bytes - tables - block) * 7.0 / 8.0;
        assert!((three.weight_bytes / want - 1.0).abs() < 0.01, "{} {want}", three.weight_bytes);
        assert!(three.weights > want / 450e9, "owners are not balanced in every block");
        // Hidden behind the arithmetic within a node, not behind a slow network.
        assert_eq!(three.overlapped(), three.compute);
        let slow = Cluster { network: 1e9, ..cluster(4, 2) };
        assert!(plan(&sharded, &slow).overlapped() > plan(&replicated, &slow).overlapped());
        // Micro-batches gather anew.
        let (parts, _) =
            recipe(&["training.batch=32", "training.micro_batch=1", "parallel.shard=\"weights\""]);
        let parts = plan(&parts, &cluster(8, 1));
        assert!((parts.weight_bytes / three.weight_bytes - 4.0).abs() < 1e-9);
        let alone = plan(&sharded, &cluster(1, 1));
        assert_eq!((alone.shard, alone.weight_bytes), (Shard::Optimizer, 0.0));
    }

    #[test]
    fn seven_billion_parameters_fit_eight_h200s() {
        let recipe = recipe::load("fox-pro-7b", &[]).unwrap();
        let config = recipe.model_config(50_257).unwrap();
        let parameters: usize = config.param_specs().iter().map(ParamSpec::count).sum();
        assert!((6_500_000_000..7_500_000_000).contains(&parameters), "{parameters}");
        let plan = ClusterPlan::new(&recipe, &config, &cluster(8, 1)).unwrap();
        assert_eq!((plan.context, plan.data, plan.shard), (1, 8, Shard::Weights));
        assert!(1.05 * plan.memory < 141e9, "{}", plan.memory);
        assert!(plan.weights < 0.2 * plan.compute, "{} {}", plan.weights, plan.compute);
    }

    #[test]
    fn last_shard_fetches_all_keys() {
        let set = ["training.batch=2", "data.sequence_length=131072"];
        let (kept, config) = recipe(&set);
        let plan = |recipe: &Recipe, fetched: f64| {
            let cluster = Cluster { fetched, ..cluster(8, 1) };
            ClusterPlan::all(recipe, &config, &cluster).unwrap()[1]
        };
        let length = 131_072;
        let mixing: f64 =
            (0..24).map(|layer| config.mixer_of(layer).train_flops(&config, length)).sum();
        let products = config.train_flops_per_token(length) - mixing;
        // An eighth of the tokens, and of the pairs of attention the 15 of 64 that end in it.
        let flops = 2.0 * length as f64 * (products / 8.0 + mixing * 15.0 / 64.0);
        let compute = plan(&kept, 1.0).compute;
        assert!((compute * 4e14 / flops - 1.0).abs() < 1e-12, "{compute}");
        let (recomputed, _) = recipe(&[&set[..], &["training.recompute=true"]].concat());
        let keys = |recipe: &Recipe| plan(recipe, 1.0).memory - plan(recipe, 0.0).memory;
        assert!((keys(&kept) / keys(&recomputed) / 24.0 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn frozen_parameters_have_no_state() {
        let (all, config) = recipe(&["training.batch=8"]);
        let (gates, _) = recipe(&["training.batch=8", "training.train=[\"gates\"]"]);
        let plan = |recipe: &Recipe| ClusterPlan::new(recipe, &config, &cluster(8, 1)).unwrap();
        let (all, gates) = (plan(&all), plan(&gates));
        let count = |part: &str| -> f64 {
            let specs = config.param_specs();
            specs.iter().filter(|s| s.name.contains(part)).map(|s| s.count() as f64).sum()
        };
        let (parameters, trained) = (count(""), count(".fgate_"));
        assert!(
            (gates.gradient_bytes / all.gradient_bytes * parameters / trained - 1.0).abs() < 1e-9
        );
        // Two moments in f32 of an eighth of the parameters.
        let saved = all.memory - gates.memory;
        assert!((saved / parameters - 1.0).abs() < 0.05, "{saved}");
    }
}
