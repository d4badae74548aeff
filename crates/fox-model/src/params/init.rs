//! Initial values. Every parameter has a random stream of its own, from the seed and its name, so
//! that adding or moving a parameter changes no other.

use super::{Init, ParamSpec};

/// The initial values of a parameter.
pub(super) fn values(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    let count = spec.count();
    match &spec.init {
        Init::Constant(value) => vec![*value; count],
        Init::Given(values) => values.clone(),
        Init::Normal { std, zero_row } => {
            let mut normal = Normal::new(seed, &spec.name);
            let mut values: Vec<f32> = Vec::with_capacity(count + 1);
            while values.len() < count {
                let (a, b) = normal.pair();
                values.extend([(a * std) as f32, (b * std) as f32]);
            }
            values.truncate(count);
            if let Some(row) = zero_row {
                let width = count / spec.dims[0];
                values[row * width..][..width].fill(0.0);
            }
            values
        }
    }
}

/// SplitMix64: each output is a bijective hash of a counter, so any start is a good one.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1]: safe for a logarithm.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// Standard normal values by Box and Muller.
struct Normal(SplitMix64);

impl Normal {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a of the name; the seed is hashed first, so that near seeds give far streams.
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let seed = SplitMix64(seed).next();
        Normal(SplitMix64(seed ^ name))
    }

    fn pair(&mut self) -> (f64, f64) {
        let radius = (-2.0 * self.0.unit().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.0.unit()).sin_cos();
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
            init,
        }
    }

    #[test]
    fn normal_values_have_the_moments_and_depend_on_seed_and_name_only() {
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
}
