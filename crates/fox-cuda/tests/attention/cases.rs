//! The cases and the checks of each: error, determinism, visited tiles.

use fox_base::difference::{largest_error, relative_error};
use fox_base::random::{STEP, SplitMix64};
use fox_cuda::attention::{Attention, AttentionInputs};
use fox_cuda::{Gpu, Result};
use fox_tensor::{Acp, AttentionSpec, Mask, Segment, Segments};
use half::bf16;

use crate::reference::{self, Operands, Results};

/// Allowed error relative to that of a naive bf16 implementation.
const TOLERANCE: f64 = 2.0;
/// The Hopper kernel has row sums of dS over 8 or 16 queries only. With strong gates the gate gradient is a small
/// difference of such sums and less accurate.
const STRONG_GATES_TOLERANCE: f64 = 4.0;
/// Relative error that is always accepted: tiny cases have naive errors of zero.
const FLOOR: f64 = 2e-3;
/// Lower bound on the reference norm of a relative error.
const LEAST_NORM: f64 = 1e-15;

/// Forget gates of a case.
#[derive(Clone, Copy, PartialEq)]
enum Gates {
    None,
    /// Decay times log-spaced from 8 to 1e5 tokens over the heads, with noise.
    LogSpaced,
    /// Several nats per token: plain f32 prefix sums would lose all precision.
    Strong,
}

struct Case {
    name: String,
    spec: AttentionSpec,
    gates: Gates,
    portable: bool,
}

fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut stream = SplitMix64::new(seed.wrapping_mul(STEP) ^ 0x1234_5678_9abc_def0);
    let mut uniform = move || (stream.bits() >> 40) as f32 / (1u64 << 24) as f32;
    // Box-Muller.
    move || {
        let (a, b) = (uniform().max(1e-7), uniform());
        (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()
    }
}

fn log_gates(kind: Gates, rows: usize, heads: usize, seed: u64) -> Option<Vec<f32>> {
    let mut normal = random(seed);
    let gate = |head: usize, z: f32| match kind {
        Gates::Strong => -3.0 * z.abs(),
        _ => {
            let x = head as f32 / (heads.max(2) - 1) as f32;
            let time = (8f32.ln() + (1e5f32.ln() - 8f32.ln()) * x).exp();
            -(0.3 * z).exp() / time
        }
    };
    (kind != Gates::None).then(|| (0..rows * heads).map(|i| gate(i % heads, normal())).collect())
}

impl Case {
    fn operands(&self, seed: u64) -> Operands {
        let spec = &self.spec;
        let ends =
            |f: fn(&Segment) -> usize| spec.segments.as_slice().iter().map(f).max().unwrap_or(0);
        // A few rows after the last segment, whose results must be zero.
        let q_rows = ends(|s| s.q_start + s.q_len) + 3;
        let k_rows = ends(|s| s.k_start + s.k_len) + 5;
        let mut normal = random(seed);
        let mut tensor = |len: usize| -> Vec<f32> {
            (0..len).map(|_| bf16::from_f32(normal()).to_f32()).collect()
        };
        let (wq, wk) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        Operands {
            q: tensor(q_rows * wq),
            k: tensor(k_rows * wk),
            v: tensor(k_rows * wk),
            d_out: tensor(q_rows * wq),
            log_gates: log_gates(self.gates, k_rows, spec.heads, seed + 1),
        }
    }
}

fn bf16s(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn f64s(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// Runs a case on the GPU with memory poisoned by NaN; also returns the tile counts.
fn run_on_gpu(gpu: &Gpu, case: &Case, x: &Operands) -> Result<(Results, Vec<i32>)> {
    gpu.poison(true);
    let (q, k, v) =
        (gpu.upload(&bf16s(&x.q))?, gpu.upload(&bf16s(&x.k))?, gpu.upload(&bf16s(&x.v))?);
    let d_out = gpu.upload(&bf16s(&x.d_out))?;
    let gates = x.log_gates.as_ref().map(|g| gpu.upload(g)).transpose()?;
    let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: gates.as_ref() };
    let mut attention = Attention::new(gpu, &case.spec, inputs)?;
    if case.portable {
        attention = attention.portable();
    }
    let out = attention.forward()?;
    let mut results = Results {
        o: f64s(&gpu.download(&out.o)?),
        lse: gpu.download(&out.lse)?.iter().map(|&x| f64::from(x)).collect(),
        ..Results::default()
    };
    let grads = attention.backward(&out.o, &out.lse, &d_out)?;
    results.dq = f64s(&gpu.download(&grads.dq)?);
    results.dk = f64s(&gpu.download(&grads.dk)?);
    results.dv = f64s(&gpu.download(&grads.dv)?);
    if let Some(g) = &grads.dlog_gates {
        results.dlog_gates = gpu.download(g)?.iter().map(|&x| f64::from(x)).collect();
    }
    let tiles = gpu.download(&out.tiles)?;
    gpu.poison(false);
    Ok((results, tiles))
}

fn same_bits(a: &Results, b: &Results) -> bool {
    let same = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    same(&a.o, &b.o)
        && same(&a.lse, &b.lse)
        && same(&a.dq, &b.dq)
        && same(&a.dk, &b.dk)
        && same(&a.dv, &b.dv)
        && same(&a.dlog_gates, &b.dlog_gates)
}

/// Operands, exact results and results of a naive bf16 implementation.
struct Expected {
    x: Operands,
    exact: Results,
    naive: Results,
}

impl Expected {
    fn new(case: &Case) -> Self {
        let x = case.operands(7);
        let exact = reference::attention(&case.spec, &x, false);
        let naive = reference::attention(&case.spec, &x, true);
        Expected { x, exact, naive }
    }
}

fn check(gpu: &Gpu, case: &Case, expected: &Expected) -> Result<bool> {
    let Expected { x, exact, naive } = expected;
    let (got, tiles) = run_on_gpu(gpu, case, x)?;
    let mut good = true;
    let mut line = format!("{:<44}", case.name);
    let tensors = [
        ("o", &got.o, &exact.o, &naive.o),
        ("dq", &got.dq, &exact.dq, &naive.dq),
        ("dk", &got.dk, &exact.dk, &naive.dk),
        ("dv", &got.dv, &exact.dv, &naive.dv),
        ("dlf", &got.dlog_gates, &exact.dlog_gates, &naive.dlog_gates),
    ];
    for (name, got, exact, naive) in tensors {
        if got.is_empty() {
            continue;
        }
        let error = |x: &[f64]| relative_error(x, exact, LEAST_NORM);
        let (e, n) = (error(got), error(naive));
        let strong = name == "dlf" && case.gates == Gates::Strong && !case.portable;
        let tolerance = if strong { STRONG_GATES_TOLERANCE } else { TOLERANCE };
        let fine = e <= tolerance * n || e <= FLOOR;
        good &= fine;
        line += &format!(" {name} {e:.1e}/{n:.1e}{}", if fine { "" } else { " WRONG" });
    }
    let e = largest_error(&got.lse, &exact.lse);
    let fine = e < 1e-4
        + 1e-6
            * exact.lse.iter().fold(0.0f64, |a, &x| if x.is_finite() { a.max(x.abs()) } else { a });
    good &= fine;
    line += &format!(" lse {e:.0e}{}", if fine { "" } else { " WRONG" });
    let again = run_on_gpu(gpu, case, x)?.0;
    if !same_bits(&got, &again) {
        good = false;
        line += " NOT DETERMINISTIC";
    }
    let visited: (i64, i64) =
        tiles.chunks_exact(2).fold((0, 0), |a, b| (a.0 + i64::from(b[0]), a.1 + i64::from(b[1])));
    line += &format!(" blocks {}/{}", visited.0, visited.1);
    println!("{} {line}", if good { "ok  " } else { "FAIL" });
    Ok(good)
}

fn spec(heads: usize, d: usize, segments: Segments) -> AttentionSpec {
    AttentionSpec::causal(heads, d, segments)
}

fn pair(q_len: usize, k_len: usize) -> Segments {
    Segments::new(vec![Segment { q_start: 0, q_len, k_start: 0, k_len }]).unwrap()
}

fn gaps() -> Segments {
    let s = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
    Segments::new(vec![s(2, 70, 5, 100), s(75, 1, 120, 333), s(80, 257, 500, 257)]).unwrap()
}

fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    let mut add = |name: &str, spec: AttentionSpec, gates: Gates| {
        let spec_too = spec.clone();
        list.push(Case { name: name.into(), spec, gates, portable: false });
        // On GPUs other than Hopper both run the portable kernels.
        list.push(Case { name: format!("portable {name}"), spec: spec_too, gates, portable: true });
    };
    use Gates::{LogSpaced, None as NoGates, Strong};
    let packed = || Segments::packed(&[0, 1, 3, 66, 130, 195, 323, 452, 952]).unwrap();
    for d in [64, 128] {
        add(&format!("one tile d{d}"), spec(1, d, pair(64, 64)), NoGates);
        add(&format!("one tile gates d{d}"), spec(1, d, pair(64, 64)), LogSpaced);
        add(&format!("300 d{d}"), spec(2, d, pair(300, 300)), LogSpaced);
        add(&format!("113 x 203 d{d}"), spec(2, d, pair(113, 203)), LogSpaced);
        add(&format!("3 x 799 d{d}"), spec(2, d, pair(3, 799)), LogSpaced);
        add(&format!("packed d{d}"), spec(2, d, packed()), LogSpaced);
        add(&format!("gaps d{d}"), spec(2, d, gaps()), LogSpaced);
        add(&format!("no gates 700 d{d}"), spec(2, d, pair(700, 700)), NoGates);
        add(&format!("strong gates 1000 d{d}"), spec(2, d, pair(1000, 1000)), Strong);
        // Logits that outgrow the running maximum in every block.
        let large = AttentionSpec { scale: 8.0, ..spec(2, d, pair(1500, 1500)) };
        add(&format!("large logits d{d}"), large, LogSpaced);
        let window = AttentionSpec { window: Some(100), ..spec(2, d, pair(700, 900)) };
        add(&format!("window 100 d{d}"), window, LogSpaced);
        let gqa = AttentionSpec { kv_heads: 2, ..spec(6, d, packed()) };
        add(&format!("gqa 6/2 packed d{d}"), gqa, LogSpaced);
        let acp = AttentionSpec { acp: Acp::auto(), ..spec(6, d, pair(2500, 2500)) };
        add(&format!("acp 2500 d{d}"), acp, LogSpaced);
        let acp = AttentionSpec { acp: Acp::auto(), kv_heads: 3, ..spec(6, d, pair(1500, 1600)) };
        add(&format!("acp gqa offset d{d}"), acp, LogSpaced);
        let full = AttentionSpec { mask: Mask::Bidirectional, ..spec(2, d, pair(500, 500)) };
        add(&format!("bidirectional d{d}"), full, LogSpaced);
        let full =
            AttentionSpec { mask: Mask::Bidirectional, window: Some(77), ..spec(2, d, packed()) };
        add(&format!("bidirectional window packed d{d}"), full, LogSpaced);
        add(&format!("3000 d{d}"), spec(2, d, Segments::uniform(2, 3000)), LogSpaced);
    }
    for d in [8, 40, 72, 96, 160, 192, 256] {
        add(&format!("head dim {d}"), spec(3, d, pair(450, 500)), LogSpaced);
    }
    for d in [192, 256] {
        add(&format!("packed d{d}"), spec(2, d, packed()), LogSpaced);
        add(&format!("gaps d{d}"), spec(2, d, gaps()), NoGates);
        add(&format!("strong gates 700 d{d}"), spec(2, d, pair(700, 700)), Strong);
        let acp = AttentionSpec { acp: Acp::auto(), kv_heads: 3, ..spec(6, d, pair(1500, 1600)) };
        add(&format!("acp gqa offset d{d}"), acp, LogSpaced);
        let window = AttentionSpec { window: Some(100), ..spec(2, d, pair(700, 900)) };
        add(&format!("window 100 d{d}"), window, LogSpaced);
    }
    let wide = AttentionSpec { mask: Mask::Bidirectional, kv_heads: 1, ..spec(2, 256, packed()) };
    add("bidirectional gqa head dim 256", wide, LogSpaced);
    list
}

/// Checks every case whose name contains `filter`.
pub fn check_all(gpu: &Gpu, filter: &str) -> Result<bool> {
    let (mut good, mut count) = (0, 0);
    // The portable variant of a case follows it and shares its reference.
    let mut expected: Option<(String, Expected)> = None;
    for case in cases().iter().filter(|c| c.name.contains(filter)) {
        count += 1;
        let base = case.name.trim_start_matches("portable ").to_owned();
        let expected = match expected.take() {
            Some(same) if same.0 == base => expected.insert(same),
            _ => expected.insert((base, Expected::new(case))),
        };
        match check(gpu, case, &expected.1) {
            Ok(fine) => good += i32::from(fine),
            Err(e) => println!("FAIL {}: {e}", case.name),
        }
    }
    println!("{good} of {count} cases passed");
    Ok(good == count)
}
