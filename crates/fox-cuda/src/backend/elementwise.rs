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
        let (inner, dtype) = (x.cols() / 2, self.activations());
        let (dx, at) = self.output(x.shape(), dtype, x.device())?;
        let count = dy.len();
        let (dy, x) = (self.activation(dy)?, self.activation(x)?);
        let args = [
            at.into(),
            dy.address().into(),
            x.address().into(),
            count.into(),
            int(inner).into(),
            activation_code(act).into(),
        ];
        self.flat("glu_bwd", Variant::plain(dtype, inner), count, &args)?;
        Ok(dx)
    }

    fn flat(
        &self,
        entry: &'static str,
        variant: Variant,
        count: usize,
        args: &[crate::launch::Arg],
    ) -> Result<()> {
        // SAFETY: parameters as declared in elementwise.cu; the tape checked the shapes.
        unsafe { self.launch_flat(Source::ELEMENTWISE, entry, variant, count, args) }
    }
}
