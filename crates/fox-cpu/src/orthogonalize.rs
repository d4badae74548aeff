//! Newton-Schulz steps on matrix products; see [`MatrixOps::orthogonalize`].

use fox_tensor::{
    MatrixOps, MatrixStack, NEWTON_SCHULZ, Result, StackedMatrix, check_orthogonalize,
};
use rayon::prelude::*;

use crate::Cpu;
use crate::linear::{Matrix, multiply};
use crate::pool::Buffer;
use crate::rows::rows_per_task;

impl MatrixOps for Cpu {
    fn orthogonalize(&self, stacks: &mut [MatrixStack<'_>], steps: usize) -> Result<()> {
        check_orthogonalize(self, stacks)?;
        for stack in stacks {
            let (cols, matrices) = (stack.cols(), stack.matrices().to_vec());
            let mut rest: &mut [f32] = self.buffer_mut(stack.x())?;
            for matrix in matrices {
                let (x, after) = rest.split_at_mut(matrix.rows * cols);
                let mut scratch = Scratch::new(self, matrix.rows, cols)?;
                self.run(|| scratch.orthogonalize(x, &matrix, cols, steps));
                rest = after;
            }
        }
        Ok(())
    }
}

/// Scratch of the iteration.
struct Scratch {
    /// The matrix after a step `[rows, cols]`.
    next: Buffer,
    /// `A` `[n, n]`, with `n` the shorter side.
    gram: Buffer,
    /// `A^2`, then `a + b A + c A^2` `[n, n]`.
    step: Buffer,
}

impl Scratch {
    fn new(cpu: &Cpu, rows: usize, cols: usize) -> Result<Self> {
        let n = rows.min(cols);
        Ok(Scratch {
            next: cpu.pool().take(rows * cols)?,
            gram: cpu.pool().take(n * n)?,
            step: cpu.pool().take(n * n)?,
        })
    }

    fn orthogonalize(&mut self, x: &mut [f32], matrix: &StackedMatrix, cols: usize, steps: usize) {
        let norm = sum_squares(x).sqrt();
        if norm == 0.0 {
            return;
        }
        // In f64: the inverse of a very small or large norm overflows f32.
        scale(x, 1.0 / norm);
        for _ in 0..steps {
            self.step(x, matrix.rows, cols);
            x.copy_from_slice(&self.next);
        }
        scale(x, f64::from(matrix.factor));
    }

    /// One step from `x` to `self.next`.
    fn step(&mut self, x: &[f32], rows: usize, cols: usize) {
        let n = rows.min(cols);
        let x = Matrix::new(x, rows, cols);
        let (left, right) = if rows <= cols { (x, x.t()) } else { (x.t(), x) };
        multiply(left, right, &mut self.gram, false);
        let gram = Matrix::new(&self.gram, n, n);
        multiply(gram, gram, &mut self.step, false);
        let [a, b, c] = NEWTON_SCHULZ.map(|x| x as f32);
        for (i, (step, gram)) in self.step.iter_mut().zip(&*self.gram).enumerate() {
            let identity = if i / n == i % n { a } else { 0.0 };
            *step = identity + b * gram + c * *step;
        }
        let step = Matrix::new(&self.step, n, n);
        match rows <= cols {
            true => multiply(step, x, &mut self.next, false),
            false => multiply(x, step, &mut self.next, false),
        }
    }
}

/// In f64 throughout, so that the square of no f32 is lost; in a fixed order.
fn sum_squares(x: &[f32]) -> f64 {
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    let parts: Vec<f64> =
        x.par_chunks(rows_per_task(1)).map(|x| x.iter().map(square).sum()).collect();
    parts.iter().sum()
}

fn scale(x: &mut [f32], factor: f64) {
    x.par_chunks_mut(rows_per_task(1)).for_each(|x| {
        x.iter_mut().for_each(|x| *x = (f64::from(*x) * factor) as f32);
    });
}
