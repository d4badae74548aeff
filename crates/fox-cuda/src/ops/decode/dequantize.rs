//! Weights in 8 bits for products that read bf16: unpacked in front of each.

use fox_tensor::DType;

use super::model::STEP;
use super::params::{PARTS, DecodeMatrix, DecodeMatmul};
use crate::ops::packed::{MATRICES, Unpack, UnpackInt8, UnpackPart};
use crate::{Gpu, Result};

const _: () = assert!(PARTS <= MATRICES, "a launch unpacks all matrices of a product");

/// The matrices of a product that are in 8 bits, each with its rows of weights.
fn packed(
    parts: &mut [DecodeMatrix; PARTS],
    glu: bool,
) -> impl Iterator<Item = (usize, &mut DecodeMatrix)> {
    let rows = move |part: &DecodeMatrix| if glu { 2 * part.rows } else { part.rows };
    parts.iter_mut().filter(|part| part.scales.address() != 0).map(move |part| (rows(part), part))
}

/// Weights of a product that are in 8 bits.
pub(super) fn packed_values(mut parts: [DecodeMatrix; PARTS], width: usize, glu: bool) -> usize {
    packed(&mut parts, glu).map(|(rows, _)| rows * width).sum()
}

/// Unpacks for products.
pub(super) struct Unpacking(Unpack);

impl Unpacking {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Unpacking(Unpack::new(gpu, DType::Bf16, STEP)?))
    }

    /// Unpacks the weights of a product to `to`, where it finds them then; whether it had any in 8 bits. A product after
    /// this must not begin before the weights are written.
    ///
    /// # Safety
    /// `to` has room for them, and the addresses of the product are those of live buffers.
    pub(super) unsafe fn run(
        &self,
        product: &mut DecodeMatmul,
        glu: bool,
        to: u64,
        overlapping: bool,
    ) -> Result<bool> {
        let width = product.width;
        let mut params = UnpackInt8 { width, ..UnpackInt8::default() };
        let (mut count, mut at) = (0, to);
        for (rows, part) in packed(&mut product.parts, glu) {
            params.parts[count] = UnpackPart {
                values: part.w.address().into(),
                scales: part.scales,
                to: at.into(),
                pieces: self.0.pieces(rows, width),
            };
            (part.w, part.scales) = (at.into(), 0.into());
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
    fn only_matrices_with_scales_are_unpacked() {
        let mut parts = [DecodeMatrix::default(); PARTS];
        for (part, (rows, scales)) in parts.iter_mut().zip([(8, 512), (2, 0), (24, 1024)]) {
            (part.rows, part.scales) = (rows, u64::into(scales));
        }
        assert_eq!(packed_values(parts, 64, false), (8 + 24) * 64);
        assert_eq!(packed_values(parts, 64, true), 2 * (8 + 24) * 64);
        assert_eq!(packed_values([DecodeMatrix::default(); PARTS], 64, false), 0);
    }
}
