//! Times, beside the measured rate of matrix products and the published kernels.

use fox_cuda::attention::{Attention, AttentionInputs};
use fox_cuda::{Gemm, GemmOperand, GemmProblem, Gpu, Result, Timer};
use fox_tensor::{Acp, AttentionSpec, Segments};
use half::bf16;

use crate::cases::{Gates, log_gates, random};

struct Shape {
    batch: usize,
    heads: usize,
    time: usize,
    head_dim: usize,
    /// Published kernel, cuDNN without gates: forward / backward in TFLOP/s (one H200, 2026-11-15).
    peers: &'static str,
    /// Published kernel with pruning, ms.
    pruned_peer: &'static str,
}

const SHAPES: [Shape; 4] = [
    Shape {
        batch: 4,
        heads: 24,
        time: 4096,
        head_dim: 64,
        peers: "212/149, 409/371",
        pruned_peer: "1.280+3.039",
    },
    Shape {
        batch: 1,
        heads: 24,
        time: 16384,
        head_dim: 64,
        peers: "225/162, 435/426",
        pruned_peer: "3.456+9.413",
    },
    Shape {
        batch: 1,
        heads: 12,
        time: 16384,
        head_dim: 128,
        peers: "349/306, 564/521",
        pruned_peer: "2.275+5.785",
    },
    Shape {
        batch: 1,
        heads: 24,
        time: 65536,
        head_dim: 64,
        peers: "241/168, 453/429",
        pruned_peer: "39.2+114.6",
    },
];

fn tensor(gpu: &Gpu, len: usize, seed: u64) -> Result<fox_cuda::Buffer<bf16>> {
    // Random enough for the power the GPU draws, and quick to make: a block of normals, repeated.
    let mut normal = random(seed);
    let block: Vec<bf16> = (0..65_521).map(|_| bf16::from_f32(normal())).collect();
    gpu.upload(&(0..len).map(|i| block[i % block.len()]).collect::<Vec<_>>())
}

fn gemm_rate(gpu: &Gpu, timer: &Timer<'_>) -> Result<f64> {
    let n = 8192;
    let (x, w, y) = (tensor(gpu, n * n, 1)?, tensor(gpu, n * n, 2)?, gpu.alloc::<bf16>(n * n)?);
    let gemm = Gemm::new(gpu)?;
    let product = GemmProblem {
        m: n,
        n,
        k: n,
        a: GemmOperand { address: x.address(), transposed: false },
        b: GemmOperand { address: w.address(), transposed: true },
        c: y.address(),
        wide_operands: false,
        wide_result: false,
        accumulate: false,
    };
    // SAFETY: three square matrices of the product's size.
    let ms = timer.median(20, || unsafe { gemm.run(gpu, &product) })?;
    Ok(2.0 * (n as f64).powi(3) / f64::from(ms) / 1e9)
}

/// Milliseconds of forward and backward, and the visited fraction.
fn measure(gpu: &Gpu, timer: &Timer<'_>, shape: &Shape, acp: Acp) -> Result<(f64, f64, f64)> {
    let rows = shape.batch * shape.time;
    let width = shape.heads * shape.head_dim;
    let spec = AttentionSpec {
        acp,
        ..AttentionSpec::causal(
            shape.heads,
            shape.head_dim,
            Segments::uniform(shape.batch, shape.time),
        )
    };
    let [q, k, v, d_out] = [3, 4, 5, 6].map(|seed| tensor(gpu, rows * width, seed));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let gates =
        gpu.upload(&log_gates(Gates::LogSpaced, rows, shape.heads, 9).unwrap_or_default())?;
    let inputs = AttentionInputs { q: &q, k: &k, v: &v, log_gates: Some(&gates) };
    let attention = Attention::new(gpu, &spec, inputs)?;
    let repeats = if shape.time > 20_000 { 7 } else { 15 };
    let forward = timer.median(repeats, || attention.forward().map(drop))?;
    let out = attention.forward()?;
    let backward =
        timer.median(repeats, || attention.backward(&out.o, &out.lse, &d_out).map(drop))?;
    let tiles = gpu.download(&out.tiles)?;
    let sum = |i: usize| tiles.iter().skip(i).step_by(2).map(|&x| f64::from(x)).sum::<f64>();
    Ok((f64::from(forward), f64::from(backward), sum(0) / sum(1)))
}

/// Prints the table, for the shapes whose name contains `filter`.
pub fn table(gpu: &Gpu, filter: &str) -> Result<()> {
    let timer = Timer::new(gpu);
    let rate = gemm_rate(gpu, &timer)?;
    println!("cuBLASLt bf16 8192^3: {rate:.0} TFLOP/s");
    println!(
        "shape                    fwd ms  TFLOP/s  of GEMM | bwd ms  TFLOP/s  of GEMM | official, cuDNN (no gate)"
    );
    for shape in &SHAPES {
        let &Shape { batch, heads, time, head_dim, peers, pruned_peer } = shape;
        let name = format!("B{batch} H{heads} T{time:<6} d{head_dim:<4}");
        if !name.contains(filter) {
            continue;
        }
        let flops = 2.0 * (batch * heads * head_dim) as f64 * (time as f64).powi(2);
        let (fwd, bwd, _) = measure(gpu, &timer, shape, Acp::Off)?;
        let tera = |factor: f64, ms: f64| factor * flops / ms / 1e9;
        println!(
            "{name} {fwd:9.3} {:8.0} {:7.0}% | {bwd:7.3} {:8.0} {:7.0}% | {peers}",
            tera(1.0, fwd),
            100.0 * tera(1.0, fwd) / rate,
            tera(2.5, bwd),
            100.0 * tera(2.5, bwd) / rate,
        );
        let (pf, pb, visited) = measure(gpu, &timer, shape, Acp::auto())?;
        println!(
            "  pruned: visited {:.1}%, fwd {pf:.3} ms = {:.2} x visited x unpruned, bwd {pb:.3} ms = {:.2} x; official {pruned_peer} ms",
            100.0 * visited,
            pf / (visited * fwd),
            pb / (visited * bwd),
        );
    }
    Ok(())
}
