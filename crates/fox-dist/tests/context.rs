//! A sequence over several ranks: the forward has the bits of one rank, the gradients differ by rounding alone.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;
#[path = "common/shared_memory.rs"]
mod shared_memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::ranks;
use fox_base::difference::relative_error;
use fox_base::random::SplitMix64;
use fox_dist::context::{Context, SequenceShard, SequenceSplit, Traffic};
use fox_model::{DecayTime, ForwardOptions, Model, ModelConfig, Pruning};
use fox_tensor::{Device, Gradients, ParamId, Segments, Tape};
use shared_memory::SharedMemory;

const VOCAB: usize = 61;

/// A model and what it reads.
struct ShardedPass {
    config: ModelConfig,
    memory: Option<DecayTime>,
    options: ForwardOptions,
    rows: usize,
    time: usize,
    boundaries: Option<Vec<usize>>,
    /// Whether the losses have the bits of one rank; otherwise they differ by rounding.
    exact: bool,
}

/// What came of a run.
struct PassResult {
    losses: Vec<f32>,
    gradients: Gradients,
    traffic: Vec<Traffic>,
}

impl ShardedPass {
    fn new(mut config: ModelConfig, memory: (f64, f64)) -> ShardedPass {
        config.vocab_size = VOCAB;
        let memory = Some(DecayTime { min: memory.0, max: memory.1 });
        let options = ForwardOptions::default();
        ShardedPass { config, memory, options, rows: 1, time: 512, boundaries: None, exact: true }
    }

    /// A model without gates whose memory can be set.
    fn recurrent(mut config: ModelConfig) -> ShardedPass {
        config.vocab_size = VOCAB;
        ShardedPass { config, memory: None, ..ShardedPass::new(pro(), LONG) }
    }

    fn sequences(&self) -> Segments {
        match &self.boundaries {
            None => Segments::uniform(self.rows, self.time),
            Some(boundaries) => Segments::packed(boundaries).unwrap(),
        }
    }

    /// The part of a rank of a context; all of it without a context.
    fn find(&self, context: Option<&Context>) -> PassResult {
        self.find_on(&fox_cpu::device(), context)
    }

    fn find_on(&self, device: &Device, context: Option<&Context>) -> PassResult {
        let mut model = Model::init(&self.config, 5, device).unwrap();
        if let Some(memory) = self.memory {
            assert!(model.init_decay_times(memory).unwrap());
        }
        let (index, size) = context.map_or((0, 1), |c| (c.index(), c.size()));
        let columns = SequenceSplit::columns(self.time, index, size);
        let mut random = SplitMix64::new(11);
        let mut ids = || -> Vec<i32> {
            (0..self.rows * self.time).map(|_| random.below(VOCAB as u64) as i32).collect()
        };
        let own = |all: Vec<i32>| -> Vec<i32> {
            all.chunks(self.time).flat_map(|row| row[columns.clone()].to_vec()).collect()
        };
        let (inputs, labels) = (own(ids()), own(ids()));
        let positions = inputs.len();
        let part = context.map(|context| {
            SequenceShard::new(
                context,
                SequenceSplit::new(&self.sequences(), self.time, size).unwrap(),
            )
        });
        let mut tape = Tape::recording(device);
        let mut segments = self.sequences();
        if let Some(part) = &part {
            tape = part.tape(tape);
            segments = part.segments().unwrap();
        }
        let weight = 1.0 / (self.rows * self.time) as f32;
        let loss = model
            .loss(
                &mut tape,
                &device.from_i32(&inputs, [positions]).unwrap(),
                &device.from_i32(&labels, [positions]).unwrap(),
                &device.full([positions], weight).unwrap(),
                &segments,
                &self.options,
            )
            .unwrap();
        let mut gradients = Gradients::default();
        tape.backward(&mut gradients).unwrap();
        let traffic = part.map_or_else(Vec::new, |part| part.traffic());
        PassResult { losses: loss.per_token.to_f32().unwrap(), gradients, traffic }
    }

    /// Compares `size` ranks with one; gives what travelled, over all ranks and layers.
    fn compare(&self, size: usize, what: &str) -> Traffic {
        let (whole, oracle) = (self.find(None), self.find_on(&Device::naive(), None));
        let parts = ranks(size, |group| {
            let group = Arc::new(group);
            let found = self.find(Some(&Context::new(&group, size).unwrap()));
            group.leave().unwrap();
            found
        });
        for (index, part) in parts.iter().enumerate() {
            let columns = SequenceSplit::columns(self.time, index, size);
            let rows = whole.losses.chunks(self.time);
            let want: Vec<f32> = rows.flat_map(|row| row[columns.clone()].to_vec()).collect();
            let differ = part.losses.iter().zip(&want).filter(|(a, b)| a.to_bits() != b.to_bits());
            let differ = differ.count();
            let error = relative_error(&part.losses, &want, 0.0);
            let near = if self.exact { differ == 0 } else { error < 1e-6 };
            assert!(
                near,
                "{what}: {differ} losses of rank {index} of {size} differ by {error:.1e}"
            );
        }
        let norm = |id: ParamId| {
            let values = whole.gradients.get(id).unwrap().to_f64().unwrap();
            values.iter().map(|x| x * x).sum::<f64>().sqrt()
        };
        let largest = whole.gradients.iter().map(|(id, _)| norm(id)).fold(0.0, f64::max);
        for (id, want) in whole.gradients.iter() {
            let want = want.to_f32().unwrap();
            let sum = summed(&parts, id, want.len());
            let error = relative_error(&sum, &want, 1e-3 * largest);
            // Gradients of gates are small differences: what f32 makes of them on one rank is the measure.
            let exact = oracle.gradients.get(id).unwrap().to_f64().unwrap();
            let limit = f64::max(1e-5, 4.0 * relative_error(&want, &exact, 1e-3 * largest));
            assert!(error < limit, "{what}: {id:?} of {size} ranks: {error:.1e}, {limit:.1e}");
        }
        let all = parts.iter().flat_map(|part| &part.traffic);
        all.fold(Traffic::default(), |sum, t| Traffic {
            fetched: sum.fetched + t.fetched,
            full: sum.full + t.full,
        })
    }
}

fn summed(parts: &[PassResult], id: ParamId, len: usize) -> Vec<f32> {
    let mut sum = vec![0.0; len];
    for part in parts {
        let own = part.gradients.get(id).unwrap().to_f32().unwrap();
        sum.iter_mut().zip(own).for_each(|(a, b)| *a += b);
    }
    sum
}

fn llama() -> ModelConfig {
    ModelConfig::fox_llama(64, 2, 8)
}

fn pro() -> ModelConfig {
    ModelConfig::fox_pro(64, 2, 8)
}

/// Two query heads for each key head. Products with only two columns (the shifts of two key heads) depend on the number
/// of rows, on the CPU, so there are eight key heads.
fn grouped() -> ModelConfig {
    let mut config = ModelConfig::fox_pro(128, 1, 16);
    config.mixer.forgetting_mut().unwrap().kv_heads = 8;
    config
}

/// Memory lengths of the heads in tokens: short ones, mixed ones, long ones.
const SHORT: (f64, f64) = (0.4, 0.6);
const MIXED: (f64, f64) = (0.4, 1e4);
const LONG: (f64, f64) = (1e4, 1e5);

#[test]
fn context_parallel_is_bit_exact() {
    for (config, what) in [(llama(), "llama"), (pro(), "pro"), (grouped(), "grouped")] {
        for (size, memory) in [(2, MIXED), (4, SHORT), (4, LONG)] {
            let traffic = ShardedPass::new(config.clone(), memory).compare(size, what);
            let share = traffic.fetched as f64 / traffic.full as f64;
            match memory {
                SHORT => assert!(share < 0.5, "{what}: short memories fetch {share}"),
                LONG => assert_eq!(share, 1.0, "{what}: long memories fetch all"),
                // Grouped queries share the longer memory of two.
                _ => assert!(
                    share > 0.1 && (share < 1.0 || what == "grouped"),
                    "{what}: mixed memories fetch {share}"
                ),
            }
        }
    }
}

#[test]
fn pruned_keys_are_not_sent() {
    for (pruning, what) in
        [(Pruning::Tolerance(-10.0), "tolerance"), (Pruning::Auto, "auto"), (Pruning::Off, "off")]
    {
        for config in [pro(), llama()] {
            let mut run = ShardedPass::new(config, (2.0, 40.0));
            run.options.pruning = pruning;
            let traffic = run.compare(4, what);
            assert!(pruning == Pruning::Off || traffic.fetched < traffic.full, "{what}");
        }
    }
}

/// The ranks must agree on the largest logits: a bound that is too small forgets keys that one rank alone keeps.
#[test]
fn large_logits_keep_their_keys() {
    let mut config = llama();
    config.initializer_range = 0.1;
    let mut run = ShardedPass::new(config, (10.0, 40.0));
    run.options.pruning = Pruning::Tolerance(-10.0);
    for size in [2, 4] {
        let traffic = run.compare(size, "large logits");
        assert!(traffic.fetched < traffic.full, "{size} ranks fetch everything");
    }
}

#[test]
fn packed_documents_windows_and_no_gates() {
    // Documents that end in, begin in and span parts; one rank has none of the first row's last.
    let boundaries = vec![0, 100, 107, 301, 512, 650, 1020, 1024];
    let packed =
        ShardedPass { rows: 2, boundaries: Some(boundaries), ..ShardedPass::new(pro(), MIXED) };
    packed.compare(2, "packed");
    packed.compare(4, "packed");
    let mut windowed = ShardedPass::new(pro(), LONG);
    windowed.config.mixer.forgetting_mut().unwrap().window = Some(100);
    let traffic = windowed.compare(4, "window");
    assert!(traffic.fetched * 2 <= traffic.full, "{traffic:?}");
    let mut ungated = ShardedPass { memory: None, ..ShardedPass::new(pro(), LONG) };
    let options = ungated.config.mixer.forgetting_mut().unwrap();
    *options = options.clone().without_forgetting();
    let traffic = ungated.compare(2, "no gates");
    assert_eq!(traffic.fetched, traffic.full);
}

/// States and the last rows of convolutions go from rank to rank.
#[test]
fn recurrent_mixers_continue_sequences() {
    let models = [
        (ModelConfig::delta_net(64, 2, 8), "DeltaNet"),
        (ModelConfig::gated_delta_net(64, 2, 8), "Gated DeltaNet"),
        (ModelConfig::kda(64, 2, 8), "KDA"),
        (ModelConfig::mamba2(64, 2, 8), "Mamba-2"),
        (ModelConfig::hgrn2(64, 2, 8), "HGRN2"),
        (ModelConfig::fox_kda(64, 4, 8), "KDA and FoX"),
        (ModelConfig::mamba2_window(64, 2, 8), "Mamba-2 and a window"),
    ];
    for (config, what) in models {
        let run = ShardedPass { time: 256, ..ShardedPass::recurrent(config) };
        run.compare(2, what);
    }
}

#[test]
fn packed_and_recomputed_recurrent_mixers() {
    // Sequences of one token before a cut, of two after it, and over all ranks; scans cut them at other tokens than
    // one rank does.
    let boundaries = vec![0, 127, 130, 254, 256, 257, 512];
    for config in [ModelConfig::gated_delta_net(64, 2, 8), ModelConfig::mamba2(64, 2, 8)] {
        let run = ShardedPass::recurrent(config);
        let mut packed = ShardedPass {
            rows: 2,
            time: 256,
            boundaries: Some(boundaries.clone()),
            exact: false,
            ..run
        };
        packed.compare(2, "packed");
        packed.options.recompute = true;
        packed.compare(4, "packed and recomputed");
    }
}

#[test]
fn recomputed_blocks_fetch_again() {
    let mut run = ShardedPass::new(pro(), MIXED);
    run.options.recompute = true;
    run.compare(2, "recompute");
}

#[test]
fn contexts_of_a_group_are_independent() {
    let run = ShardedPass { time: 256, ..ShardedPass::new(pro(), MIXED) };
    let whole = run.find(None);
    let parts = ranks(4, |group| {
        let group = Arc::new(group);
        let context = Context::new(&group, 2).unwrap();
        let found = run.find(Some(&context));
        group.leave().unwrap();
        (context.number(), context.index(), found.losses)
    });
    for (rank, (number, index, losses)) in parts.into_iter().enumerate() {
        assert_eq!((number, index), (rank / 2, rank % 2));
        assert_eq!(losses, whole.losses[index * 128..][..128]);
    }
    let alone = Arc::new(fox_dist::Group::alone());
    let error = Context::new(&alone, 2).unwrap_err().to_string();
    assert_eq!(error, "1 ranks cannot share sequences 2 by 2; start a multiple of 2 ranks");
}

/// Devices that exchange tensors themselves have the bits of those that send them through the host, in losses and gradients.
#[test]
fn connected_devices_have_the_bits_of_the_host() {
    let boundaries = vec![0, 100, 107, 301, 512, 650, 1020, 1024];
    let packed =
        ShardedPass { rows: 2, boundaries: Some(boundaries), ..ShardedPass::new(pro(), MIXED) };
    let mut recomputed = ShardedPass::new(grouped(), SHORT);
    recomputed.options.recompute = true;
    let shorter = |config| ShardedPass { time: 256, ..ShardedPass::recurrent(config) };
    let passes = [
        (packed, "packed"),
        (recomputed, "recomputed"),
        (ShardedPass::new(llama(), MIXED), "norms of queries and keys"),
        (shorter(ModelConfig::gated_delta_net(64, 2, 8)), "Gated DeltaNet"),
        (shorter(ModelConfig::fox_kda(64, 4, 8)), "KDA and FoX"),
    ];
    for (pass, what) in passes {
        let size = if pass.time == 256 { 2 } else { 4 };
        let memory = SharedMemory::new(size);
        let found = ranks(size, |group| {
            let group = Arc::new(group);
            let context = Context::new(&group, size).unwrap();
            let host = pass.find(Some(&context));
            let device = memory.device(group.rank(), size);
            assert_eq!(group.connect(&device).unwrap().unwrap(), "shared memory");
            let direct = pass.find_on(&device, Some(&context));
            group.leave().unwrap();
            (host, direct)
        });
        for (rank, (host, direct)) in found.iter().enumerate() {
            assert_eq!(host.traffic, direct.traffic, "{what}: the host has f32, too");
            assert_same(&host.losses, &direct.losses, what);
            for (id, gradient) in host.gradients.iter() {
                let other = direct.gradients.get(id).unwrap().to_f32().unwrap();
                assert_same(
                    &gradient.to_f32().unwrap(),
                    &other,
                    &format!("{what}, {id:?}, {rank}"),
                );
            }
        }
        // Keys, values and gates there, again if recomputed, and gradients back: no gate sums.
        let keys: u64 =
            found.iter().flat_map(|(_, direct)| &direct.traffic).map(|t| t.fetched / 4).sum();
        let sent = memory.values.load(Ordering::Relaxed) as u64;
        assert!(sent >= keys && sent > 0, "{what}: {sent} values of at least {keys}");
    }
}

fn assert_same(a: &[f32], b: &[f32], what: &str) {
    let differ = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert!(a.len() == b.len() && differ == 0, "{what}: {differ} of {} values differ", a.len());
}

/// An op can only say that it failed; the part knows of whom.
#[test]
fn failed_rank_ends_pass_of_all() {
    let run = ShardedPass { time: 256, ..ShardedPass::new(pro(), MIXED) };
    let errors = ranks(2, |group| {
        let group = Arc::new(group);
        if group.rank() == 1 {
            group.fail("no memory");
            return "rank 1 failed: no memory".to_string();
        }
        let device = fox_cpu::device();
        let model = Model::init(&run.config, 5, &device).unwrap();
        let context = Context::new(&group, 2).unwrap();
        let part = SequenceShard::new(
            &context,
            SequenceSplit::new(&run.sequences(), run.time, 2).unwrap(),
        );
        let ids = device.from_i32(&[7; 128], [128]).unwrap();
        let mut tape = part.tape(Tape::recording(&device));
        let segments = part.segments().unwrap();
        let weights = device.full([128], 1.0).unwrap();
        let error = model.loss(&mut tape, &ids, &ids, &weights, &segments, &run.options);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rank 1 failed: no memory"), "{error}");
        part.failure().unwrap().to_string()
    });
    for error in errors {
        assert!(error.starts_with("rank 1 failed: no memory"), "{error}");
    }
}
