//! The nearest matrix with equal singular values, approximately: `U V^T` of `U S V^T`, by a few steps of
//! the Newton-Schulz iteration. It is what Muon makes of a momentum.
//!
//! ```text
//! X = M / |M|                      Frobenius norm: all singular values are at most 1
//! A = X X^T,  X = (a + b A + c A^2) X          repeated; A = X^T X from the right where M is tall
//! ```
//!
//! Each step maps every singular value `s` to `a s + b s^3 + c s^5` and leaves the singular vectors as they
//! are. The coefficients ([`NEWTON_SCHULZ`], Jordan et al. 2024) raise small values as fast as possible,
//! 3.4 times a step, instead of converging: after five steps all values above 0.2% of the norm lie
//! between 0.68 and 1.21, those above 1% of it below 1.14. An optimizer cannot tell that from 1.

pub(crate) mod cases;
mod naive;

pub use naive::newton_schulz;

use crate::{Error, Result, Tensor};

/// `a`, `b`, `c` of the step `a X + b A X + c A^2 X`.
pub const NEWTON_SCHULZ: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Rows of a [`MatrixStack`] that are a matrix of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StackedMatrix {
    /// How many rows.
    pub rows: usize,
    /// What the result is multiplied with.
    pub factor: f32,
}

/// A matrix `[N, K]`, or several of width `K` one below the other, each orthogonalised by itself.
#[derive(Debug)]
pub struct MatrixStack<'a> {
    x: &'a mut Tensor,
    parts: Vec<StackedMatrix>,
}

impl<'a> MatrixStack<'a> {
    /// # Errors
    /// Something that is no matrix, or parts that are not all of its rows.
    pub fn new(x: &'a mut Tensor, parts: Vec<StackedMatrix>) -> Result<Self> {
        const OP: &str = "orthogonalize";
        x.expect_real(OP, "x")?;
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        if x.dims().len() != 2 || rows != x.rows() {
            let detail = format!("parts of {rows} rows do not make up a matrix {}", x.shape());
            return Err(Error::argument(OP, detail));
        }
        Ok(MatrixStack { x, parts })
    }

    /// The matrices `[N, K]`, for reading and writing.
    pub fn x(&mut self) -> &mut Tensor {
        self.x
    }

    /// Width of all of them.
    pub fn cols(&self) -> usize {
        self.x.cols()
    }

    /// The parts, from the first row on.
    pub fn parts(&self) -> &[StackedMatrix] {
        &self.parts
    }
}

/// Ops on whole matrices.
pub trait MatrixOps {
    /// Orthogonalises every part of every stack in place, by `steps` steps. A part of zeros stays as it is. A
    /// shared tensor gets storage of its own first.
    fn orthogonalize(&self, stacks: &mut [MatrixStack<'_>], steps: usize) -> Result<()>;
}
