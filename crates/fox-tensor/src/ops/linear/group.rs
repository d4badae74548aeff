//! Groups of narrow linear layers with one input as one product: an optional capability of a device.

use crate::check::Operands;
use crate::{Backend, Result, Tensor};

/// Linear layers with one input that a device computes as one product; see [`Caps`](crate::Caps).
pub trait LinearGroupOps {
    /// `y_i[R, N_i] = x[R, K] w_i[N_i, K]^T` for several narrow weights; `None` where separate
    /// products are faster.
    fn linear_group_fwd(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Option<Vec<Tensor>>>;
    /// Gradient of the input: `dx[R, K] = sum_i dy_i w_i + acc`, over at least one `i`.
    fn linear_group_bwd_input(
        &self,
        dys: &[&Tensor],
        weights: &[&Tensor],
        acc: Option<Tensor>,
    ) -> Result<Tensor>;
    /// Gradients of the weights: `dw_i[N_i, K] = dy_i^T x + acc_i`, at least one.
    fn linear_group_bwd_weight(
        &self,
        dys: &[&Tensor],
        x: &Tensor,
        accs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Tensor>>;
}

/// Validates the operands of [`LinearGroupOps::linear_group_fwd`].
pub fn check_linear_group_fwd(
    backend: &dyn Backend,
    x: &Tensor,
    weights: &[&Tensor],
) -> Result<()> {
    let operands = Operands::new("linear_group", backend);
    let (_, inner) = operands.matrix("x", x)?;
    weights.iter().try_for_each(|w| operands.weight("weight", w, inner).map(drop))
}

/// Validates the operands of [`LinearGroupOps::linear_group_bwd_input`].
pub fn check_linear_group_bwd_input(
    backend: &dyn Backend,
    dys: &[&Tensor],
    weights: &[&Tensor],
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear_group_bwd_input", backend);
    let ([dy, ..], [w, ..]) = (dys, weights) else {
        return Err(operands.error("there are no gradients"));
    };
    same_count(&operands, dys.len(), weights.len())?;
    let (rows, inner) = (dy.rows(), w.cols());
    for (dy, w) in dys.iter().zip(weights) {
        operands.real("weight", w, &[w.rows(), inner])?;
        operands.real("dy", dy, &[rows, w.rows()])?;
    }
    operands.maybe("acc", acc, &[rows, inner])
}

/// Validates the operands of [`LinearGroupOps::linear_group_bwd_weight`].
pub fn check_linear_group_bwd_weight(
    backend: &dyn Backend,
    dys: &[&Tensor],
    x: &Tensor,
    accs: &[Option<Tensor>],
) -> Result<()> {
    let operands = Operands::new("linear_group_bwd_weight", backend);
    operands.require(!dys.is_empty(), || "there are no gradients".into())?;
    same_count(&operands, dys.len(), accs.len())?;
    let (rows, inner) = operands.matrix("x", x)?;
    for (dy, acc) in dys.iter().zip(accs) {
        let (_, width) = operands.matrix("dy", dy)?;
        operands.real("dy", dy, &[rows, width])?;
        operands.maybe("acc", acc, &[width, inner])?;
    }
    Ok(())
}

fn same_count(operands: &Operands<'_>, dys: usize, others: usize) -> Result<()> {
    operands.require(dys == others, || format!("{dys} gradients for {others} weights"))
}
