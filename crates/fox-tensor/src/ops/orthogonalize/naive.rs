use super::{MatrixOps, MatrixStack, NEWTON_SCHULZ};
use crate::Result;
use crate::naive::{Naive, Values, values_mut};

impl MatrixOps for Naive {
    fn orthogonalize(&self, stacks: &mut [MatrixStack<'_>], steps: usize) -> Result<()> {
        for stack in stacks {
            self.unshare(stack.x())?;
            let (cols, parts) = (stack.cols(), stack.parts().to_vec());
            let Values::Real(values) = values_mut(stack.x())? else { continue };
            let mut rest = &mut values[..];
            for part in parts {
                let (x, after) = rest.split_at_mut(part.rows * cols);
                newton_schulz(x, part.rows, cols, steps, |x| x);
                x.iter_mut().for_each(|x| *x *= f64::from(part.factor));
                rest = after;
            }
        }
        Ok(())
    }
}

/// Orthogonalises `x: [rows, cols]`. Matrices are rounded by `round` wherever a device with products of few
/// bits would have to store them: what that does to the result is such a device's allowance.
pub fn newton_schulz(
    x: &mut [f64],
    rows: usize,
    cols: usize,
    steps: usize,
    round: impl Fn(f64) -> f64,
) {
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    if norm == 0.0 {
        return;
    }
    x.iter_mut().for_each(|x| *x = round(*x / norm));
    let (n, [a, b, c]) = (rows.min(cols), NEWTON_SCHULZ);
    for _ in 0..steps {
        // Row i of X for a wide matrix, column i for a tall one.
        let at = |i: usize, k: usize| if rows <= cols { i * cols + k } else { k * cols + i };
        let mut gram = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                let sum = (0..rows.max(cols)).map(|k| x[at(i, k)] * x[at(j, k)]).sum();
                gram[i * n + j] = round(sum);
            }
        }
        let mut step = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                let square: f64 = (0..n).map(|k| gram[i * n + k] * gram[k * n + j]).sum();
                let identity = if i == j { a } else { 0.0 };
                step[i * n + j] = round(identity + b * gram[i * n + j] + c * round(square));
            }
        }
        let old = x.to_vec();
        for i in 0..n {
            for k in 0..rows.max(cols) {
                let sum = (0..n).map(|j| step[i * n + j] * old[at(j, k)]).sum();
                x[at(i, k)] = round(sum);
            }
        }
    }
}
