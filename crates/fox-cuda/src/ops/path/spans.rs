//! Older spans of PaTH attention, by the kernels of forgetting attention; see `path.cuh`.

use fox_tensor::PATH_BLOCK;

use super::PathCall;
use super::params::PathParams;
use super::passes::Pass;
use super::table::{LEVELS, ONE_SPAN, SUM_TILES, SpanSizes, virtual_tiles};
use crate::ops::attention::Attention;
use crate::ops::attention::spans::{SpanGradients, dq_len};
use crate::{Buffer, Float, Gpu, Result};

/// Blocks of spans at each level, for head dims to 64 and above: whole tiles of keys of both kernels, the forward's of
/// 96 keys at head dim 64. The smallest bounds the slower walk over blocks; each level multiplies by 4, so that a query
/// has at most three virtual ones of each.
const SPAN_BLOCKS: [SpanSizes; 2] = [[6, 24, 96, 384], [4, 16, 64, 256]];
/// Limit on the scratch of virtual queries: spans double until it fits.
const SPAN_BYTES: usize = 4 << 30;

/// Blocks of spans of PaTH and Wall attention. All blocks are one span on GPUs without wgmma, in f32, and where the op
/// refuses: with pruning, for which the walk over blocks ends early.
pub(in crate::ops) fn span_sizes<T: Float>(
    attention: &Attention<'_, T>,
    refused: bool,
) -> SpanSizes {
    if refused || !attention.has_span_kernels() {
        return [ONE_SPAN; LEVELS];
    }
    let spec = attention.spec;
    let smallest = SPAN_BLOCKS[usize::from(spec.head_dim > 64)];
    let width = spec.head_dim.next_multiple_of(64);
    // x, the gradient of the output, and that of x in f32.
    let tile = PATH_BLOCK * spec.heads * (2 * size_of::<T>() * spec.head_dim + 4 * width);
    let fits = |sizes: &SpanSizes| virtual_tiles(&spec.segments, sizes) * tile <= SPAN_BYTES;
    let double = |sizes: &SpanSizes| Some(sizes.map(|blocks| (2 * blocks).min(ONE_SPAN)));
    std::iter::successors(Some(smallest), double).take(16).find(fits).unwrap_or([ONE_SPAN; LEVELS])
}

/// Copies of gate prefixes, one for each level.
pub(in crate::ops) fn repeated(
    gpu: &Gpu,
    gates: &Buffer<f32>,
    levels: usize,
) -> Result<Buffer<f32>> {
    let bytes = gates.len() * size_of::<f32>();
    let all = gpu.alloc::<f32>(levels * gates.len())?;
    for level in 0..levels {
        // SAFETY: both are live, and `all` has this many bytes for each level.
        unsafe { gpu.copy(all.address() + (level * bytes) as u64, gates.address(), bytes)? };
    }
    Ok(all)
}

/// Scratch of a call with older spans.
pub(super) struct OlderSpans<T> {
    /// Keys at the end of their span, their values unless there is one level, and virtual queries.
    kl: Buffer<T>,
    vl: Option<Buffer<T>>,
    xs: Buffer<T>,
    /// Gate prefixes of all levels, unless there is one.
    gates: Option<Buffer<f32>>,
    /// What later launches read.
    products: Vec<Buffer<T>>,
    gradients: Vec<Buffer<f32>>,
}

impl<T: Float> PathCall<'_, T> {
    /// Carries keys to the end of their span.
    pub(super) fn prepare_spans(&mut self, backward: bool) -> Result<()> {
        let (gpu, spec, width) = (self.attention.gpu, self.attention.spec, self.shape.width);
        let product = spec.kv_heads * width * width;
        let (levels, key_len) = (self.table.levels.len(), self.attention.inputs.k.len());
        let kl = gpu.alloc::<T>(levels * key_len)?;
        let vl = (levels > 1).then(|| gpu.alloc::<T>(levels * key_len)).transpose()?;
        let xs = gpu.alloc::<T>(self.virtual_len())?;
        let f = match backward {
            true => Some(gpu.alloc::<T>(self.table.products() * product)?),
            false => None,
        };
        self.params = PathParams {
            f: f.as_ref().map_or(0, Buffer::address).into(),
            kl: kl.address().into(),
            vl: vl.as_ref().map_or(0, Buffer::address).into(),
            xs: xs.address().into(),
            ..self.params
        };
        let gates = match &self.gates {
            Some(gates) if levels > 1 => Some(repeated(gpu, gates, levels)?),
            _ => None,
        };
        let products = f.into_iter().collect();
        self.older = Some(OlderSpans { kl, vl, xs, gates, products, gradients: Vec::new() });
        for (level, spans) in self.table.levels.clone().into_iter().enumerate() {
            self.params.span0 = spans.start;
            self.run_grid(Pass::Spans, [spans.len(), spec.kv_heads, self.blocks_below(level)])?;
        }
        Ok(())
    }

    /// Blocks of each of the parts that a span of this level consists of.
    fn blocks_below(&self, level: usize) -> usize {
        if level == 0 { 1 } else { self.table.sizes[level - 1] }
    }

    fn virtual_len(&self) -> usize {
        let spec = self.attention.spec;
        self.table.virtual_tiles() * PATH_BLOCK * spec.heads * spec.head_dim
    }

    /// Adds the outputs of older spans to that of the own one, after `Pass::Forward`.
    pub(super) fn spans_forward(&mut self) -> Result<()> {
        let Some(older) = &self.older else { return Ok(()) };
        let (gpu, heads) = (self.attention.gpu, self.attention.spec.heads);
        let os = gpu.alloc::<T>(older.xs.len())?;
        let lses = gpu.alloc::<f32>(self.table.virtual_tiles() * PATH_BLOCK * heads)?;
        let tiling = (&*self.tiling, older.gates.as_ref().or(self.gates.as_ref()));
        let operands = (&older.xs, &older.kl, older.vl.as_ref().unwrap_or(self.attention.inputs.v));
        let tables = self.table.span_tiles(self.attention, self.tiling.gate_stride)?;
        self.attention.spans_forward(&tables, operands, tiling, (&os, &lses))?;
        self.params.os = os.address().into();
        self.params.lses = lses.address().into();
        self.run(Pass::Merge, [self.table.tile_count(), heads])
    }

    /// Gradients of older spans, before the walk over blocks.
    pub(super) fn spans_backward(&mut self, column_sums: &Buffer<f32>) -> Result<()> {
        let Some(older) = &self.older else { return Ok(()) };
        let (gpu, spec) = (self.attention.gpu, self.attention.spec);
        let (heads, tiles, spans) = (spec.heads, self.table.tile_count(), self.table.spans.len());
        let (width, rows) = (self.shape.width, self.table.virtual_tiles() * PATH_BLOCK);
        let product = spec.kv_heads * width * width;
        let ds = gpu.alloc::<T>(self.virtual_len())?;
        let statistics = gpu.alloc::<f32>(4 * heads * rows)?;
        let dq = gpu.alloc::<f32>(heads * dq_len(spec.head_dim, rows))?;
        let [dk, dv] = [0, 1].map(|_| gpu.alloc::<T>(older.kl.len()));
        let (dk, dv) = (dk?, dv?);
        let dx_spans = gpu.alloc::<f32>(tiles * heads * PATH_BLOCK * width)?;
        let de_parts = gpu.alloc::<f32>(self.table.sums() * product)?;
        let de_spans = gpu.alloc::<f32>(spans * product)?;
        let df_keys = gpu.alloc::<f32>(spans * product)?;
        self.params = PathParams {
            ds: ds.address().into(),
            rows: statistics.address().into(),
            dq_tiles: dq.address().into(),
            dkl: dk.address().into(),
            dvl: dv.address().into(),
            dx_spans: dx_spans.address().into(),
            de_parts: de_parts.address().into(),
            de_spans: de_spans.address().into(),
            df_keys: df_keys.address().into(),
            sum_tiles: SUM_TILES,
            ..self.params
        };
        self.run(Pass::SpanQueries, [tiles, heads])?;
        let gradients = SpanGradients {
            rows: &statistics,
            gates: older.gates.as_ref().or(self.gates.as_ref()),
            gate_stride: self.tiling.gate_stride,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            column_sums,
        };
        let operands = (&older.xs, &older.kl, older.vl.as_ref().unwrap_or(self.attention.inputs.v));
        let tables = self.table.span_tiles(self.attention, self.tiling.gate_stride)?;
        self.attention.spans_backward(&tables, operands, &ds, &gradients)?;
        self.run(Pass::SpanWalk, [tiles, heads])?;
        let sums = self.table.spans.iter().map(|s| s.tiles.div_ceil(SUM_TILES)).max();
        self.run_grid(Pass::SpanProducts, [spans, spec.kv_heads, sums.unwrap_or(0)])?;
        (self.params.head0, self.params.head_count) = (0, heads);
        let levels = self.table.levels.clone();
        for (level, spans) in levels.into_iter().enumerate().skip(1).rev() {
            self.params.span0 = spans.start;
            let parts = self.table.sizes[level] / self.blocks_below(level);
            self.run_grid(Pass::SpanKeys, [spans.len(), spec.kv_heads, parts])?;
            self.run(Pass::SpanBackward, [spans.len(), spec.kv_heads])?;
        }
        self.params.span0 = 0;
        if let Some(older) = &mut self.older {
            older.gradients.extend([dx_spans, de_parts, de_spans, df_keys]);
            older.products.extend([dk, dv]);
        }
        Ok(())
    }
}
