//! AdamW with decoupled weight decay.

use crate::AdamW;

/// One update of parameters, first and second moments.
pub(super) fn adamw(p: &mut [f64], grad: &[f64], m: &mut [f64], v: &mut [f64], step: &AdamW) {
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
