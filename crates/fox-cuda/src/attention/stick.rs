//! Stick-breaking attention; see `kernels/stick.cu`.

use std::sync::Arc;

use super::layout::Layout;
use super::tiles::{self, Tile};
use super::{Attention, AttentionGrads, AttentionOut, int};
use crate::{Buffer, Float, KernelArg, Result};

/// Bytes for what the scout of the backward notes: heads are worked on in groups that need no more.
const CARRY_BYTES: usize = 512 << 20;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params {
    q: u64,
    k: u64,
    v: u64,
    d_out: u64,
    o: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    lse: u64,
    blocks: u64,
    gates: u64,
    segments: u64,
    m_tiles: u64,
    n_tiles: u64,
    carries: u64,
    row_sums: u64,
    oldest: u64,
    column_sums: u64,
    m_tile_count: i32,
    key_blocks: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    head0: i32,
    gate_stride: i32,
    window: i32,
    scale: f32,
    tolerance: f32,
}

// SAFETY: mirrors the struct of the same name in stick.cu.
unsafe impl KernelArg for Params {}

impl<T: Float> Attention<'_, T> {
    /// Stick-breaking attention with forget gates; `lse` is the logarithm of what is left of the stick.
    pub fn stick_breaking(&self) -> Result<AttentionOut<T>> {
        let heads = self.spec.heads;
        let tile = self.stick_tile();
        let layout = self.layout(&tile)?;
        let (o, lse) = self.start_output(&layout)?;
        let blocks = Arc::new(self.gpu.zeros::<i32>(2 * heads)?);
        if layout.m_tile_count > 0 {
            let gates = self.gate_prefix(&layout)?;
            let params = Params {
                o: o.address(),
                lse: lse.address(),
                blocks: blocks.address(),
                ..self.stick_params(&layout, gates.as_ref())
            };
            self.run_stick(&tile, "stick_fwd", [layout.m_tile_count, heads, 1], &params)?;
        }
        Ok(AttentionOut { o, lse, blocks })
    }

    /// Gradients of [`stick_breaking`](Attention::stick_breaking) from that of its output, `[R_q, H * d]`.
    pub fn stick_breaking_backward(&self, d_out: &Buffer<T>) -> Result<AttentionGrads<T>> {
        let tile = self.stick_tile();
        let layout = self.layout(&tile)?;
        let grads = self.start_gradients(&layout, d_out)?;
        if layout.m_tile_count == 0 {
            return Ok(grads);
        }
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let (m_tiles, group) = (layout.m_tile_count, heads / kv_heads);
        let key_blocks = layout.longest_k.div_ceil(tile.block_n);
        let per_head = m_tiles * key_blocks * tile.block_m * 2;
        let kv_step = (CARRY_BYTES / (4 * per_head * group)).clamp(1, kv_heads);
        let gates = self.gate_prefix(&layout)?;
        let carries = self.gpu.alloc::<f32>(kv_step * group * per_head)?;
        let row_sums = self.gpu.alloc::<f32>(heads * m_tiles * tile.block_m)?;
        let oldest = self.gpu.alloc::<i32>(heads * m_tiles)?;
        let column_sums = self.gpu.alloc::<f32>(heads * layout.gate_stride)?;
        let parts = tiles::portable_parts(self.spec.head_dim) as usize;
        for kv_head in (0..kv_heads).step_by(kv_step) {
            let kv_count = kv_step.min(kv_heads - kv_head);
            let params = Params {
                d_out: d_out.address(),
                dq: grads.dq.address(),
                dk: grads.dk.address(),
                dv: grads.dv.address(),
                carries: carries.address(),
                row_sums: row_sums.address(),
                oldest: oldest.address(),
                column_sums: column_sums.address(),
                key_blocks: int(key_blocks),
                head0: int(kv_head * group),
                ..self.stick_params(&layout, gates.as_ref())
            };
            let over_queries = [m_tiles, kv_count * group, 1];
            let over_keys = [layout.n_tile_count, kv_count, parts];
            self.run_stick(&tile, "stick_scout", over_queries, &params)?;
            self.run_stick(&tile, "stick_bwd_keys", over_keys, &params)?;
            self.run_stick(&tile, "stick_bwd_queries", over_queries, &params)?;
        }
        let sums = (&column_sums, &row_sums);
        self.gate_gradient_of_rows(&layout, &tile, sums, grads.dlog_gates.as_ref())?;
        Ok(grads)
    }

    fn stick_tile(&self) -> Tile {
        tiles::stick(self.spec.head_dim, self.inputs.log_gates.is_some(), T::WIDE)
    }

    fn stick_params(&self, layout: &Layout, gates: Option<&Buffer<f32>>) -> Params {
        Params {
            q: self.inputs.q.address(),
            k: self.inputs.k.address(),
            v: self.inputs.v.address(),
            gates: gates.map_or(0, Buffer::address),
            segments: layout.segments.address(),
            m_tiles: layout.m_tiles.address(),
            n_tiles: layout.n_tiles.address(),
            m_tile_count: int(layout.m_tile_count),
            heads: int(self.spec.heads),
            kv_heads: int(self.spec.kv_heads),
            head_dim: int(self.spec.head_dim),
            gate_stride: int(layout.gate_stride),
            window: self.window(),
            scale: self.spec.scale,
            tolerance: self.spec.stick_tolerance() * std::f32::consts::LOG2_E,
            ..Params::default()
        }
    }

    fn run_stick(&self, tile: &Tile, entry: &str, grid: [usize; 3], params: &Params) -> Result<()> {
        let kernel = self.gpu.kernel(tile.source, &tile.defines, entry)?;
        let launch = kernel.launch(grid.map(|n| n as u32), tile.threads).shared(tile.shared);
        // SAFETY: parameters as declared in the kernel; `new` and `start_gradients` checked the sizes of
        // the operands, scratch is allocated by the same formulas.
        unsafe { launch.arg(params).run(|| self.shapes()) }
    }
}
