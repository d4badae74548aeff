//! Backward in two passes with plain matrix instructions: for GPUs that are not Hopper, and for wide
//! heads and bidirectional masks everywhere.

use super::layout::Layout;
use super::tiles::{self, Tile};
use super::{Attention, AttentionGrads, int};
use crate::{Buffer, Float, KernelArg, Result};

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardParams {
    q: u64,
    k: u64,
    v: u64,
    d_out: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    column_sums: u64,
    row_sums: u64,
    rows: u64,
    gates: u64,
    segments: u64,
    m_tiles: u64,
    n_tiles: u64,
    spans: u64,
    m_tile_count: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    gate_stride: i32,
    window: i32,
    scale: f32,
    scale_log2: f32,
}

// SAFETY: mirrors the struct of the same name in attention_bwd.cu.
unsafe impl KernelArg for BackwardParams {}

impl<T: Float> Attention<'_, T> {
    pub(super) fn backward_portable(
        &self,
        layout: &Layout,
        tile: &Tile,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        grads: &AttentionGrads<T>,
    ) -> Result<()> {
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let gates = self.gate_prefix(layout)?;
        let rows = self.backward_rows(layout, tile, (o, lse), d_out, gates.as_ref())?;
        let plan = self.plan_backward(layout, tile, gates.as_ref())?;
        let column_sums = self.gpu.alloc::<f32>(heads * layout.gate_stride)?;
        let row_sums = self.gpu.alloc::<f32>(heads * layout.m_tile_count * tile.block_m)?;
        let params = BackwardParams {
            q: self.inputs.q.address(),
            k: self.inputs.k.address(),
            v: self.inputs.v.address(),
            d_out: d_out.address(),
            dq: grads.dq.address(),
            dk: grads.dk.address(),
            dv: grads.dv.address(),
            column_sums: column_sums.address(),
            row_sums: row_sums.address(),
            rows: rows.address(),
            gates: gates.as_ref().map_or(0, Buffer::address),
            segments: layout.segments.address(),
            m_tiles: layout.m_tiles.address(),
            n_tiles: layout.n_tiles.address(),
            spans: plan.spans.address(),
            m_tile_count: int(layout.m_tile_count),
            heads: int(heads),
            kv_heads: int(kv_heads),
            head_dim: int(self.spec.head_dim),
            gate_stride: int(layout.gate_stride),
            window: self.window(),
            scale: self.spec.scale,
            scale_log2: self.scale_log2(),
        };
        let parts = tiles::portable_parts(self.spec.head_dim);
        let over_keys = [layout.n_tile_count as u32, kv_heads as u32, parts];
        let over_queries = [layout.m_tile_count as u32, heads as u32, 1];
        for (entry, grid) in
            [("attention_bwd_keys", over_keys), ("attention_bwd_queries", over_queries)]
        {
            let kernel = self.gpu.kernel(tile.source, &tile.defines, entry)?;
            let launch = kernel.launch(grid, tile.threads).shared(tile.shared);
            // SAFETY: parameters as declared in the kernel; `new` and `backward` checked the sizes
            // of the operands, scratch is allocated here by the same formulas.
            unsafe { launch.arg(&params).run(|| self.shapes())? };
        }
        let sums = (&column_sums, &row_sums);
        self.gate_gradient_of_rows(layout, tile, sums, grads.dlog_gates.as_ref())
    }
}
