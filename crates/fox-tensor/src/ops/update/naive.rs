//! Sums of squares, blends, and AdamW with decoupled weight decay.

use crate::naive::{Naive, Values, dot, real, values_mut};
use crate::{AdamW, Blend, Result, Tensor, UpdateOps};

impl UpdateOps for Naive {
    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        tensors.iter().map(|x| real(x).map(|x| dot(x, x))).sum()
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        for x in [&mut *param, &mut *m, &mut *v] {
            self.unshare(x)?;
        }
        if let (Values::Real(p), Values::Real(m), Values::Real(v)) =
            (values_mut(param)?, values_mut(m)?, values_mut(v)?)
        {
            adamw(p, real(grad)?, m, v, step);
        }
        Ok(())
    }

    fn blend(&self, blends: &mut [Blend<'_>]) -> Result<()> {
        for blend in blends {
            let (keep, add) = blend.factors();
            let (x, y) = blend.pair();
            self.unshare(y)?;
            if let Values::Real(y) = values_mut(y)? {
                for (y, x) in y.iter_mut().zip(real(x)?) {
                    *y = f64::from(keep) * *y + f64::from(add) * x;
                }
            }
        }
        Ok(())
    }
}

/// One update of parameters, first and second moments.
fn adamw(p: &mut [f64], grad: &[f64], m: &mut [f64], v: &mut [f64], step: &AdamW) {
    let [lr, beta1, beta2, eps, decay, scale] =
        [step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_scale]
            .map(f64::from);
    let (correct1, correct2) =
        (1.0 - beta1.powf(step.step as f64), 1.0 - beta2.powf(step.step as f64));
    for i in 0..p.len() {
        let g = scale * grad[i];
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        let direction = (m[i] / correct1) / ((v[i] / correct2).sqrt() + eps);
        p[i] -= lr * (direction + decay * p[i]);
    }
}
