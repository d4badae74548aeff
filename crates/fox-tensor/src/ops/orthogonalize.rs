//! Orthogonalization: approximately `U V^T` of `U S V^T`, the nearest matrix with equal singular values, by a few steps
//! of the Newton-Schulz iteration. Muon applies it to the momentum.
//!
//! ```text
//! X = M / |M|                      Frobenius norm: all singular values are at most 1
//! A = X X^T,  X = (a + b A + c A^2) X          repeated; A = X^T X from the right where M is tall
//! ```
//!
//! Each step maps every singular value `s` to `a s + b s^3 + c s^5` and leaves the singular vectors unchanged. The
//! coefficients ([`NEWTON_SCHULZ`], Jordan et al. 2024) raise small values as fast as possible, 3.4 times a step, instead
//! of converging: after five steps all values above 0.2% of the norm lie between 0.68 and 1.21, those above 1% of it
//! below 1.14. For an optimizer that is as good as 1.

use crate::cases::{Args, Case, Output, round};
use crate::check::Operands;
use crate::naive::{Naive, Values, values_mut};
use crate::{Backend, DType, Error, Result, Tape, Tensor};

/// `a`, `b`, `c` of the step `a X + b A X + c A^2 X`.
pub const NEWTON_SCHULZ: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// One of the matrices of a [`MatrixStack`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StackedMatrix {
    /// Number of rows.
    pub rows: usize,
    /// Factor on the result.
    pub factor: f32,
}

/// A matrix `[N, K]`, or several of width `K` one below the other, each orthogonalized separately.
#[derive(Debug)]
pub struct MatrixStack<'a> {
    x: &'a mut Tensor,
    matrices: Vec<StackedMatrix>,
}

impl<'a> MatrixStack<'a> {
    /// # Errors
    /// `x` is not a matrix, or the matrices do not have all of its rows.
    pub fn new(x: &'a mut Tensor, matrices: Vec<StackedMatrix>) -> Result<Self> {
        check_stack(x, &matrices)?;
        Ok(MatrixStack { x, matrices })
    }

    /// The matrices `[N, K]`, for reading and writing.
    pub fn x(&mut self) -> &mut Tensor {
        self.x
    }

    /// Width of all of them.
    pub fn cols(&self) -> usize {
        self.x.cols()
    }

    /// The matrices, from the first row on.
    pub fn matrices(&self) -> &[StackedMatrix] {
        &self.matrices
    }
}

/// Ops on whole matrices.
pub trait MatrixOps {
    /// Orthogonalizes every matrix of every stack in place, by `steps` steps. A matrix of zeros stays zero. A
    /// shared tensor is copied first.
    fn orthogonalize(&self, stacks: &mut [MatrixStack<'_>], steps: usize) -> Result<()>;
}

fn check_stack(x: &Tensor, matrices: &[StackedMatrix]) -> Result<()> {
    const OP: &str = "orthogonalize";
    x.expect_real(OP, "x")?;
    let rows = matrices.iter().fold(0, |sum: usize, matrix| sum.saturating_add(matrix.rows));
    if x.dims().len() != 2 || rows != x.rows() {
        let detail = format!("matrices of {rows} rows in all do not fit shape {}", x.shape());
        return Err(Error::argument(OP, detail));
    }
    Ok(())
}

/// Validates the operands of [`MatrixOps::orthogonalize`].
pub fn check_orthogonalize(backend: &dyn Backend, stacks: &[MatrixStack<'_>]) -> Result<()> {
    for stack in stacks {
        Operands::new("orthogonalize", backend).plain("x", stack.x)?;
        check_stack(stack.x, &stack.matrices)?;
    }
    Ok(())
}

impl MatrixOps for Naive {
    fn orthogonalize(&self, stacks: &mut [MatrixStack<'_>], steps: usize) -> Result<()> {
        check_orthogonalize(self, stacks)?;
        for stack in stacks {
            self.unshare(stack.x())?;
            let (cols, matrices) = (stack.cols(), stack.matrices().to_vec());
            let Values::Real(values) = values_mut(stack.x())? else { continue };
            let mut rest = &mut values[..];
            for matrix in matrices {
                let (x, after) = rest.split_at_mut(matrix.rows * cols);
                newton_schulz(x, matrix.rows, cols, steps, |x| x);
                x.iter_mut().for_each(|x| *x *= f64::from(matrix.factor));
                rest = after;
            }
        }
        Ok(())
    }
}

/// Orthogonalizes `x: [rows, cols]`. Matrices are rounded by `round` wherever a device with low-precision products
/// stores them, which gives the tolerance for such a device.
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

/// Steps of the iteration.
const STEPS: usize = 5;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("square", &[&[48]], 48),
        case("wide", &[&[24]], 113),
        case("tall", &[&[113]], 29),
        case("row", &[&[1]], 203),
        case("stacked", &[&[40, 40, 3, 17]], 56),
        // Equal shapes, which a device may take together, and one of another.
        case("several", &[&[32, 32], &[16], &[32], &[48, 16]], 40),
        case("large", &[&[160]], 136),
    ]
}

/// Matrices of one width: for every tensor the rows of its matrices. The factors differ.
fn case(kind: &str, tensors: &'static [&'static [usize]], cols: usize) -> Case {
    let rows: usize = tensors.iter().flat_map(|rows| rows.iter()).sum();
    let case = Case::new(format!("orthogonalize/{kind}/{rows}x{cols}"), move |tape, args| {
        run(tape, args, tensors)
    });
    // Scales that differ by far: the result depends on the direction alone.
    let mut data = case.rng("m").normals(rows * cols);
    let heights = tensors.iter().flat_map(|rows| rows.iter());
    let mut rest = &mut data[..];
    for (i, height) in heights.enumerate() {
        let (matrix, after) = rest.split_at_mut(height * cols);
        let scale = [1.0, 1e-12, 1e9][i % 3];
        matrix.iter_mut().for_each(|x| *x = round(*x * scale));
        rest = after;
    }
    case.constant("m", &[rows, cols], data)
}

fn run(tape: &mut Tape<'static>, args: &Args<'_>, tensors: &[&[usize]]) -> Result<Vec<Output>> {
    let (backend, m) = (tape.device().backend(), args.tensor("m")?);
    if let Some(rounding) = args.rounding() {
        return rounded(m, tensors, rounding);
    }
    let mut first = 0;
    let mut inputs = Vec::new();
    for rows in tensors {
        let rows = rows.iter().sum();
        inputs.push(m.slice_rows(first, rows)?);
        first += rows;
    }
    let before = inputs[0].clone();
    let stacks = inputs.iter_mut().zip(tensors);
    let stacks: Result<Vec<_>> =
        stacks.map(|(x, rows)| MatrixStack::new(x, stacked(rows))).collect();
    backend.orthogonalize(&mut stacks?, STEPS)?;
    let mut zeros = tape.device().zeros([9, 5], DType::F32)?;
    let single = vec![StackedMatrix { rows: 9, factor: 1.0 }];
    backend.orthogonalize(&mut [MatrixStack::new(&mut zeros, single)?], STEPS)?;
    let mut result = Vec::new();
    for x in &inputs {
        result.extend(x.to_f64()?);
    }
    Ok(vec![
        Output::Plain("result", result),
        // Shared with a stack, which must have been copied.
        Output::Plain("before", before.to_f64()?),
        Output::Plain("zeros", zeros.to_f64()?),
    ])
}

/// The matrices of a tensor, each with another factor.
fn stacked(rows: &[usize]) -> Vec<StackedMatrix> {
    let matrix = |(i, &rows): (usize, &usize)| StackedMatrix { rows, factor: 0.5 + i as f32 };
    rows.iter().enumerate().map(matrix).collect()
}

/// The result where products are rounded between the steps, not only their operands: five steps amplify the
/// rounding more than one op usually does.
fn rounded(m: &Tensor, tensors: &[&[usize]], rounding: fn(f64) -> f64) -> Result<Vec<Output>> {
    let (cols, mut result) = (m.cols(), m.to_f64()?);
    let before = result[..tensors[0].iter().sum::<usize>() * cols].to_vec();
    let mut rest = &mut result[..];
    for matrix in tensors.iter().flat_map(|rows| stacked(rows)) {
        let (x, after) = rest.split_at_mut(matrix.rows * cols);
        newton_schulz(x, matrix.rows, cols, STEPS, rounding);
        x.iter_mut().for_each(|x| *x *= f64::from(matrix.factor));
        rest = after;
    }
    let outputs = [("result", result), ("before", before), ("zeros", vec![0.0; 45])];
    Ok(outputs.map(|(name, values)| Output::Plain(name, values)).into())
}
