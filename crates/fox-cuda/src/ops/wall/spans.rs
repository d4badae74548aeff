//! Older spans of Wall attention, by the kernels of forgetting attention; see `wall_spans.cu`.

use fox_tensor::WALL_BLOCK;

use super::{Prepared, SPANS, THREADS, Wall, WallParams};
use crate::ops::attention::spans::{SpanGradients, dq_len};
use crate::ops::attention::tiling::Tiling;
use crate::ops::path::spans::repeated;
use crate::ops::path::table::PathTable;
use crate::{Buffer, Float, Result};

impl<T> Prepared<T> {
    /// The table of older spans, if there are any.
    fn older(&self) -> Option<&PathTable> {
        self.table.as_deref().filter(|table| !table.spans.is_empty())
    }
}

/// Keys at the end of their span `[levels, R, H * d]`, and, unless there is one level, their values and the gate
/// prefixes of all levels.
struct Levels<T> {
    kl: Buffer<T>,
    vl: Option<Buffer<T>>,
    gates: Option<Buffer<f32>>,
}

/// Gradients from pairs of different spans.
pub(super) struct OlderGradients {
    /// With their addresses.
    pub(super) params: WallParams,
    _sums: [Buffer<f32>; 3],
}

impl<T: Float> Wall<'_, T> {
    fn levels(&self, held: &Prepared<T>, table: &PathTable) -> Result<Levels<T>> {
        let (gpu, levels) = (self.attention.gpu, table.levels());
        let len = levels * self.attention.inputs.q.len();
        let gates = held.gates.as_ref().filter(|_| levels > 1);
        Ok(Levels {
            kl: gpu.alloc(len)?,
            vl: (levels > 1).then(|| gpu.alloc(len)).transpose()?,
            gates: gates.map(|gates| repeated(gpu, gates, levels)).transpose()?,
        })
    }

    /// Adds the outputs of older spans to that of the own one, after `wall_fwd`.
    pub(super) fn spans_forward(
        &self,
        tiling: &Tiling,
        held: &Prepared<T>,
        params: WallParams,
    ) -> Result<()> {
        let Some(table) = held.older() else { return Ok(()) };
        let (gpu, heads) = (self.attention.gpu, self.attention.spec.heads);
        let rows = table.virtual_tiles() * WALL_BLOCK;
        let Levels { kl, vl, gates } = self.levels(held, table)?;
        let [xs, os] = [0, 1].map(|_| gpu.alloc::<T>(rows * heads * self.attention.spec.head_dim));
        let (xs, os, lses) = (xs?, os?, gpu.alloc::<f32>(rows * heads)?);
        let params = WallParams {
            kl: kl.address().into(),
            vl: vl.as_ref().map_or(0, Buffer::address).into(),
            xs: xs.address().into(),
            os: os.address().into(),
            lses: lses.address().into(),
            ..params
        };
        let run =
            |entry| self.run((SPANS, entry), [tiling.m_tile_count, heads, 1], (THREADS, 0), params);
        run("wall_span_rows")?;
        let tables = table.span_tiles(&self.attention, tiling.gate_stride)?;
        let tiling = (tiling, gates.as_ref().or(held.gates.as_ref()));
        let operands = (&xs, &kl, vl.as_ref().unwrap_or(self.attention.inputs.v));
        self.attention.spans_forward(&tables, operands, tiling, (&os, &lses))?;
        run("wall_merge")
    }

    /// Gradients from pairs of different spans, after those of the own span; `None` without older spans.
    pub(super) fn spans_backward(
        &self,
        tiling: &Tiling,
        held: &Prepared<T>,
        params: WallParams,
    ) -> Result<Option<OlderGradients>> {
        let Some(table) = held.older() else { return Ok(None) };
        let (gpu, spec) = (self.attention.gpu, self.attention.spec);
        let (heads, len) = (spec.heads, self.attention.inputs.q.len());
        let rows = table.virtual_tiles() * WALL_BLOCK;
        let Levels { kl, vl, gates } = self.levels(held, table)?;
        let [dk, dv] = [0, 1].map(|_| gpu.alloc::<T>(kl.len()));
        let (dk, dv) = (dk?, dv?);
        let [xs, ds] = [0, 1].map(|_| gpu.alloc::<T>(rows * heads * spec.head_dim));
        let (xs, ds) = (xs?, ds?);
        let statistics = gpu.alloc::<f32>(4 * heads * rows)?;
        let dq = gpu.alloc::<f32>(heads * dq_len(spec.head_dim, rows))?;
        let columns = gpu.alloc::<f32>(table.levels() * heads * tiling.gate_stride)?;
        let sums = [gpu.alloc::<f32>(len)?, gpu.alloc::<f32>(len)?, gpu.alloc::<f32>(len)?];
        let [dx, dfar, difference] = sums.each_ref().map(Buffer::address);
        let params = WallParams {
            kl: kl.address().into(),
            vl: vl.as_ref().map_or(0, Buffer::address).into(),
            xs: xs.address().into(),
            ds: ds.address().into(),
            rows: statistics.address().into(),
            dq_tiles: dq.address().into(),
            dkl: dk.address().into(),
            dvl: dv.address().into(),
            columns_older: columns.address().into(),
            dx_older: dx.into(),
            dfar_older: dfar.into(),
            difference_older: difference.into(),
            ..params
        };
        let run =
            |entry| self.run((SPANS, entry), [tiling.m_tile_count, heads, 1], (THREADS, 0), params);
        run("wall_span_rows")?;
        let gradients = SpanGradients {
            rows: &statistics,
            gates: gates.as_ref().or(held.gates.as_ref()),
            gate_stride: tiling.gate_stride,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            column_sums: &columns,
        };
        let tables = table.span_tiles(&self.attention, tiling.gate_stride)?;
        let operands = (&xs, &kl, vl.as_ref().unwrap_or(self.attention.inputs.v));
        self.attention.spans_backward(&tables, operands, &ds, &gradients)?;
        run("wall_span_grads")?;
        Ok(Some(OlderGradients { params, _sums: sums }))
    }
}
