//! Both directions in single precision, for the mode that must agree with the oracle to f32 rounding.

use super::layout::Layout;
use super::tiles::{self, Tile};
use super::{Attention, AttentionGrads, int};
use crate::{Buffer, Float, KernelArg, Result};

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params {
    q: u64,
    k: u64,
    v: u64,
    d_out: u64,
    o: u64,
    lse: u64,
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
    mask: i32,
    window: i32,
    scale: f32,
}

// SAFETY: mirrors the struct of the same name in attention_f32.cu.
unsafe impl KernelArg for Params {}

impl<T: Float> Attention<'_, T> {
    fn params(&self, layout: &Layout, gates: Option<&Buffer<f32>>, spans: &Buffer<i32>) -> Params {
        Params {
            q: self.inputs.q.address(),
            k: self.inputs.k.address(),
            v: self.inputs.v.address(),
            gates: gates.map_or(0, Buffer::address),
            segments: layout.segments.address(),
            m_tiles: layout.m_tiles.address(),
            n_tiles: layout.n_tiles.address(),
            spans: spans.address(),
            m_tile_count: int(layout.m_tile_count),
            heads: int(self.spec.heads),
            kv_heads: int(self.spec.kv_heads),
            head_dim: int(self.spec.head_dim),
            gate_stride: int(layout.gate_stride),
            mask: self.mask_code(),
            window: self.window(),
            scale: self.spec.scale,
            ..Params::default()
        }
    }

    pub(super) fn forward_single(
        &self,
        layout: &Layout,
        tile: &Tile,
        gates: Option<&Buffer<f32>>,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
    ) -> Result<()> {
        let plan = self.plan_backward(layout, tile, gates)?;
        let params = Params {
            o: o.address(),
            lse: lse.address(),
            ..self.params(layout, gates, &plan.spans)
        };
        let grid = [layout.m_tile_count, self.spec.heads];
        self.run_single(tile, "attention_fwd_f32", grid, &params)
    }

    pub(super) fn backward_single(
        &self,
        layout: &Layout,
        tile: &Tile,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        grads: &AttentionGrads<T>,
    ) -> Result<()> {
        let heads = self.spec.heads;
        let gates = self.gate_prefix(layout)?;
        let rows = self.backward_rows(layout, tile, (o, lse), d_out, gates.as_ref())?;
        let plan = self.plan_backward(layout, tile, gates.as_ref())?;
        let column_sums = self.gpu.alloc::<f32>(heads * layout.gate_stride)?;
        let row_sums = self.gpu.alloc::<f32>(heads * layout.m_tile_count * tile.block_m)?;
        let params = Params {
            d_out: d_out.address(),
            dq: grads.dq.address(),
            dk: grads.dk.address(),
            dv: grads.dv.address(),
            column_sums: column_sums.address(),
            row_sums: row_sums.address(),
            rows: rows.address(),
            ..self.params(layout, gates.as_ref(), &plan.spans)
        };
        let over_keys = [layout.n_tile_count, self.spec.kv_heads];
        self.run_single(tile, "attention_bwd_keys_f32", over_keys, &params)?;
        let over_queries = [layout.m_tile_count, heads];
        self.run_single(tile, "attention_bwd_queries_f32", over_queries, &params)?;
        let sums = (&column_sums, &row_sums);
        self.gate_gradient_of_rows(layout, tile, sums, grads.dlog_gates.as_ref())
    }

    fn run_single(
        &self,
        tile: &Tile,
        entry: &str,
        [blocks, heads]: [usize; 2],
        params: &Params,
    ) -> Result<()> {
        let kernel = self.gpu.kernel(tile.source, &tile.defines, entry)?;
        let grid = [blocks as u32, heads as u32, tiles::single_parts(self.spec.head_dim)];
        let launch = kernel.launch(grid, tile.threads).shared(tile.shared);
        // SAFETY: parameters as declared in the kernel; `new` and `backward` checked the sizes of the
        // operands, scratch is allocated by the same formulas.
        unsafe { launch.arg(params).run(|| self.shapes()) }
    }
}
