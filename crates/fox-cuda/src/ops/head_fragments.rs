//! How the heads of all rows are dealt out to thread blocks, for kernels that include `head_fragments.cuh`.

use fox_tensor::{Activation, DType, Device, Tensor};

use crate::backend::launcher::{Op, Variant};
use crate::backend::{Cuda, f32_buffer};
use crate::{Buffer, Result, Source};

/// Threads of a block, at most.
const THREADS: usize = 256;

/// The grid: a thread block takes some heads of a slice of rows.
pub(crate) struct HeadGrid {
    variant: Variant,
    heads_per_block: usize,
    head_blocks: usize,
    pub(crate) rows_per_slice: usize,
    pub(crate) slices: usize,
}

impl HeadGrid {
    pub(crate) fn new(
        dtype: DType,
        head_dim: usize,
        heads: usize,
        rows: usize,
        backward: bool,
    ) -> Self {
        let variant = Variant::heads(dtype, head_dim);
        let heads_per_block = heads.min(THREADS / variant.lanes);
        // The backward writes partial weight gradients once per slice, so longer slices write less; but every
        // multiprocessor needs several slices. The forward writes none; a thread prefetches four rows.
        let longest = if backward { 16 } else { 4 };
        let rows_per_slice = (rows / 2048).clamp(1, longest);
        HeadGrid {
            variant,
            heads_per_block,
            head_blocks: heads.div_ceil(heads_per_block),
            rows_per_slice,
            slices: rows.div_ceil(rows_per_slice),
        }
    }

    /// Whole warps.
    fn threads(&self) -> usize {
        (self.heads_per_block * self.variant.lanes).next_multiple_of(32)
    }

    /// Bytes of shared memory for one head in f32 for each head of the block.
    pub(crate) fn head_bytes(&self) -> usize {
        let Variant { lanes, chunks, vec, .. } = self.variant;
        4 * self.threads() / lanes * lanes * chunks * vec
    }

    pub(crate) fn op(&self, source: Source, entry: &'static str, shared: usize) -> Op {
        let (variant, block) = (self.variant, self.threads());
        Op { source, entry, variant, grid: [self.slices, self.head_blocks], block, shared }
    }
}

/// Typical variants of a source, for compilation checks.
pub(crate) fn variants(source: Source) -> Vec<(Source, Vec<String>)> {
    let of = |dtype| [64, 96, 128, 29].map(|dim| (source, Variant::heads(dtype, dim).defines()));
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

impl Cuda {
    /// The gradient of a norm's `len` weights from the sums of the slices, `partial: [slices, width]`. Where
    /// heads share the weights, `len` is the width of one.
    pub(crate) fn head_weights(
        &self,
        partial: &Buffer<f32>,
        slices: usize,
        width: usize,
        len: usize,
        device: &Device,
    ) -> Result<Tensor> {
        let sums = self.column_sums(partial, [slices, width], None, device)?;
        match len == width {
            true => Ok(sums),
            false => self.column_sums(f32_buffer(&sums)?, [width / len, len], None, device),
        }
    }
}

/// The code of a nonlinearity in `real.cuh`.
pub(crate) fn activation_code(act: Activation) -> i32 {
    match act {
        Activation::Sigmoid => 0,
        Activation::Silu => 1,
    }
}
