//! Sums of log gates over ranges of pages, against the oracle.

use anyhow::Result;
use fox_tensor::cases::Rng;
use fox_tensor::{Device, PAGE, gate_totals};
use serde_json::json;

use super::log::Log;

/// Sums are computed in f64 from f32 gates.
const TOLERANCE: f64 = 1e-10;

pub(super) fn check(device: &Device, log: &mut Log) -> Result<bool> {
    let (mut worst, mut failures) = (0.0f64, String::new());
    for (seed, heads, rows) in [(0, [24, 24], 1024), (1, [3, 40], 200), (2, [1, 7], 5)] {
        let mut rng = Rng::new(seed);
        // Some gates forget everything.
        let gate =
            |rng: &mut Rng| if rng.chance(0.02) { -3e38 } else { -rng.normal().abs() as f32 };
        let gates: Vec<Vec<f32>> =
            heads.iter().map(|heads| (0..rows * heads).map(|_| gate(&mut rng)).collect()).collect();
        let first = rows / 7;
        let runs: Vec<_> = (first..rows).step_by(PAGE).map(|t| t..rows.min(t + PAGE)).collect();
        let totals = |device: &Device| -> Result<Vec<f64>> {
            let tensor =
                |(gates, heads): (&Vec<f32>, &usize)| device.from_f32(gates, [rows, *heads]);
            let tensors = gates.iter().zip(&heads).map(tensor).collect::<Result<Vec<_>, _>>()?;
            Ok(gate_totals(&tensors.iter().collect::<Vec<_>>(), &runs)?)
        };
        let (want, got) = (totals(&Device::naive())?, totals(device)?);
        let error = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs();
        let off = got.iter().zip(&want).map(error).fold(0.0, f64::max);
        worst = worst.max(off);
        let close = got.iter().zip(&want).all(|pair| error(pair) <= TOLERANCE);
        if got.len() != want.len() || !close {
            failures += &format!("  FAIL gate totals {seed}: off by {off:.1e}\n");
        }
    }
    let text = format!("  sums of gates over pages, worst error {worst:.1e}\n{failures}");
    let figures = json!({
        "name": "gate totals", "worst_error": worst, "tolerance": TOLERANCE, "failures": failures,
    });
    log.check(failures.is_empty(), &text, figures)
}
