//! Gated linear units.

use fox_tensor::{Activation, GluOps, Tensor};

use super::head_fragments::activation_code;
use crate::backend::Cuda;
use crate::backend::launcher::{Variant, plain_variants};
use crate::params::{ConstPtr, KernelParams, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Error, Result, Source};

const GLU: Source = source!("glu", [], [GluForward, GluBackward]);

kernel_params! {
    list struct GluForward {
        /// `[R, C]`.
        y: Ptr<Real>,
        /// Gates and values side by side `[R, 2 C]`.
        x: ConstPtr<Real>,
        /// `R * C`.
        count: u64,
        inner: usize,
        act: i32,
    }

    list struct GluBackward {
        /// `[R, 2 C]`; may alias `x`.
        dx: Ptr<Real>,
        /// Recomputed output `[R, C]`, or null; may alias `dy`.
        y: Ptr<Real>,
        /// `[R, C]`.
        dy: ConstPtr<Real>,
        /// `[R, 2 C]`.
        x: ConstPtr<Real>,
        /// `R * C`.
        count: u64,
        inner: usize,
        act: i32,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(GLU)
}

impl Cuda {
    /// `(dx, y)`, in the memory of `x` and `dy` if it is not shared.
    pub(crate) fn glu_backward_with_output(
        &self,
        dy: Tensor,
        x: Tensor,
        act: Activation,
    ) -> Result<(Tensor, Tensor)> {
        let (dx, y) = (self.replaced(x)?, self.replaced(dy)?);
        // SAFETY: the operands are validated at entry; results replace operands of the same shapes.
        unsafe { self.glu_gradient([dx.to, y.to, y.from, dx.from], &dx.out, act)? };
        Ok((dx.out, y.out))
    }

    /// # Safety
    /// The addresses must be those of live activations: `dx` and `x` as many as `like`, `dy` and `y` (or 0) half of it.
    unsafe fn glu_gradient(
        &self,
        [dx, y, dy, x]: [u64; 4],
        like: &Tensor,
        act: Activation,
    ) -> Result<()> {
        let (inner, count) = (like.cols() / 2, like.len() / 2);
        let params = GluBackward {
            dx: dx.into(),
            y: y.into(),
            dy: dy.into(),
            x: x.into(),
            count: count as u64,
            inner,
            act: activation_code(act),
        };
        // SAFETY: the caller's promise.
        unsafe { self.glu("glu_bwd", inner, count, params) }
    }

    /// # Safety
    /// The addresses in `params` must be those of live activations, `count` outputs in rows of `inner`.
    unsafe fn glu<P: KernelParams>(
        &self,
        entry: &'static str,
        inner: usize,
        count: usize,
        params: P,
    ) -> Result<()> {
        let variant = Variant::plain(self.activations(), inner);
        let (value, most) = (count / variant.vec, u32::MAX as usize);
        if value > most {
            // The kernels divide in 32 bits.
            let (kernel, field) = (entry.to_owned(), "the number of pieces");
            return Err(Error::TooLarge { kernel, field, value, most });
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch_flat(GLU, entry, variant, count, params) }
    }
}

impl GluOps for Cuda {
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_glu_fwd(self, x)?;
        let _span = self.span("glu fwd")?;
        let (inner, dtype) = (x.cols() / 2, self.activations());
        let (y, at) = self.output([x.rows(), inner], dtype, x.device())?;
        let x = self.activation(x)?;
        let params = GluForward {
            y: at.into(),
            x: x.address().into(),
            count: y.len() as u64,
            inner,
            act: activation_code(act),
        };
        // SAFETY: the operands are validated at entry; outputs are allocated from their shapes.
        unsafe { self.glu("glu_fwd", inner, y.len(), params)? };
        Ok(y)
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_glu_bwd(self, dy, x)?;
        let _span = self.span("glu bwd")?;
        let (dx, at) = self.output(x.shape(), self.activations(), x.device())?;
        let (dy_at, x_at) = (self.activation(dy)?, self.activation(x)?);
        // SAFETY: the operands are validated at entry; outputs are allocated from their shapes.
        unsafe { self.glu_gradient([at, 0, dy_at.address(), x_at.address()], x, act)? };
        Ok(dx)
    }
}
