//! int8 weights for matmuls that read bf16: dequantized in a launch before each of them.

use fox_tensor::DType;

use super::params::{DecodeMatmul, DecodeMatrix, MAX_MATRICES};
use super::weights::STEP;
use crate::ops::packed::{DequantInt8, DequantMatrix, Dequantize, MATRICES};
use crate::{Gpu, Result};

const _: () = assert!(MAX_MATRICES <= MATRICES, "a launch dequantizes all matrices of a matmul");

/// The int8 matrices of a matmul, each with its number of weight rows.
fn packed(
    matrices: &mut [DecodeMatrix; MAX_MATRICES],
    glu: bool,
) -> impl Iterator<Item = (usize, &mut DecodeMatrix)> {
    let rows = move |matrix: &DecodeMatrix| if glu { 2 * matrix.rows } else { matrix.rows };
    matrices
        .iter_mut()
        .filter(|matrix| matrix.scales.address() != 0)
        .map(move |matrix| (rows(matrix), matrix))
}

/// Number of int8 weights of a matmul.
pub(super) fn packed_values(
    mut matrices: [DecodeMatrix; MAX_MATRICES],
    width: usize,
    glu: bool,
) -> usize {
    packed(&mut matrices, glu).map(|(rows, _)| rows * width).sum()
}

/// Dequantizes the weights of matmuls.
pub(super) struct Dequantizer(Dequantize);

impl Dequantizer {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Dequantizer(Dequantize::new(gpu, DType::Bf16, STEP)?))
    }

    /// Dequantizes the int8 weights of a matmul to `to` and points the matmul there; whether it had any. The matmul must
    /// not overlap with this launch, because it reads weights before it waits.
    ///
    /// # Safety
    /// `to` must have room for the weights, and the addresses of the matmul must belong to live buffers.
    pub(super) unsafe fn run(
        &self,
        product: &mut DecodeMatmul,
        glu: bool,
        to: u64,
        overlapping: bool,
    ) -> Result<bool> {
        let width = product.width;
        let mut params = DequantInt8 { width, ..DequantInt8::default() };
        let (mut count, mut at) = (0, to);
        for (rows, matrix) in packed(&mut product.matrices, glu) {
            params.matrices[count] = DequantMatrix {
                values: matrix.w.address().into(),
                scales: matrix.scales,
                to: at.into(),
                vectors: self.0.vectors(rows, width),
            };
            (matrix.w, matrix.scales) = (at.into(), 0.into());
            at += (2 * rows * width) as u64;
            count += 1;
        }
        if count > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.0.launch(params, count, overlapping)? };
        }
        Ok(count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_int8_matrices_are_dequantized() {
        let mut matrices = [DecodeMatrix::default(); MAX_MATRICES];
        for (matrix, (rows, scales)) in matrices.iter_mut().zip([(8, 512), (2, 0), (24, 1024)]) {
            (matrix.rows, matrix.scales) = (rows, u64::into(scales));
        }
        assert_eq!(packed_values(matrices, 64, false), (8 + 24) * 64);
        assert_eq!(packed_values(matrices, 64, true), 2 * (8 + 24) * 64);
        assert_eq!(packed_values([DecodeMatrix::default(); MAX_MATRICES], 64, false), 0);
    }
}
