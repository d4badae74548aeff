//! Dropout with counter-based masks.

use fox_tensor::{Dropout, DropoutOps, Tensor};

use crate::backend::Cuda;
use crate::backend::launcher::{Variant, plain_variants};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Error, Source};

const DROPOUT: Source = source!("dropout", [], [DropoutRows]);

kernel_params! {
    list struct DropoutRows {
        /// `[R, C]`.
        y: Ptr<Real>,
        /// `[R, C]`.
        x: ConstPtr<Real>,
        /// `R * C`.
        count: u64,
        width: usize,
        /// Consecutive rows of the batch.
        run: usize,
        /// Number of the first row.
        first: u64,
        /// Distance of runs.
        stride: u64,
        seed: u64,
        threshold: i32,
        scale: f32,
    }
}

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(DROPOUT)
}

impl DropoutOps for Cuda {
    fn dropout(&self, x: &Tensor, dropout: &Dropout) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_dropout(self, x, dropout)?;
        let _span = self.span("dropout")?;
        let (y, at) = self.output(x.shape(), self.activations(), x.device())?;
        let (width, count) = (x.cols(), x.len());
        let variant = Variant::plain(self.activations(), width);
        let (value, most) = (count / variant.vec, u32::MAX as usize);
        if value > most {
            // The kernel divides in 32 bits.
            let (kernel, field) = ("dropout".to_owned(), "the number of vectors");
            return Err(Error::TooLarge { kernel, field, value, most }.into());
        }
        let operand = self.activation(x)?;
        let params = DropoutRows {
            y: at.into(),
            x: operand.address().into(),
            count: count as u64,
            width,
            // The same numbers for the rows that there are.
            run: dropout.rows.width.min(x.rows().max(1)),
            first: dropout.rows.first,
            stride: dropout.rows.stride,
            seed: dropout.seed,
            threshold: i32::from(dropout.threshold()),
            scale: dropout.scale(),
        };
        // SAFETY: the operands are validated at entry; the output is allocated from their shapes.
        unsafe { self.launch_flat(DROPOUT, "dropout", variant, count, params)? };
        Ok(y)
    }
}
