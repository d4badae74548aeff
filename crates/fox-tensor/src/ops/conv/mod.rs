//! Short causal convolution in front of a recurrence, with bias, activation and norm.

mod cases;
mod naive;
mod split;
mod tape;

use crate::check::Operands;
use crate::{Activation, Backend, Error, Result, Segments, Tensor};
pub(crate) use cases::cases;
pub use split::{
    check_short_conv_split_bwd, check_short_conv_split_fwd, short_conv_split_bwd_by_copies,
    short_conv_split_fwd_by_copies,
};

/// Operands of the short convolution.
#[derive(Clone, Copy, Debug)]
pub struct ConvInputs<'a> {
    /// Input `[R, C]`; of the ops that divide their output `[R, W]`, whose first `C` columns are convolved.
    pub x: &'a Tensor,
    /// Filters, `K` taps for every channel, the last one for the current row: `C * K` elements.
    pub weight: &'a Tensor,
    /// `[C]`.
    pub bias: Option<&'a Tensor>,
    /// The `K - 1` rows before each segment, oldest first `[segments * (K - 1), C]`; zeros when
    /// absent. No gradient.
    pub before: Option<&'a Tensor>,
}

impl ConvInputs<'_> {
    /// Number of taps `K`.
    pub fn taps(&self) -> usize {
        self.weight.len() / self.weight.rows().max(1)
    }
}

/// Options of the short convolution: `y = l2(act(conv(x) + bias))`.
#[derive(Clone, Debug)]
pub struct ConvSpec {
    /// Nonlinearity after the bias.
    pub activation: Option<Activation>,
    /// Division by the Euclidean norm, head by head.
    pub l2_norm: Option<L2Norm>,
    /// The sequences (query rows). Rows outside come out as zeros.
    pub segments: Segments,
}

/// `x / sqrt(sum x^2 + eps)` over every `width` channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct L2Norm {
    /// Width of a head.
    pub width: usize,
    /// Inside the square root.
    pub eps: f32,
}

/// Gradients of the short convolution.
#[derive(Clone, Debug)]
pub struct ConvGrads {
    /// `[R, C]`.
    pub dx: Tensor,
    /// As the filters.
    pub dweight: Tensor,
    /// `[C]`; present when there is a bias.
    pub dbias: Option<Tensor>,
}

/// Short convolutions on a device.
pub trait ConvOps {
    /// Causal convolution of every channel with its own filter; see [`ConvSpec`].
    fn short_conv_fwd(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor>;
    /// Gradients of `short_conv_fwd`; everything is recomputed from the inputs.
    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads>;
    /// `short_conv_fwd` of the first `C` columns of `x[R, W]`, as many as there are filters, divided by columns into
    /// matrices of these widths, which add up to `C`. Behind them, where `W > C`, the other columns as they are.
    fn short_conv_split_fwd(
        &self,
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<Vec<Tensor>>;
    /// Gradients of `short_conv_split_fwd` from those of all its results, with `dx[R, W]`.
    fn short_conv_split_bwd(
        &self,
        dys: &[Tensor],
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<ConvGrads>;
}

/// Validates the operands of [`ConvOps::short_conv_fwd`].
pub fn check_short_conv_fwd(
    backend: &dyn Backend,
    inputs: &ConvInputs<'_>,
    spec: &ConvSpec,
) -> Result<()> {
    let (_, width) = Operands::new("short_conv", backend).matrix("x", inputs.x)?;
    check_columns(backend, inputs, width, spec)
}

/// Validates the operands of a convolution of `width` columns of the input.
fn check_columns(
    backend: &dyn Backend,
    inputs: &ConvInputs<'_>,
    width: usize,
    spec: &ConvSpec,
) -> Result<()> {
    const OP: &str = "short_conv";
    let (operands, ConvInputs { x, weight, bias, before }) = (Operands::new(OP, backend), *inputs);
    let (rows, _) = operands.matrix("x", x)?;
    operands.plain("weight", weight)?;
    let taps = weight.len() / width.max(1);
    if taps == 0 || width == 0 || weight.rows() != width || weight.len() != taps * width {
        let (got, expected) = (weight.shape(), format!("[{width}, taps]"));
        return Err(Error::Shape { op: OP, what: "weight", got, expected });
    }
    operands.maybe("bias", bias, &[width])?;
    operands.maybe("before", before, &[spec.segments.len() * (taps - 1), width])?;
    let head = spec.l2_norm.map_or(1, |norm| norm.width);
    operands.require(head > 0 && width.is_multiple_of(head), || {
        format!("heads of width {head} do not divide {width}")
    })?;
    operands.segments(&spec.segments, rows, usize::MAX)
}

/// Validates the operands of [`ConvOps::short_conv_bwd`].
pub fn check_short_conv_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    inputs: &ConvInputs<'_>,
    spec: &ConvSpec,
) -> Result<()> {
    check_short_conv_fwd(backend, inputs, spec)?;
    Operands::new("short_conv_bwd", backend).real("dy", dy, inputs.x.dims())
}
