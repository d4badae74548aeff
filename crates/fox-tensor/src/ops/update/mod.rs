//! What the optimizer does to parameters.

pub(crate) mod cases;
mod naive;

use crate::{Result, Tensor};

/// One decoupled AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay; 0 for parameters without decay.
    pub weight_decay: f32,
    /// Number of this update, counted from 1, for bias correction.
    pub step: u64,
    /// Factor applied to the gradient first (clipping).
    pub grad_scale: f32,
}

/// A parameter, its gradient and its moments, all of one shape, and the update to make.
#[derive(Debug)]
pub struct ParamUpdate<'a> {
    /// The parameter.
    pub param: &'a mut Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Running mean of the gradient.
    pub m: &'a mut Tensor,
    /// Running mean of its square.
    pub v: &'a mut Tensor,
    /// How.
    pub step: AdamW,
}

/// `y = keep * y + add * x`, element by element: momentum, moving averages, steps along a direction.
#[derive(Debug)]
pub struct Blend<'a> {
    y: &'a mut Tensor,
    x: &'a Tensor,
    keep: f32,
    add: f32,
}

impl<'a> Blend<'a> {
    /// # Errors
    /// Shapes that differ, integers, tensors of two devices.
    pub fn new(y: &'a mut Tensor, x: &'a Tensor, keep: f32, add: f32) -> Result<Self> {
        const OP: &str = "blend";
        y.expect_real(OP, "y")?;
        x.expect_real(OP, "x")?;
        x.expect_shape(OP, "x", y.dims())?;
        x.expect_device(OP, "x", y.device())?;
        Ok(Blend { y, x, keep, add })
    }

    /// What is added, and what is changed.
    pub fn pair(&mut self) -> (&Tensor, &mut Tensor) {
        (self.x, self.y)
    }

    /// The factor of what was there, and the factor of what is added.
    pub fn factors(&self) -> (f32, f32) {
        (self.keep, self.add)
    }
}

/// A device's updates of parameters.
pub trait UpdateOps {
    /// Sum of squares over all tensors, in f64 and in fixed order.
    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64>;
    /// The sum of squares of each tensor, with the bits of [`UpdateOps::sum_squares`] of that one alone.
    fn sum_squares_each(&self, tensors: &[&Tensor]) -> Result<Vec<f64>> {
        tensors.iter().map(|tensor| self.sum_squares(&[tensor])).collect()
    }
    /// One AdamW update of `param` and its moments.
    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()>;

    /// `adamw` of many parameters, in one launch where the device counts launches.
    fn adamw_all(&self, updates: &mut [ParamUpdate<'_>]) -> Result<()> {
        for u in updates {
            self.adamw(u.param, u.grad, u.m, u.v, &u.step)?;
        }
        Ok(())
    }

    /// All of `blends`, in one launch where the device counts launches. No tensor is changed by one of
    /// them and read by another. A shared `y` gets storage of its own first.
    fn blend(&self, blends: &mut [Blend<'_>]) -> Result<()>;
}
