//! Linear layers `y = x w^T + bias`, groups of narrow ones, and packed weights.

mod cases;
mod group;
mod naive;
mod pack;
mod split;
mod tape;

use crate::check::Operands;
use crate::{Backend, Result, Tensor};
pub(crate) use cases::cases;
pub use group::{
    LinearGroupOps, check_linear_group_bwd_input, check_linear_group_bwd_weight,
    check_linear_group_fwd,
};
pub use pack::{INT8_BLOCK, PackOps, WeightFormat, check_pack_weight, quantize_int8};
pub use split::{
    check_linear_split_bwd_input, check_linear_split_bwd_weight, check_linear_split_fwd,
    linear_split_bwd_input_by_copies, linear_split_bwd_weight_by_copies,
    linear_split_fwd_by_copies,
};

/// Rows up to which a linear layer is batch-invariant: every row of the result has the same bits whatever the number
/// of rows and the other rows are. The oracle and the CPU guarantee it.
pub const BATCH_INVARIANT_ROWS: usize = 64;

/// Linear layers on a device. `R` rows, `K` inputs, `N` outputs.
pub trait LinearOps {
    /// `y[R, N] = x[R, K] w[N, K]^T + bias[N]`; see [`BATCH_INVARIANT_ROWS`].
    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// `dx[R, K] = dy[R, N] w[N, K] + acc`.
    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `dw[N, K] = dy[R, N]^T x[R, K] + acc`.
    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `db[N] = sum_r dy[r] + acc`.
    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `linear_fwd` without a bias, divided by columns into matrices `y_i[R, N_i]` of these widths, which add up to `N`.
    fn linear_split_fwd(&self, x: &Tensor, w: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>>;
    /// `dx[R, K] = sum_i dy_i[R, N_i] w_i[N_i, K] + acc`, with `w_i` the rows of `w[N, K]` that belong to `dy_i`.
    fn linear_split_bwd_input(
        &self,
        dys: &[Tensor],
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor>;
    /// `dw[N, K]`, of rows `dy_i[R, N_i]^T x[R, K]`, plus `acc`.
    fn linear_split_bwd_weight(
        &self,
        dys: &[Tensor],
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor>;
}

/// Validates the operands of [`LinearOps::linear_fwd`].
pub fn check_linear_fwd(
    backend: &dyn Backend,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear", backend);
    let (_, inner) = operands.matrix("x", x)?;
    let width = operands.weight("weight", w, inner)?;
    operands.maybe("bias", bias, &[width])
}

/// Validates the operands of [`LinearOps::linear_bwd_input`].
pub fn check_linear_bwd_input(
    backend: &dyn Backend,
    dy: &Tensor,
    w: &Tensor,
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear_bwd_input", backend);
    let (width, inner) = operands.matrix("weight", w)?;
    operands.real("dy", dy, &[dy.rows(), width])?;
    operands.maybe("acc", acc, &[dy.rows(), inner])
}

/// Validates the operands of [`LinearOps::linear_bwd_weight`].
pub fn check_linear_bwd_weight(
    backend: &dyn Backend,
    dy: &Tensor,
    x: &Tensor,
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear_bwd_weight", backend);
    let (rows, inner) = operands.matrix("x", x)?;
    let (_, width) = operands.matrix("dy", dy)?;
    operands.real("dy", dy, &[rows, width])?;
    operands.maybe("acc", acc, &[width, inner])
}

/// Validates the operands of [`LinearOps::linear_bwd_bias`].
pub fn check_linear_bwd_bias(
    backend: &dyn Backend,
    dy: &Tensor,
    acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("linear_bwd_bias", backend);
    let (_, width) = operands.matrix("dy", dy)?;
    operands.require(width > 0, || "dy has no columns".into())?;
    operands.maybe("acc", acc, &[width])
}
