//! Forget gates and gated linear units.

use fox_tensor::{Activation, DType, Tensor};

use super::heads::activation_code;
use super::launcher::Variant;
use super::{Cuda, address, int};
use crate::{Error, Result, Source};

impl Cuda {
    pub(super) fn gate_forward(
        &self,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
        rows: usize,
    ) -> Result<Tensor> {
        let Some(any) = z.or(bias) else {
            return Err(Error::argument("log_gate", "neither logits nor a bias"));
        };
        let heads = z.map_or(any.len(), Tensor::cols);
        let (y, at) = self.output([rows, heads], DType::F32, any.device())?;
        let z = z.map(|x| self.real(x)).transpose()?;
        let bias = bias.map(|x| self.real(x)).transpose()?;
        let args = [
            at.into(),
            address(&z).into(),
            address(&bias).into(),
            y.len().into(),
            int(heads).into(),
        ];
        self.flat("log_gate_fwd", Variant::plain(DType::F32, 1), y.len(), &args)?;
        Ok(y)
    }

    pub(super) fn gate_backward(
        &self,
        dy: &Tensor,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (dz, at) = self.output(dy.shape(), DType::F32, dy.device())?;
        let (count, heads) = (dy.len(), int(dy.cols()));
        let dy = self.real(dy)?;
        let z = z.map(|x| self.real(x)).transpose()?;
        let bias = bias.map(|x| self.real(x)).transpose()?;
        let args = [
            at.into(),
            dy.address().into(),
            address(&z).into(),
            address(&bias).into(),
            count.into(),
            heads.into(),
        ];
        self.flat("log_gate_bwd", Variant::plain(DType::F32, 1), count, &args)?;
        Ok(dz)
    }

    pub(super) fn glu_forward(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        let (inner, dtype) = (x.cols() / 2, self.activations());
        let (y, at) = self.output([x.rows(), inner], dtype, x.device())?;
        let x = self.activation(x)?;
        let args = [
            at.into(),
            x.address().into(),
            y.len().into(),
            int(inner).into(),
            activation_code(act).into(),
        ];
        self.flat("glu_fwd", Variant::plain(dtype, inner), y.len(), &args)?;
        Ok(y)
    }

    pub(super) fn glu_backward(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        let (dx, at) = self.output(x.shape(), self.activations(), x.device())?;
        let (dy_at, x_at) = (self.activation(dy)?, self.activation(x)?);
        self.glu_gradient([at, 0, dy_at.address(), x_at.address()], x, act)?;
        Ok(dx)
    }

    /// `(dx, y)`, in the places of `x` and `dy` if these are free.
    pub(super) fn glu_backward_again(
        &self,
        dy: Tensor,
        x: Tensor,
        act: Activation,
    ) -> Result<(Tensor, Tensor)> {
        let (dx, y) = (self.replaced(x)?, self.replaced(dy)?);
        self.glu_gradient([dx.to, y.to, y.from, dx.from], &dx.out, act)?;
        Ok((dx.out, y.out))
    }

    fn glu_gradient(&self, [dx, y, dy, x]: [u64; 4], like: &Tensor, act: Activation) -> Result<()> {
        let (inner, count) = (like.cols() / 2, like.len() / 2);
        let args = [
            dx.into(),
            y.into(),
            dy.into(),
            x.into(),
            count.into(),
            int(inner).into(),
            activation_code(act).into(),
        ];
        self.flat("glu_bwd", Variant::plain(self.activations(), inner), count, &args)
    }

    fn flat(
        &self,
        entry: &'static str,
        variant: Variant,
        count: usize,
        args: &[crate::launch::Arg],
    ) -> Result<()> {
        if count / variant.vec > u32::MAX as usize {
            return Err(Error::argument(entry, format!("{count} elements at once")));
        }
        // SAFETY: parameters as declared in elementwise.cu; the tape checked the shapes.
        unsafe { self.launch_flat(Source::ELEMENTWISE, entry, variant, count, args) }
    }
}
