//! A single matmul with the kernels of decode steps, for tests of batch invariance.

use fox_tensor::{DType, Tensor};

use super::kernels::{
    BUCKETS, Family, MAX_ROWS, ROW_THREADS, Tiling, block_rows, bucket_of, product,
};
use super::params::{DecodeBlocked, DecodeMatmul, DecodeMatrix};
use super::step::launch_product;
use super::weights::{STEP, single};
use crate::Result;
use crate::backend::{Cuda, Precision};
use crate::ops::packed::Int8;

impl Cuda {
    /// `x[R, K] w[N, K]^T` in f32 with the kernel of the bucket of `R`; `None` for unsupported shapes.
    pub(super) fn multiply_rows(&self, x: &Tensor, w: &Tensor) -> Result<Option<Tensor>> {
        let (count, width, results) = (x.rows(), x.cols(), w.rows());
        let fits = self.precision == Precision::Bf16
            && self.gpu.generation().has_bf16_mma()
            && (1..=MAX_ROWS).contains(&count)
            && width.is_multiple_of(STEP)
            && w.cols() == width;
        if !fits {
            return Ok(None);
        }
        let padded = BUCKETS[bucket_of(count)];
        let family = Family::of(&self.gpu, padded, &[width]);
        let tiling = Tiling::new(family, padded, width, false);
        let in_place = tiling.reads_int8() && Int8::of(w)?.is_some();
        let kernel = product(&self.gpu, tiling, in_place)?;
        let block = block_rows(&self.gpu, family)?;
        let from = self.activation(x)?;
        // bf16 weights, alive until the matmul has been launched.
        let weights = if in_place { None } else { Some(self.weights(w)?) };
        let matrix = match &weights {
            Some(weights) => DecodeMatrix {
                w: weights.address().into(),
                rows: results,
                ..DecodeMatrix::default()
            },
            None => self.weight_matrix(w)?,
        };
        let blocked = self.gpu.alloc::<u16>(padded * width)?;
        let y = self.gpu.alloc::<f32>(padded * results)?;
        let params = DecodeBlocked {
            from: from.address().into(),
            to: blocked.address().into(),
            rows: count,
            padded,
            width,
        };
        let blocks = (count * width).div_ceil(ROW_THREADS).min(1024);
        let launch = block.launch([blocks, 1, 1], ROW_THREADS).params(params)?;
        // SAFETY: source and destination have the sizes named.
        unsafe { launch.run(|| format!("{count} rows of {width}"))? };
        let params = DecodeMatmul {
            x: blocked.address().into(),
            y: y.address().into(),
            matrices: single(matrix),
            width,
            stride: results,
            ..DecodeMatmul::default()
        };
        // SAFETY: x and y have room for the rows of the bucket, and w has `width` columns.
        unsafe { launch_product(&kernel, tiling, padded, params, false)? };
        let (out, at) = self.output([count, results], DType::F32, x.device())?;
        // SAFETY: y has at least `count` rows.
        unsafe { self.gpu.copy(at, y.address(), 4 * count * results)? };
        Ok(Some(out))
    }
}
