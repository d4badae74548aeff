//! Several narrow linear layers of one input as one product: an optional ability of a device.

use crate::{Result, Tensor};

/// Linear layers of one input that a device does faster together; see [`Caps`](crate::Caps).
pub trait LinearGroupOps {
    /// `y_i[R, N_i] = x[R, K] w_i[N_i, K]^T` for several narrow weights; `None` where they are better
    /// done one by one.
    fn linear_group_fwd(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Option<Vec<Tensor>>>;
    /// Of what `linear_group_fwd` did: `dx[R, K] = sum_i dy_i w_i + acc`, over at least one `i`.
    fn linear_group_bwd_input(
        &self,
        dys: &[&Tensor],
        weights: &[&Tensor],
        acc: Option<Tensor>,
    ) -> Result<Tensor>;
    /// Of what `linear_group_fwd` did: `dw_i[N_i, K] = dy_i^T x + acc_i`, at least one.
    fn linear_group_bwd_weight(
        &self,
        dys: &[&Tensor],
        x: &Tensor,
        accs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Tensor>>;
}
