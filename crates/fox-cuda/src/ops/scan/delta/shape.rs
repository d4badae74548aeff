//! Variants of the delta rule's kernels and their shared memory.

use fox_tensor::ScanSpec;

use crate::{Error, Result};

/// Tokens of a chunk.
pub(crate) const CHUNK: usize = 64;
/// State columns per block of `delta_states`.
pub(crate) const STATE_COLUMNS: usize = 32;
/// Channels per block of `delta_channel_gradients`.
pub(crate) const CHANNEL_SLAB: usize = 32;
/// Its shared memory in bytes: queries, keys, prefix sums in two floats, flows, and decayed keys and queries; both
/// products; sums.
pub(crate) const CHANNEL_BYTES: usize =
    4 * (8 * CHUNK * (CHANNEL_SLAB + 1) + 2 * CHUNK * CHUNK + CHANNEL_SLAB) + 64;
/// Maximum width of keys.
const MAX_KEY_DIM: usize = 256;
/// Bytes of `Factors` in `scan_delta.cuh`.
const FACTOR_BYTES: usize = 4 * 5 * CHUNK;
/// Upper bound on the static shared memory of the kernels.
const STATIC_BYTES: usize = 1024;

/// The pass whose kernels must fit shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// Compile-time parameters of the kernels; see `scan_delta.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeltaShape {
    bf16: bool,
    /// Whether decays are per channel.
    pub(crate) channel: bool,
    /// Elements per access.
    vec: usize,
    /// Widths of keys and values, rounded up.
    pub(crate) dk: usize,
    pub(crate) dv: usize,
    value_columns: usize,
    stages: usize,
    stages_bwd: usize,
    stages_gradients: usize,
    /// Whether tiles of keys share memory in the backward, where they do not fit side by side.
    narrow: bool,
}

impl DeltaShape {
    /// The variant for these head widths on a GPU with `limit` bytes of shared memory per block; an error if the kernels
    /// of the pass do not fit.
    pub(crate) fn new(
        spec: &ScanSpec,
        channel: bool,
        bf16: bool,
        limit: usize,
        pass: Pass,
    ) -> Result<Self> {
        let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
        let limit = limit - STATIC_BYTES;
        // Few sizes, few compilations.
        let rounded = |width: usize| width.next_multiple_of(32).max(64);
        let dv = rounded(value_dim);
        let mut shape = DeltaShape {
            bf16,
            channel,
            vec: if key_dim.is_multiple_of(8) && value_dim.is_multiple_of(8) { 8 } else { 1 },
            dk: rounded(key_dim),
            dv,
            value_columns: STATE_COLUMNS,
            stages: 1,
            stages_bwd: 1,
            stages_gradients: 1,
            narrow: false,
        };
        shape.narrow = pass == Pass::Backward && shape.needed(pass) > limit;
        let needed = shape.needed(pass);
        if key_dim > MAX_KEY_DIM || needed > limit {
            return Err(Error::argument(
                "scan",
                format!(
                    "the delta rule's {pass:?} pass with keys of width {key_dim} takes {needed} bytes of shared memory; this GPU has {limit} to spare, and keys are at most {MAX_KEY_DIM} wide"
                ),
            ));
        }
        // The largest size that fits; two blocks per multiprocessor for the kernels that are parallel over chunks.
        let half = limit / 2;
        let best = |sizes: &[usize], fits: &dyn Fn(usize) -> bool, least: usize| {
            sizes.iter().copied().find(|&size| fits(size)).unwrap_or(least)
        };
        let of = |value_columns| DeltaShape { value_columns, ..shape };
        let fits = |value_columns: usize| {
            dv.is_multiple_of(value_columns)
                && of(value_columns).prepare_bwd().max(of(value_columns).output()) <= half
        };
        let value_columns = best(&[128, 96, 64], &fits, STATE_COLUMNS);
        if shape.narrow {
            return Ok(DeltaShape { value_columns, ..shape });
        }
        let stages = best(&[3, 2], &|n| DeltaShape { stages: n, ..shape }.states() <= limit, 1);
        let stages_bwd =
            best(&[3, 2], &|n| DeltaShape { stages_bwd: n, ..shape }.states_bwd() <= limit, 1);
        let stages_gradients =
            best(&[2], &|n| DeltaShape { stages_gradients: n, ..shape }.gradients() <= limit, 1);
        shape = DeltaShape { value_columns, stages, stages_bwd, stages_gradients, ..shape };
        Ok(shape)
    }

    pub(crate) fn defines(self) -> Vec<String> {
        let numbers = [
            ("BF16", usize::from(self.bf16)),
            ("CHANNEL", usize::from(self.channel)),
            ("CHANNEL_BYTES", CHANNEL_BYTES),
            ("VEC", self.vec),
            ("DK", self.dk),
            ("DV", self.dv),
            ("VALUE_COLUMNS", self.value_columns),
            ("STAGES", self.stages),
            ("STAGES_BWD", self.stages_bwd),
            ("STAGES_GRADIENTS", self.stages_gradients),
            ("NARROW", usize::from(self.narrow)),
            ("PREPARE_BYTES", self.prepare_bwd()),
            ("STATES_BYTES", self.states()),
            ("STATES_BWD_BYTES", self.states_bwd()),
            ("OUTPUT_BYTES", self.output()),
            ("GRADIENTS_BYTES", self.gradients()),
        ];
        numbers.iter().map(|(name, n)| format!("{name}={n}")).collect()
    }

    fn needed(&self, pass: Pass) -> usize {
        match pass {
            Pass::Forward => self.prepare().max(self.states()).max(self.output()),
            Pass::Backward => self.prepare_bwd().max(self.states_bwd()).max(self.gradients()),
        }
    }

    /// Bytes of a tile, with rows padded by 16 bytes.
    fn tile(&self, rows: usize, columns: usize) -> usize {
        rows * (columns * if self.bf16 { 2 } else { 4 } + 16)
    }

    fn keys(&self) -> usize {
        self.tile(CHUNK, self.dk)
    }

    fn square(&self) -> usize {
        self.tile(CHUNK, CHUNK)
    }

    fn state_columns(&self) -> usize {
        self.tile(CHUNK, STATE_COLUMNS)
    }

    fn state(&self) -> usize {
        self.tile(self.dk, STATE_COLUMNS)
    }

    /// Shared memory of `delta_prepare` in bytes; the other kernels follow.
    pub(crate) fn prepare(&self) -> usize {
        let system = 2 * 4 * CHUNK * (CHUNK + 4);
        self.keys()
            + self.tile(CHUNK, self.value_columns)
            + system
            + 2 * self.square()
            + FACTOR_BYTES
    }

    pub(crate) fn prepare_bwd(&self) -> usize {
        self.prepare() + self.keys()
    }

    pub(crate) fn states(&self) -> usize {
        let stage = 2 * self.keys() + self.state_columns() + FACTOR_BYTES;
        self.stages * stage + self.state() + self.state_columns()
    }

    pub(crate) fn states_bwd(&self) -> usize {
        let keys = if self.narrow { 1 } else { 3 } * self.keys();
        let stage = keys + 2 * self.state_columns() + FACTOR_BYTES;
        self.stages_bwd * stage + self.state() + 2 * self.state_columns()
    }

    pub(crate) fn output(&self) -> usize {
        let slice = self.tile(self.dk, self.value_columns) + self.tile(CHUNK, self.value_columns);
        2 * self.keys() + slice + self.square() + FACTOR_BYTES
    }

    pub(crate) fn gradients(&self) -> usize {
        let stage = 2 * self.state() + 3 * self.state_columns();
        let (sums, keys) = (4 * 14 * CHUNK, 2 * self.keys());
        let first = match self.narrow {
            true => stage.max(keys),
            false => self.stages_gradients * stage + keys,
        };
        first + 3 * self.square() + self.state_columns() + FACTOR_BYTES + sums
    }
}

/// Typical shapes, for compilation checks.
pub(super) fn typical() -> Vec<DeltaShape> {
    let of = |(channel, bf16, key_dim, value_dim)| {
        let spec = one_head(key_dim, value_dim);
        DeltaShape::new(&spec, channel, bf16, 227 * 1024, Pass::Backward).ok()
    };
    let plain = [(false, true, 128, 128), (false, true, 5, 3), (false, false, 5, 3)];
    // The last two are narrow.
    let channel = [(true, true, 128, 128), (true, false, 5, 3), (true, false, 256, 64)];
    let plain = plain.into_iter().chain([(false, false, 256, 64)]);
    plain.chain(channel).filter_map(of).collect()
}

fn one_head(key_dim: usize, value_dim: usize) -> ScanSpec {
    ScanSpec {
        heads: 1,
        key_heads: 1,
        key_dim,
        value_dim,
        scale: 1.0,
        update: fox_tensor::StateUpdate::Delta,
        segments: fox_tensor::Segments::uniform(1, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: usize = 227 * 1024;
    const SMALL: usize = 99 * 1024;

    #[test]
    fn published_head_dims_have_occupancy_two_on_hopper() {
        let shape =
            DeltaShape::new(&one_head(128, 128), false, true, HOPPER, Pass::Backward).unwrap();
        assert_eq!((shape.dk, shape.dv, shape.value_columns, shape.vec), (128, 128, 128, 8));
        assert!(2 * shape.prepare_bwd() <= HOPPER && 2 * shape.output() <= HOPPER);
        assert_eq!((shape.stages, shape.stages_bwd, shape.stages_gradients), (3, 3, 2));
    }

    #[test]
    fn wide_keys_share_memory_in_the_backward() {
        let of = |channel, bf16, key_dim, limit| {
            DeltaShape::new(&one_head(key_dim, 256), channel, bf16, limit, Pass::Backward).unwrap()
        };
        for channel in [false, true] {
            let wide = of(channel, false, 256, HOPPER);
            assert!(wide.narrow && wide.prepare_bwd() <= HOPPER - STATIC_BYTES);
            assert!(wide.states_bwd().max(wide.gradients()) <= HOPPER - STATIC_BYTES);
            assert!(
                !of(channel, true, 256, HOPPER).narrow && !of(channel, false, 128, HOPPER).narrow
            );
            assert!(of(channel, true, 128, SMALL).narrow);
        }
    }

    #[test]
    fn oversized_heads_are_rejected() {
        let of = |key_dim, limit, pass| {
            DeltaShape::new(&one_head(key_dim, 128), false, true, limit, pass)
        };
        assert!(of(128, SMALL, Pass::Forward).is_ok());
        assert!(of(192, SMALL, Pass::Backward).is_err());
        assert!(of(64, SMALL, Pass::Backward).is_ok());
        assert!(of(257, HOPPER, Pass::Forward).is_err());
    }
}
