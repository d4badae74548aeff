//! Variants of the additive scan's kernels: chunk and state sizes that fit shared memory.

use fox_tensor::{DType, ScanSpec};

use crate::{Error, Result};

/// Upper bounds on the static shared memory of the kernels, and of those of the backward.
const STATIC_BYTES: usize = 24 * 1024;
const STATIC_BYTES_BWD: usize = 26 * 1024;

/// Compile-time parameters of the kernels; see `scan_add.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScanShape {
    pub(crate) bf16: bool,
    /// Elements per access.
    pub(crate) vec: usize,
    /// Tokens of a chunk.
    pub(crate) chunk: usize,
    /// Padded widths of keys and values.
    pub(crate) dk: usize,
    pub(crate) dv: usize,
    /// Whether the decay is per channel, i.e. per row of the state.
    pub(crate) channels: bool,
}

impl ScanShape {
    /// The shape with the longest chunk whose tiles fit shared memory, including those of the backward if `backward`.
    pub(crate) fn new(
        dtype: DType,
        spec: &ScanSpec,
        channels: bool,
        backward: bool,
        shared_bytes: usize,
    ) -> Result<Self> {
        let padded = |width: usize| match width {
            0..=64 => Ok(64),
            65..=128 => Ok(128),
            _ => Err(Error::argument(
                "scan",
                format!("keys and values have at most 128 columns on the GPU, not {width}"),
            )),
        };
        let even = spec.key_dim.is_multiple_of(8) && spec.value_dim.is_multiple_of(8);
        let largest = ScanShape {
            bf16: dtype == DType::Bf16,
            vec: if even { 8 } else { 1 },
            chunk: 64,
            dk: padded(spec.key_dim)?,
            dv: padded(spec.value_dim)?,
            channels,
        };
        let shapes = [64, 32, 16].map(|chunk| ScanShape { chunk, ..largest });
        let wanted = |shape: &ScanShape| {
            let forward = shape.states_bytes().max(shape.read_bytes()) + STATIC_BYTES;
            if backward { forward.max(shape.grads_bytes() + STATIC_BYTES_BWD) } else { forward }
        };
        let fits = |shape: &ScanShape| wanted(shape) <= shared_bytes;
        shapes.into_iter().find(fits).ok_or_else(|| {
            let detail = format!(
                "states of {} x {} do not fit into the {shared_bytes} bytes of shared memory of this GPU",
                largest.dk, largest.dv
            );
            Error::argument("scan", detail)
        })
    }

    pub(crate) fn defines(self) -> Vec<String> {
        vec![
            format!("BF16={}", i32::from(self.bf16)),
            format!("VEC={}", self.vec),
            format!("CHUNK={}", self.chunk),
            format!("DK={}", self.dk),
            format!("DV={}", self.dv),
            format!("CHANNELS={}", i32::from(self.channels)),
        ]
    }

    pub(crate) fn state_len(self) -> usize {
        self.dk * self.dv
    }

    /// Bytes of a tile in shared memory.
    fn tile(self, rows: usize, columns: usize) -> usize {
        rows * (columns * if self.bf16 { 2 } else { 4 } + 16)
    }

    /// Pipeline stages, as in `scan_add.cuh`.
    fn stages(self) -> usize {
        if self.bf16 && self.state_len() <= 128 * 64 { 2 } else { 1 }
    }

    pub(crate) fn states_bytes(self) -> usize {
        self.tile(self.chunk, self.dk) + 3 * self.tile(self.chunk, self.dv)
    }

    pub(crate) fn read_bytes(self) -> usize {
        let head = self.tile(self.chunk, self.dv) + self.tile(self.dk, self.dv);
        let heads = if self.channels { 1 } else { self.stages() };
        2 * self.tile(self.chunk, self.dk) + heads * head + self.tile(self.chunk, self.chunk)
    }

    pub(crate) fn grads_bytes(self) -> usize {
        let head = 2 * (self.tile(self.chunk, self.dv) + self.tile(self.dk, self.dv));
        let (keys, heads) = if self.channels { (3, 1) } else { (2, self.stages()) };
        keys * self.tile(self.chunk, self.dk) + heads * head + 2 * self.tile(self.chunk, self.chunk)
    }
}

/// Typical shapes, for compilation checks.
pub(super) fn typical() -> [ScanShape; 6] {
    let shape =
        |bf16, chunk, dk, dv, channels, vec| ScanShape { bf16, vec, chunk, dk, dv, channels };
    [
        shape(true, 64, 128, 64, false, 8),
        shape(true, 64, 128, 128, true, 8),
        shape(true, 32, 64, 64, false, 1),
        shape(false, 64, 128, 64, false, 8),
        shape(false, 16, 128, 128, true, 8),
        shape(false, 64, 64, 64, true, 1),
    ]
}
