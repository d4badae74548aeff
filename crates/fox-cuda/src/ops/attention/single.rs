//! The forward in single precision, for the mode that must agree with the oracle to f32 rounding.

use super::Attention;
use super::launch_cache::TileKey;
use super::tiles::{self, TileConfig};
use super::tiling::{BlockRef, Segment, Tiling};
use super::two_pass::TwoPassParams;
use crate::source::source;
use crate::{Buffer, Float, Result, Source};

/// Both directions; the backward is launched like the portable one, see [`super::two_pass`].
pub(super) const ATTENTION_F32: Source =
    source!("attention_f32", [], [Segment, BlockRef, TwoPassParams]);

impl<T: Float> Attention<'_, T> {
    pub(super) fn forward_f32(
        &self,
        tiling: &Tiling,
        (key, tile): (TileKey, &TileConfig),
        gates: Option<&Buffer<f32>>,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
    ) -> Result<()> {
        let plan = self.plan_backward(tiling, tile, gates)?;
        let mut params = self.two_pass_params(tiling, gates, &plan.spans);
        params.o = o.address().into();
        params.lse = lse.address().into();
        let parts = tiles::f32_row_splits(self.spec.head_dim);
        let grid = [tiling.m_tile_count, self.spec.heads, parts];
        self.run_two_pass((key, tile), "attention_fwd_f32", grid, params)
    }
}
