//! Output projection and cross-entropy.

use crate::naive::{Matrix, Naive, axpy, dot, int, logsumexp, matrix, maybe_real};
use crate::{IGNORE_LABEL, LossInputs, LossOps, LossOut, Result, check_linear_cross_entropy};

impl LossOps for Naive {
    fn linear_cross_entropy(&self, inputs: &LossInputs<'_>) -> Result<LossOut> {
        check_linear_cross_entropy(self, inputs)?;
        let LossInputs { x, w, labels, weights, teacher } = *inputs;
        let teacher = match teacher {
            Some(t) => Some((matrix(t.x)?, matrix(t.w)?, f64::from(t.weight))),
            None => None,
        };
        let weights = maybe_real(weights)?;
        let (loss, grads) =
            linear_cross_entropy(matrix(x)?, matrix(w)?, int(labels)?, weights, teacher);
        Ok(LossOut {
            loss: self.tensor(x.device(), loss, [x.rows()]),
            grads: grads.map(|(dx, dw)| (self.like(x, dx), self.like(w, dw))),
        })
    }
}

/// Loss of every row, and `(dx, dw)` when asked for.
type Losses = (Vec<f64>, Option<(Vec<f64>, Vec<f64>)>);

/// `loss[r] = logsumexp(logits[r]) - logits[r, label]`; with weights also `(dx, dw)` of the weighted sum, where a
/// teacher, `x`, `w` and its weight, contributes to the target.
fn linear_cross_entropy(
    x: Matrix<'_>,
    w: Matrix<'_>,
    labels: &[i32],
    weights: Option<&[f64]>,
    teacher: Option<(Matrix<'_>, Matrix<'_>, f64)>,
) -> Losses {
    let mut loss = vec![0.0; x.rows];
    let (mut dx, mut dw) = (vec![0.0; x.data.len()], vec![0.0; w.data.len()]);
    for r in 0..x.rows {
        if labels[r] == IGNORE_LABEL {
            continue;
        }
        let label = labels[r] as usize;
        let logits: Vec<f64> = (0..w.rows).map(|v| dot(x.row(r), w.row(v))).collect();
        let lse = logsumexp(&logits);
        loss[r] = lse - logits[label];
        let Some(weights) = weights else { continue };
        let mut target = vec![0.0; w.rows];
        target[label] = 1.0;
        if let Some((x, w, a)) = teacher {
            let logits: Vec<f64> = (0..w.rows).map(|v| dot(x.row(r), w.row(v))).collect();
            let lse = logsumexp(&logits);
            for (target, logit) in target.iter_mut().zip(&logits) {
                *target = (1.0 - a) * *target + a * (logit - lse).exp();
            }
        }
        for v in 0..w.rows {
            let dlogit = weights[r] * ((logits[v] - lse).exp() - target[v]);
            axpy(&mut dx[r * x.cols..][..x.cols], dlogit, w.row(v));
            axpy(&mut dw[v * x.cols..][..x.cols], dlogit, x.row(r));
        }
    }
    (loss, weights.map(|_| (dx, dw)))
}
