//! Measured peaks of a device, against which speeds are reported (roofline).

use std::time::{Duration, Instant};

use crate::{Device, Result};

/// Measures the matmul peak of this device in FLOP/s.
///
/// Square products from size 512 on, each a few times, until one takes long enough for the timer. The fastest call
/// counts, because other load on the machine can only slow it down. Takes about a second.
pub fn matmul_rate(device: &Device) -> Result<f64> {
    matmul_rate_within(device, Duration::MAX)
}

/// [`matmul_rate`] that starts no further product once `limit` has passed.
pub fn matmul_rate_within(device: &Device, limit: Duration) -> Result<f64> {
    /// Seconds of a product that is long enough for the timer.
    const LONG: f64 = 0.01;
    // The first product of a process on a GPU loads libraries, which does not count towards the limit.
    let warm = device.full([64, 64], 0.5)?.to_activations()?;
    device.backend().linear_fwd(&warm, &warm, None)?.to_f32()?;
    let (mut best, begin) = (0.0f64, Instant::now());
    for (size, calls) in [(512, 24), (1024, 8), (2048, 3), (4096, 3), (8192, 5)] {
        if best > 0.0 && begin.elapsed() > limit {
            break;
        }
        let values: Vec<f32> = (0..size * size).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
        let x = device.from_f32(&values, [size, size])?.to_activations()?;
        let flops = 2.0 * (size as f64).powi(3);
        let mut shortest = f64::INFINITY;
        for _ in 0..calls {
            if best.max(1.0 / shortest) > 0.0 && begin.elapsed() > limit {
                break;
            }
            let start = Instant::now();
            let y = device.backend().linear_fwd(&x, &x, None)?;
            // Reading one row back synchronizes with a GPU.
            y.slice_rows(0, 1)?.to_f32()?;
            shortest = shortest.min(start.elapsed().as_secs_f64());
        }
        best = best.max(flops / shortest);
        if size >= 2048 && shortest > LONG {
            break;
        }
    }
    Ok(best)
}

/// Measures the memory bandwidth of this device in bytes per second, by a reduction over 512 MiB, which exceeds any
/// cache. Takes about a second.
pub fn memory_rate(device: &Device) -> Result<f64> {
    let x = device.full([1 << 13, 1 << 14], 0.5)?;
    let mut best = 0.0f64;
    for _ in 0..12 {
        let start = Instant::now();
        device.backend().sum_squares(&[&x])?;
        best = best.max((4 * x.len()) as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}
