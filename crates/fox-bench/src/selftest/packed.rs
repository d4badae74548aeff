//! Weights in fewer bits: what they become, products with them, and the memory that they take.

use anyhow::Result;
use fox_tensor::cases::Rng;
use fox_tensor::{DType, Device, DeviceKind, INT8_BLOCK, WeightFormat};
use serde_json::json;

use super::log::Log;
use super::{TOLERANCE, distance, to_bf16};

/// Rows of the products: in each of the ways that a GPU has for them.
const ROWS: [usize; 5] = [1, 8, 12, 33, 256];

/// Results and widths of the products; rows of 96 and 2080 end in half a block of values that share a scale.
const PRODUCTS: [(usize, usize); 5] = [(24, 64), (200, 96), (1000, 1536), (130, 4096), (77, 2080)];

/// Memory that the device may allocate beside the weights, because of its granularity.
const SLACK: f64 = (64 << 10) as f64;

/// Compares weights with those of the CPU, and products with sums in f64.
pub(super) fn check(device: &Device, log: &mut Log) -> Result<bool> {
    let backend = device.backend();
    if backend.caps().packing.is_none() {
        return Ok(true);
    }
    let narrow = backend.caps().activation_type == DType::Bf16;
    let (mut worst, mut count, mut failures) = (0.0f64, 0, String::new());
    let formats = [WeightFormat::Bf16, WeightFormat::Int8];
    for (format, (results, width)) in formats.into_iter().flat_map(|f| PRODUCTS.map(|p| (f, p))) {
        let name = format!("{format:?} weights [{results}, {width}]");
        let mut rng = Rng::new(width as u64);
        let mut normals = |len: usize| -> Vec<f64> { (0..len).map(|_| rng.normal()).collect() };
        let w = normals(results * width);
        // Integers up to 127, which occurs in every block: neither bf16 nor 8 bits round them.
        let mut x = normals(ROWS[ROWS.len() - 1] * width);
        for row in x.chunks_mut(width) {
            row.iter_mut().for_each(|x| *x = (40.0 * *x).round().clamp(-127.0, 127.0));
            row.iter_mut().step_by(INT8_BLOCK).for_each(|x| *x = 127.0);
        }
        let before = backend.memory().in_use;
        let packed = device.from_f64(&w, [results, width])?.packed(format)?;
        let values = packed.to_f64()?;
        let cpu = fox_cpu::device().from_f64(&w, [results, width])?.packed(format)?.to_f64()?;
        if values != cpu {
            let different = values.iter().zip(&cpu).filter(|(a, b)| a != b).count();
            failures += &format!("  FAIL {name}: {different} are not those of the CPU\n");
        }
        // What a product reads.
        let read: Vec<f64> = match narrow {
            true => values.iter().copied().map(to_bf16).collect(),
            false => values,
        };
        let want: Vec<f64> = x
            .chunks(width)
            .flat_map(|x| read.chunks(width).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()))
            .collect();
        for rows in ROWS {
            let x = device.from_f64(&x[..rows * width], [rows, width])?;
            let mut compare = |what: &str, got: &[f64]| {
                let error = distance(got, &want[..rows * results]);
                (worst, count) = (worst.max(error), count + 1);
                if error.is_nan() || error > TOLERANCE {
                    failures +=
                        &format!("  FAIL {name}: {what} of {rows} rows is off by {error:.1e}\n");
                }
            };
            compare("the product", &backend.linear_fwd(&x, &packed, None)?.to_f64()?);
            let Some(ops) = backend.caps().slots else { continue };
            let Some(got) = ops.batch_invariant_linear(&x, &packed)? else { continue };
            let got = got.to_f64()?;
            compare("the product in slots", &got);
            let plain = device.from_f64(&read, [results, width])?;
            let plain = ops.batch_invariant_linear(&x, &plain)?.map(|y| y.to_f64()).transpose()?;
            if plain.as_ref() != Some(&got) {
                failures +=
                    &format!("  FAIL {name}: {rows} rows in slots have other bits unpacked\n");
            }
        }
        let held = backend.memory().in_use.saturating_sub(before) as f64;
        let padded = width.next_multiple_of(INT8_BLOCK);
        let most = (results * padded) as f64 * format.bytes_per_value() + SLACK;
        if backend.kind() == DeviceKind::Cuda && held > most {
            failures += &format!("  FAIL {name} hold {held} bytes, {most} are expected\n");
        }
    }
    let text = format!("  {count} products with packed weights, worst error {worst:.1e}\n");
    let figures = json!({
        "name": "packed weights", "cases": count, "worst_error": worst, "tolerance": TOLERANCE,
        "failures": failures,
    });
    log.check(failures.is_empty(), &(text + &failures), figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_passes() {
        assert!(check(&fox_cpu::device(), &mut Log::default()).unwrap());
    }
}
