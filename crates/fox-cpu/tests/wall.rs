//! Wall attention: strong decays, closed blocks, pruning and sums of old blocks against the exact result.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_tensor::cases::Rng;
use fox_tensor::{
    Acp, AttentionOut, AttentionSpec, Device, LogitBound, Segment, Segments, Tensor, WALL_BLOCK,
    WallBlock, WallInputs, tile_counts,
};

const HEADS: usize = 2;
const D: usize = 16;
const WIDTH: usize = HEADS * D;

/// Operands of one sequence.
struct Sequence {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Tensor,
    log_gates: Option<Tensor>,
}

impl Sequence {
    /// `keys` keys with log decays and, where given, log gates of these means.
    fn new(device: &Device, keys: usize, decay: f64, gate: Option<f64>) -> Self {
        let mut rng = Rng::new(7);
        let mut normal = |scale: f64| {
            let data: Vec<f64> = rng.normals(keys * WIDTH).iter().map(|x| x * scale).collect();
            device.from_f64(&data, [keys, WIDTH]).unwrap()
        };
        let (q, k, v) = (normal(1.0), normal(1.0), normal(1.0));
        let mut logs = |mean: f64, width: usize| {
            let data: Vec<f64> = (0..keys * width).map(|_| -2.0 * mean * rng.uniform()).collect();
            device.from_f64(&data, [keys, width]).unwrap()
        };
        let log_decays = logs(decay, WIDTH);
        let log_gates = gate.map(|gate| logs(gate, HEADS));
        Sequence { q, k, v, log_decays, log_gates }
    }

    fn inputs(&self) -> WallInputs<'_> {
        WallInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            log_decays: &self.log_decays,
            log_gates: self.log_gates.as_ref(),
        }
    }

    fn forward(&self, acp: Acp) -> AttentionOut {
        let rows = self.q.rows();
        let spec =
            AttentionSpec { acp, ..AttentionSpec::causal(HEADS, D, Segments::uniform(1, rows)) };
        let device = self.q.device().clone();
        device.backend().wall_attention_fwd(&self.inputs(), &[], &spec).unwrap()
    }

    fn backward(&self, acp: Acp) -> Vec<(&'static str, Vec<f32>)> {
        let rows = self.q.rows();
        let (out, device) = (self.forward(acp.clone()), self.q.device().clone());
        let spec =
            AttentionSpec { acp, ..AttentionSpec::causal(HEADS, D, Segments::uniform(1, rows)) };
        let d_out = device.from_f64(&Rng::new(9).normals(rows * WIDTH), [rows, WIDTH]).unwrap();
        let backend = device.backend();
        let grads = backend.wall_attention_bwd(&d_out, &self.inputs(), &out, &spec).unwrap();
        let mut all = vec![("q", grads.dq), ("k", grads.dk), ("v", grads.dv)];
        all.push(("log_decays", grads.dlog_decays));
        all.extend(grads.dlog_gates.map(|gates| ("log_gates", gates)));
        all.into_iter().map(|(name, x)| (name, x.to_f32().unwrap())).collect()
    }
}

fn largest(a: &[f32], b: &[f32]) -> f64 {
    fox_base::difference::largest(a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())))
}

fn on(log_tolerance: f32) -> Acp {
    Acp::On { log_tolerance, bound: LogitBound::Norms }
}

#[test]
fn summing_old_blocks_keeps_its_bound() {
    let sequence = Sequence::new(&fox_cpu::device(), 700, 0.4, None);
    let exact = sequence.forward(Acp::Off);
    let most = sequence.v.to_f32().unwrap().iter().fold(0.0f32, |most, v| most.max(v.abs()));
    for tolerance in [-3.0f32, -6.0, -10.0] {
        let summed = sequence.forward(on(tolerance));
        let bound = f64::from(tolerance.exp().exp_m1() * most);
        let error = largest(&summed.o.to_f32().unwrap(), &exact.o.to_f32().unwrap());
        assert!(error <= bound + 1e-6, "{tolerance}: {error} above {bound}");
        for [visited, total] in tile_counts(&summed.tiles).unwrap() {
            assert!(visited < total / 2, "{visited} of {total} tiles at {tolerance}");
        }
    }
}

#[test]
fn gradients_of_summed_blocks_follow() {
    let sequence = Sequence::new(&fox_cpu::device(), 700, 0.4, None);
    for ((name, summed), (_, exact)) in
        sequence.backward(on(-12.0)).iter().zip(sequence.backward(Acp::Off))
    {
        let error = largest(summed, &exact);
        assert!(error < 1e-4, "{name}: {error}");
    }
}

#[test]
fn gates_prune_within_tolerance() {
    let sequence = Sequence::new(&fox_cpu::device(), 700, 0.05, Some(0.3));
    let (exact, pruned) = (sequence.forward(Acp::Off), sequence.forward(on(-10.0)));
    let error = largest(&pruned.o.to_f32().unwrap(), &exact.o.to_f32().unwrap());
    assert!(error < 1e-4, "{error}");
    let counts = tile_counts(&pruned.tiles).unwrap();
    assert!(counts.iter().all(|[visited, total]| visited < total), "{counts:?}");
    for ((name, pruned), (_, exact)) in
        sequence.backward(on(-10.0)).iter().zip(sequence.backward(Acp::Off))
    {
        assert!(largest(pruned, &exact) < 1e-3, "{name}");
    }
}

#[test]
fn closed_blocks_change_nothing() {
    for device in [Device::naive(), fox_cpu::device()] {
        for (decay, gate) in [(0.05, None), (3.0, Some(0.1))] {
            let keys = 2 * WALL_BLOCK + 30;
            let all = Sequence::new(&device, keys, decay, gate);
            let want = all.forward(Acp::Off).o.to_f32().unwrap();
            let mut blocks = Vec::new();
            for n in 0..2 {
                let rows = |x: &Tensor| x.slice_rows(n * WALL_BLOCK, WALL_BLOCK).unwrap();
                let (k, g) = (rows(&all.k), rows(&all.log_decays));
                let (k, decay) = device.backend().wall_close_block(&k, &g, D).unwrap();
                blocks.push((k, rows(&all.v), decay, all.log_gates.as_ref().map(rows)));
            }
            let past: Vec<WallBlock<'_>> = blocks
                .iter()
                .map(|(k, v, decay, gates)| {
                    let log_gates = gates.as_ref();
                    WallBlock { k, v, decay, log_gates }
                })
                .collect();
            let rows = |x: &Tensor| x.slice_rows(2 * WALL_BLOCK, 30).unwrap();
            // The last 5 keys are queries.
            let open = Sequence {
                q: all.q.slice_rows(keys - 5, 5).unwrap(),
                k: rows(&all.k),
                v: rows(&all.v),
                log_decays: rows(&all.log_decays),
                log_gates: all.log_gates.as_ref().map(rows),
            };
            let segment = Segment { q_start: 0, q_len: 5, k_start: 0, k_len: 30 };
            let spec = AttentionSpec::causal(HEADS, D, Segments::new(vec![segment]).unwrap());
            let backend = device.backend();
            let out = backend.wall_attention_fwd(&open.inputs(), &[past], &spec).unwrap();
            let got = out.o.to_f32().unwrap();
            assert!(largest(&got, &want[(keys - 5) * WIDTH..]) < 2e-6, "{device} {decay}");
        }
    }
}
