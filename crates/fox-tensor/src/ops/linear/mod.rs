//! Linear layers: `y = x w^T + bias`, several narrow ones at once, and weights in fewer bits.

pub(crate) mod cases;
mod group;
mod naive;
mod pack;
mod tape;

use crate::{Result, Tensor};
pub use group::LinearGroupOps;
pub use pack::{INT8_BLOCK, PackOps, WeightFormat};

/// With at most this many rows, a row of a linear layer's result should depend on its own row of the
/// input alone, to the bit, not on the number of rows; the oracle and the CPU keep this.
pub const BATCH_INVARIANT_ROWS: usize = 64;

/// A device's linear layers. `R` rows, `K` inputs, `N` outputs.
pub trait LinearOps {
    /// `y[R, N] = x[R, K] w[N, K]^T + bias[N]`; see [`BATCH_INVARIANT_ROWS`].
    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// `dx[R, K] = dy[R, N] w[N, K] + acc`.
    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `dw[N, K] = dy[R, N]^T x[R, K] + acc`.
    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `db[N] = sum_r dy[r] + acc`.
    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
}
