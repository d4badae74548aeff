//! The short convolution of some columns of a matrix, with its output divided by columns into separate matrices.

use super::{ConvGrads, ConvInputs, ConvOps, ConvSpec, check_columns};
use crate::check::Operands;
use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Backend, ColumnOps, Result, Tensor};

/// Widths of the convolved columns of `x` and of the rest, which may be missing.
fn halves(inputs: &ConvInputs<'_>) -> Vec<usize> {
    let width = inputs.weight.rows();
    let rest = inputs.x.cols() - width;
    [width, rest].into_iter().filter(|width| *width > 0).collect()
}

/// [`ConvOps::short_conv_split_fwd`] by copies of columns.
pub fn short_conv_split_fwd_by_copies<B: ConvOps + ColumnOps + ?Sized>(
    backend: &B,
    inputs: &ConvInputs<'_>,
    widths: &[usize],
    spec: &ConvSpec,
) -> Result<Vec<Tensor>> {
    let mut halves = backend.split_columns(inputs.x, &halves(inputs))?;
    let rest = halves.split_off(1);
    let y = backend.short_conv_fwd(&ConvInputs { x: &halves[0], ..*inputs }, spec)?;
    let mut outs = backend.split_columns(&y, widths)?;
    outs.extend(rest);
    Ok(outs)
}

/// [`ConvOps::short_conv_split_bwd`] by copies of columns.
pub fn short_conv_split_bwd_by_copies<B: ConvOps + ColumnOps + ?Sized>(
    backend: &B,
    dys: &[Tensor],
    inputs: &ConvInputs<'_>,
    widths: &[usize],
    spec: &ConvSpec,
) -> Result<ConvGrads> {
    let (dys, rest) = dys.split_at(widths.len());
    let halves = backend.split_columns(inputs.x, &halves(inputs))?;
    let own = ConvInputs { x: &halves[0], ..*inputs };
    let mut grads = backend.short_conv_bwd(&backend.join_columns(dys)?, &own, spec)?;
    if let [rest] = rest {
        grads.dx = backend.join_columns(&[grads.dx, rest.clone()])?;
    }
    Ok(grads)
}

/// Validates the operands of [`ConvOps::short_conv_split_fwd`].
pub fn check_short_conv_split_fwd(
    backend: &dyn Backend,
    inputs: &ConvInputs<'_>,
    widths: &[usize],
    spec: &ConvSpec,
) -> Result<()> {
    let operands = Operands::new("short_conv_split", backend);
    let (_, all) = operands.matrix("x", inputs.x)?;
    operands.plain("weight", inputs.weight)?;
    let width = widths.iter().fold(0, |sum: usize, width| sum.saturating_add(*width));
    let head = spec.l2_norm.map_or(1, |norm| norm.width.max(1));
    let divided = widths.iter().all(|width| *width > 0 && width.is_multiple_of(head));
    operands.require(width <= all && divided, || {
        format!("widths {widths:?} do not divide heads of {head} of {all} columns")
    })?;
    check_columns(backend, inputs, width, spec)
}

/// Validates the operands of [`ConvOps::short_conv_split_bwd`].
pub fn check_short_conv_split_bwd(
    backend: &dyn Backend,
    dys: &[Tensor],
    inputs: &ConvInputs<'_>,
    widths: &[usize],
    spec: &ConvSpec,
) -> Result<()> {
    check_short_conv_split_fwd(backend, inputs, widths, spec)?;
    let operands = Operands::new("short_conv_split_bwd", backend);
    let rest = inputs.x.cols() - inputs.weight.rows();
    let wanted: Vec<usize> = widths.iter().copied().chain((rest > 0).then_some(rest)).collect();
    operands.require(dys.len() == wanted.len(), || {
        format!("{} gradients for {} results", dys.len(), wanted.len())
    })?;
    let mut pairs = dys.iter().zip(wanted);
    pairs.try_for_each(|(dy, width)| operands.real("dy", dy, &[inputs.x.rows(), width]))
}

impl Tape<'_> {
    /// [`Tape::short_conv`] of the first `C` columns of `x[R, W]`, as many as there are filters, divided by columns
    /// into matrices of these widths, which add up to `C`. Behind them, where `W > C`, the other columns as they are.
    pub fn short_conv_split(
        &mut self,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> Result<Vec<Var>> {
        let (x_at, weight_at, bias_at) = (x.value(), weight.value(), bias.map(Var::value));
        let inputs = ConvInputs { x: x_at, weight: weight_at, bias: bias_at, before: None };
        let outs = self.device.backend().short_conv_split_fwd(&inputs, widths, spec)?;
        let needs_grad = x.needs_grad() || weight.needs_grad() || wants(bias);
        let vars: Vec<Var> = outs.into_iter().map(|y| self.output(y, needs_grad)).collect();
        let outs: Vec<_> = vars.iter().map(|y| (y.slot, y.value.shape())).collect();
        let (x_slot, w_slot, b_slot) = (x.slot, weight.slot, slot_of(bias));
        let (device, spec, widths) = (self.device.clone(), spec.clone(), widths.to_vec());
        let (x, weight, bias) = (x.value.clone(), weight.value.clone(), value_of(bias));
        self.push(move |flow| {
            let Some(dys) = flow.take_all(&outs, &device)? else { return Ok(()) };
            let inputs = ConvInputs { x: &x, weight: &weight, bias: bias.as_ref(), before: None };
            let grads = device.backend().short_conv_split_bwd(&dys, &inputs, &widths, &spec)?;
            flow.add(x_slot, grads.dx)?;
            flow.add(w_slot, grads.dweight)?;
            flow.add_some(b_slot, grads.dbias)
        });
        Ok(vars)
    }
}
