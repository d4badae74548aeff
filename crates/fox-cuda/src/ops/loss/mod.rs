//! Fused output projection and cross-entropy in chunks of rows: the full logits are never materialized.

use fox_tensor::{DType, LOSS_CHUNK_BYTES, LossInputs, LossOps, LossOut};

use super::linear::{GemmOperand, GemmShape};
use crate::Source;
use crate::backend::Cuda;
use crate::backend::launcher::{Op, Variant, plain_variants};
use crate::backend::storage::{Data, memory};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;

const LOSS: Source = source!("loss", [], [CrossEntropy]);

kernel_params! {
    list struct CrossEntropy {
        /// `[R]`.
        loss: Ptr<f32>,
        /// `[R, V]`; overwritten by their gradient.
        logits: Ptr<Real>,
        /// `[R]`.
        labels: ConstPtr<i32>,
        /// `[R]`; null without gradients.
        weights: ConstPtr<f32>,
        /// A teacher's logits `[R, V]`, or null.
        teacher: ConstPtr<Real>,
        vocab: usize,
        /// Weight of the teacher in the target.
        teacher_weight: f32,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(LOSS)
}

/// Rows and columns of a tile of a large GEMM.
const TILE: [usize; 2] = [128, 256];

/// Rows of a chunk, from shapes alone. The gradient of `x` has only `width` columns, so that a small chunk has fewer
/// tiles than the GPU has multiprocessors, and every chunk reads and writes the f32 gradient of `w`. Hence the chunk
/// between half and all of `limit` rows whose tiles best fill whole waves; of equal ones the largest.
fn chunk_rows(rows: usize, width: usize, limit: usize, processors: usize) -> usize {
    let most = limit / TILE[0];
    if rows <= limit || most == 0 {
        return limit.clamp(1, rows.max(1));
    }
    let columns = width.div_ceil(TILE[1]);
    // Tiles per slot of all waves, as a fraction.
    let filled = |bands: usize| {
        let tiles = bands * columns;
        (tiles, tiles.div_ceil(processors) * processors)
    };
    let better = |a: usize, b: usize| {
        let ((tiles, slots), (best_tiles, best_slots)) = (filled(a), filled(b));
        if tiles * best_slots >= best_tiles * slots { a } else { b }
    };
    TILE[0] * (most.div_ceil(2)..=most).fold(most.div_ceil(2), |best, bands| better(bands, best))
}

impl LossOps for Cuda {
    fn linear_cross_entropy(&self, inputs: &LossInputs<'_>) -> fox_tensor::Result<LossOut> {
        fox_tensor::check_linear_cross_entropy(self, inputs)?;
        let _span = self.span("cross-entropy")?;
        let LossInputs { x, w, labels, weights, teacher } = *inputs;
        let (rows, width, vocab, device) = (x.rows(), x.cols(), w.rows(), x.device());
        let dtype = self.activations();
        let (loss, loss_at) = self.output([rows], DType::F32, device)?;
        let grads = match weights {
            Some(_) => {
                let dx = self.output(x.shape(), dtype, device)?;
                Some((dx, self.output(w.shape(), DType::F32, device)?))
            }
            None => None,
        };
        let (x, w) = (self.activation(x)?, self.weights(w)?);
        let weights = weights.map(|x| self.real(x)).transpose()?;
        let labels = memory(labels)?.data.address();
        // Gradients overwrite the logits, in the type of GEMM operands. Without gradients logits are f32.
        let logit_type = if grads.is_some() { dtype } else { DType::F32 };
        let limit = LOSS_CHUNK_BYTES / (vocab * logit_type.size());
        let step = chunk_rows(rows, width, limit, self.gpu.processors() as usize);
        let logits = Data::alloc(&self.gpu, step * vocab, logit_type)?;
        // The teacher only affects the gradient.
        let teacher = match teacher.filter(|_| grads.is_some()) {
            Some(t) => {
                let logits = Data::alloc(&self.gpu, step * vocab, logit_type)?;
                Some((self.activation(t.x)?, self.weights(t.w)?, t.x.cols(), t.weight, logits))
            }
            None => None,
        };
        let matrix = |address: u64, transposed: bool| GemmOperand { address, transposed };
        let variant = Variant::plain(logit_type, vocab);
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let x_at = x.address() + (first * width * dtype.size()) as u64;
            let sizes = GemmShape { m: count, n: vocab, k: width };
            let (left, right) = (matrix(x_at, false), matrix(w.address(), true));
            // SAFETY: shapes are validated at entry; `count` rows lie inside `x` and inside the logits.
            unsafe { self.multiply(left, right, logits.address(), sizes, logit_type, false)? };
            if let Some((x, w, width, _, logits)) = &teacher {
                let x_at = x.address() + (first * width * dtype.size()) as u64;
                let sizes = GemmShape { m: count, n: vocab, k: *width };
                let (left, right) = (matrix(x_at, false), matrix(w.address(), true));
                // SAFETY: as above.
                unsafe { self.multiply(left, right, logits.address(), sizes, logit_type, false)? };
            }
            let offset = 4 * first as u64;
            let params = CrossEntropy {
                loss: (loss_at + offset).into(),
                logits: logits.address().into(),
                labels: (labels + offset).into(),
                weights: weights.as_ref().map_or(0, |w| w.address() + offset).into(),
                teacher: teacher.as_ref().map_or(0, |(.., logits)| logits.address()).into(),
                vocab,
                teacher_weight: teacher
                    .as_ref()
                    .map_or(0.0, |(.., teacher_weight, _)| *teacher_weight),
            };
            let op = Op::new(LOSS, "cross_entropy", variant, [count, 1], 512);
            // SAFETY: shapes and every label are validated at entry; scratch holds `step` rows of logits.
            unsafe { self.launch(&op, params)? };
            let Some(((_, dx_at), (_, dw_at))) = &grads else { continue };
            let dx_at = dx_at + (first * width * dtype.size()) as u64;
            let sizes = GemmShape { m: count, n: width, k: vocab };
            let d = logits.address();
            let (left, right) = (matrix(d, false), matrix(w.address(), false));
            // SAFETY: as above; the gradients have the shapes of `x` and `w`.
            unsafe { self.multiply(left, right, dx_at, sizes, dtype, false)? };
            let sizes = GemmShape { m: vocab, n: width, k: count };
            let (left, right) = (matrix(d, true), matrix(x_at, false));
            // SAFETY: as above.
            unsafe { self.multiply(left, right, *dw_at, sizes, DType::F32, first > 0)? };
        }
        Ok(LossOut { loss, grads: grads.map(|((dx, _), (dw, _))| (dx, dw)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fill_whole_waves() {
        let rows =
            |rows, width, vocab| chunk_rows(rows, width, LOSS_CHUNK_BYTES / (2 * vocab), 132);
        // 44 x 3, 33 x 4 and 44 x 6 tiles for 132 multiprocessors.
        assert_eq!(rows(32768, 768, 50304), 44 * 128);
        assert_eq!(rows(32768, 1024, 50304), 33 * 128);
        assert_eq!(rows(16384, 1536, 50304), 44 * 128);
        // All rows at once, and single rows of a vocabulary beyond the limit.
        assert_eq!(rows(6000, 768, 50304), 6000);
        assert_eq!(rows(32768, 512, 256), 32768);
        assert_eq!(rows(10, 512, LOSS_CHUNK_BYTES), 1);
        assert_eq!(rows(0, 512, 256), 1);
        for (count, width, vocab) in
            [(100_000, 64, 300_000), (9000, 4096, 131_072), (7, 8, 1 << 24)]
        {
            let chunk = rows(count, width, vocab);
            assert!(chunk * vocab * 2 <= LOSS_CHUNK_BYTES.max(vocab * 2), "{chunk} x {vocab}");
        }
    }
}
