//! Initial values. The random stream of a parameter depends on the seed and its name only, so that adding or moving
//! a parameter changes no other.

use fox_base::random::SplitMix64;

use super::{Init, ParamSpec};

/// The initial values of a parameter.
pub(super) fn values(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    let count = spec.count();
    match &spec.init {
        Init::Constant(value) => vec![*value; count],
        Init::Given(values) => values.iter().copied().cycle().take(count).collect(),
        Init::Uniform { bound } => drawn(spec, seed, |unit| bound * (2.0 * unit - 1.0)),
        Init::LogOfUniform { low, high } => {
            // The unit is never 0, so the logarithm is finite even for `low = 0`.
            drawn(spec, seed, |unit| (low + (high - low) * unit).ln())
        }
        Init::TimeStep { min, max, floor } => drawn(spec, seed, |unit| {
            let step = (min.ln() + (max.ln() - min.ln()) * unit).exp().max(*floor);
            // The inverse of softplus.
            step + (-(-step).exp_m1()).ln()
        }),
        Init::Normal { std, zero_row } => {
            let mut values = vec![0.0; count];
            fill_normal(&mut values, *std, &Normal::new(seed, &spec.name));
            if let Some(row) = zero_row {
                let width = count / spec.dims[0];
                values[row * width..][..width].fill(0.0);
            }
            values
        }
    }
}

/// Pairs of normal values, in chunks for all cores: a stream has random access, so the values are the same for any
/// number of chunks.
fn fill_normal(values: &mut [f32], std: f64, stream: &Normal) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let part = values.len().div_ceil(cores).max(1 << 16).next_multiple_of(2);
    std::thread::scope(|scope| {
        for (i, part_values) in values.chunks_mut(part).enumerate() {
            let mut normal = stream.after(i * part / 2);
            scope.spawn(move || {
                for pair in part_values.chunks_mut(2) {
                    let (a, b) = normal.pair();
                    let drawn = [(a * std) as f32, (b * std) as f32];
                    pair.copy_from_slice(&drawn[..pair.len()]);
                }
            });
        }
    });
}

/// One value for every uniform draw from the parameter's stream.
fn drawn(spec: &ParamSpec, seed: u64, value: impl Fn(f64) -> f64) -> Vec<f32> {
    let mut stream = Normal::new(seed, &spec.name).0;
    (0..spec.count()).map(|_| value(stream.uniform_positive()) as f32).collect()
}

/// Standard normal values by Box and Muller.
struct Normal(SplitMix64);

impl Normal {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a of the name; the seed is hashed first, so that near seeds give far streams.
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let seed = SplitMix64::new(seed).bits();
        Normal(SplitMix64::new(seed ^ name))
    }

    /// The same stream after so many pairs.
    fn after(&self, pairs: usize) -> Self {
        // Two draws to a pair.
        Normal(self.0.after(2 * pairs as u64))
    }

    fn pair(&mut self) -> (f64, f64) {
        let radius = (-2.0 * self.0.uniform_positive().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.0.uniform_positive()).sin_cos();
        (radius * cos, radius * sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParamGroup;

    fn spec(name: &str, init: Init) -> ParamSpec {
        ParamSpec {
            name: name.into(),
            dims: vec![101, 99],
            group: ParamGroup::Mlp,
            decay: true,
            trainable: true,
            matrices: vec![101],
            init,
        }
    }

    #[test]
    fn normal_init_has_the_right_moments() {
        let init = Init::Normal { std: 0.02, zero_row: Some(7) };
        let x = values(&spec("a", init.clone()), 1);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let std = (x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n).sqrt();
        let fourth = x.iter().map(|&v| (f64::from(v) / 0.02).powi(4)).sum::<f64>() / n;
        assert!(mean.abs() < 6e-4, "{mean}");
        assert!((std / 0.02 - 1.0).abs() < 0.03, "{std}");
        assert!((fourth - 3.0).abs() < 0.4, "{fourth}");
        assert!(x[7 * 99..8 * 99].iter().all(|&v| v == 0.0));
        assert!(x[6 * 99] != 0.0 && x[8 * 99] != 0.0);
        assert_eq!(x, values(&spec("a", init.clone()), 1));
        assert_ne!(x, values(&spec("a", init.clone()), 2));
        assert_ne!(x, values(&spec("b", init), 1));
    }

    /// The first values for a seed and a name, from an independent program.
    #[test]
    fn initial_weights_are_pinned() {
        let x = values(&spec("a", Init::Normal { std: 0.02, zero_row: None }), 1);
        let bits: [u32; 4] = std::array::from_fn(|i| x[i].to_bits());
        assert_eq!(bits, [0xbd18_b801, 0xbc92_b62c, 0xbc44_d03a, 0x3c1e_89fb]);
    }

    #[test]
    fn large_parameters_use_one_random_stream() {
        let mut large = vec![0.0; 3 * (1 << 16) + 5];
        fill_normal(&mut large, 0.5, &Normal::new(9, "large"));
        let mut normal = Normal::new(9, "large");
        for pair in large.chunks(2) {
            let (a, b) = normal.pair();
            assert_eq!(pair, &[(a * 0.5) as f32, (b * 0.5) as f32][..pair.len()]);
        }
    }

    #[test]
    fn other_inits_are_in_range() {
        let mean = |x: &[f32]| x.iter().map(|&v| f64::from(v)).sum::<f64>() / x.len() as f64;
        let x = values(&spec("a", Init::Uniform { bound: 0.5 }), 1);
        assert!(x.iter().all(|v| v.abs() <= 0.5) && mean(&x).abs() < 0.02);
        assert!(x.iter().any(|v| *v > 0.49) && x.iter().any(|v| *v < -0.49));
        let x = values(&spec("a", Init::LogOfUniform { low: 1.0, high: 16.0 }), 1);
        let back: Vec<f32> = x.iter().map(|v| v.exp()).collect();
        assert!(x.iter().all(|v| (0.0..2.7726).contains(v)) && (mean(&back) - 8.5).abs() < 0.3);
        let x = values(&spec("a", Init::TimeStep { min: 0.001, max: 0.1, floor: 0.002 }), 1);
        let steps: Vec<f32> = x.iter().map(|v| v.exp().ln_1p()).collect();
        assert!(steps.iter().all(|s| (0.00199..0.1001).contains(s)));
        let low = steps.iter().filter(|s| **s < 0.00201).count() as f64 / steps.len() as f64;
        // ln 2 of ln 100 is below the smallest time step.
        assert!((low - 2f64.ln() / 100f64.ln()).abs() < 0.02, "{low}");
    }
}
