//! Output projection and cross-entropy, some rows at a time: all logits are never there at once.

use fox_tensor::{DType, LossOut, Tensor};

use super::launcher::{Op, Variant};
use super::linear::Sizes;
use super::storage::{Data, memory};
use super::{Cuda, address, int};
use crate::gemm::Matrix;
use crate::{Result, Source};

/// Logits that are held at once.
const LOGITS: usize = 128 << 20;

impl Cuda {
    pub(super) fn cross_entropy(
        &self,
        x: &Tensor,
        w: &Tensor,
        labels: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<LossOut> {
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
        // Gradients take the logits' place, in the type that products want. Losses alone are worth f32.
        let logit_type = if grads.is_some() { dtype } else { DType::F32 };
        let logits = Data::alloc(&self.gpu, step * vocab, logit_type)?;
        let matrix = |address: u64, transposed: bool| Matrix { address, transposed };
        let variant = Variant::plain(logit_type, vocab);
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let x_at = x.address() + (first * width * dtype.size()) as u64;
            let sizes = Sizes { m: count, n: vocab, k: width };
            let (left, right) = (matrix(x_at, false), matrix(w.address(), true));
            self.multiply(left, right, logits.address(), sizes, logit_type, false)?;
            let offset = 4 * first as u64;
            let args = [
                (loss_at + offset).into(),
                logits.address().into(),
                (labels + offset).into(),
                if weights.is_some() { address(&weights) + offset } else { 0 }.into(),
                int(vocab).into(),
            ];
            let op = Op {
                source: Source::LOSS,
                entry: "cross_entropy",
                variant,
                grid: [count, 1],
                block: 512,
                shared: 0,
                args: &args,
            };
            // SAFETY: parameters as declared in loss.cu; the tape checked labels and shapes.
            unsafe { self.launch(&op)? };
            let Some(((_, dx_at), (_, dw_at))) = &grads else { continue };
            let dx_at = dx_at + (first * width * dtype.size()) as u64;
            let sizes = Sizes { m: count, n: width, k: vocab };
            let d = logits.address();
            self.multiply(
                matrix(d, false),
                matrix(w.address(), false),
                dx_at,
                sizes,
                dtype,
                false,
            )?;
            let sizes = Sizes { m: vocab, n: width, k: count };
            let (left, right) = (matrix(d, true), matrix(x_at, false));
            self.multiply(left, right, *dw_at, sizes, DType::F32, first > 0)?;
        }
        Ok(LossOut { loss, grads: grads.map(|((dx, _), (dw, _))| (dx, dw)) })
    }
}
