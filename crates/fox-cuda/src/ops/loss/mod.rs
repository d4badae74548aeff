//! Fused output projection and cross-entropy in chunks of rows: the full logits are never materialized.

use fox_tensor::{DType, LossInputs, LossOps, LossOut};

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

/// Maximum logits of a chunk.
const LOGITS: usize = 128 << 20;

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
        let step = (LOGITS / vocab).clamp(1, rows.max(1));
        // Gradients overwrite the logits, in the type of GEMM operands. Without gradients logits are f32.
        let logit_type = if grads.is_some() { dtype } else { DType::F32 };
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
