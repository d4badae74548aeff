//! Products with few rows, by weight format, against the rate at which memory is read, for every instruction set of this
//! CPU or for those whose name contains an argument: `cargo bench -p fox-cpu --bench thin_products -- avx2`.
//!
//! Times are those that the threads really ran, summed over them, as Linux counts them: on a busy machine the clock on
//! the wall says little. So rates are per core.
#![allow(clippy::unwrap_used)]

use std::fs;

use fox_cpu::{Level, Options};
use fox_tensor::WeightFormat;

/// Seconds that all threads of this process have run.
fn cpu_seconds() -> f64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let run = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path().join("schedstat")).unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    tasks.map(|entry| run(entry.unwrap())).sum::<f64>() / 1e9
}

/// The best of some rounds.
fn best(mut f: impl FnMut()) -> f64 {
    let mut round = || {
        let start = cpu_seconds();
        f();
        cpu_seconds() - start
    };
    (0..8).map(|_| round()).fold(f64::INFINITY, f64::min)
}

fn main() {
    let only: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    for level in Level::available() {
        if only.is_empty() || only.iter().any(|text| level.name().contains(text)) {
            measure(level);
        }
    }
}

fn measure(level: Level) {
    let options = Options { threads: Some(1), level: Some(level), ..Default::default() };
    let device = fox_cpu::device_with(options).unwrap();
    let backend = device.backend();
    let (n, k, count) = (4096, 1536, 16);
    let values: Vec<f32> = (0..n * k).map(|i| ((i * 7919) % 997) as f32 / 997.0 - 0.5).collect();
    let many = device.full([1 << 13, 1 << 14], 0.5).unwrap();
    let time = best(|| assert!(backend.sum_squares(&[&many]).unwrap() > 0.0));
    let memory = (4 * many.len()) as f64 / time;
    println!("{}: memory {:.1} GB/s", level.name(), memory / 1e9);
    for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Int8] {
        let pack = |_| {
            let w = device.from_f32(&values, [n, k]).unwrap();
            w.packed(format).unwrap()
        };
        let weights: Vec<_> = (0..count).map(pack).collect();
        for rows in [1, 2, 4, 8, 16, 24, 64] {
            let x = device.from_f32(&values[..rows * k], [rows, k]).unwrap();
            let time = best(|| {
                for w in &weights {
                    backend.linear_fwd(&x, w, None).unwrap();
                }
            });
            let rate = (n * k * count) as f64 * format.bytes_per_value() / time;
            println!(
                "{format:?} x {rows:2} rows: {:5.1} GB/s ({:5.1}% of memory), {:6.1} GFLOP/s",
                rate / 1e9,
                100.0 * rate / memory,
                2.0 * (rows * n * k * count) as f64 / time / 1e9
            );
        }
    }
}
