//! Older spans of PaTH attention, by the kernels of forgetting attention; see `path.cuh`.

use fox_tensor::PATH_BLOCK;

use super::PathCall;
use super::params::PathParams;
use super::passes::Pass;
use super::table::{ONE_SPAN, virtual_tiles};
use crate::ops::attention::Attention;
use crate::ops::attention::spans::{SpanGradients, dq_len};
use crate::{Buffer, Float, Result};

/// Blocks of PaTH's smallest span, for head dims to 64 and above: whole tiles of keys of both kernels, the forward's of
/// 96 keys at head dim 64. A smaller span has fewer blocks that the slower walk over blocks visits, but more virtual
/// queries.
pub(super) const SPAN_BLOCKS: [usize; 2] = [12, 16];
/// Limit on the scratch of virtual queries: spans double until it fits.
const SPAN_BYTES: usize = 4 << 30;
/// Virtual tiles of 64 queries per thread block of `path_span_products`.
const PART_TILES: usize = 32;

/// Blocks of a span, at least `smallest` of these for head dims to 64 and above. All blocks are one span on GPUs without
/// wgmma, in f32, and where the op refuses: with pruning, for which the walk over blocks ends early.
pub(in crate::ops) fn span_blocks<T: Float>(
    attention: &Attention<'_, T>,
    smallest: [usize; 2],
    refused: bool,
) -> usize {
    if refused || !attention.has_span_kernels() {
        return ONE_SPAN;
    }
    let spec = attention.spec;
    let smallest = smallest[usize::from(spec.head_dim > 64)];
    let width = spec.head_dim.next_multiple_of(64);
    // x, the gradient of the output, and that of x in f32.
    let tile = PATH_BLOCK * spec.heads * (2 * size_of::<T>() * spec.head_dim + 4 * width);
    let fits = |blocks: &usize| virtual_tiles(&spec.segments, *blocks) * tile <= SPAN_BYTES;
    let doubled = std::iter::successors(Some(smallest), |blocks| Some(2 * blocks));
    doubled.take(16).find(fits).unwrap_or(ONE_SPAN)
}

/// Scratch of a call with older spans.
pub(super) struct OlderSpans<T> {
    /// Keys at the end of their span, and virtual queries.
    kl: Buffer<T>,
    xs: Buffer<T>,
    /// What later launches read.
    products: Vec<Buffer<T>>,
    gradients: Vec<Buffer<f32>>,
}

impl<T: Float> PathCall<'_, T> {
    /// Carries keys to the end of their span.
    pub(super) fn prepare_spans(&mut self, backward: bool) -> Result<()> {
        let (gpu, spec, width) = (self.attention.gpu, self.attention.spec, self.shape.width);
        let (spans, product) = (self.table.spans.len(), spec.kv_heads * width * width);
        let kl = gpu.alloc::<T>(self.attention.inputs.k.len())?;
        let xs = gpu.alloc::<T>(self.virtual_len())?;
        let es = gpu.alloc::<T>(spans * product)?;
        let f = match backward {
            true => Some(gpu.alloc::<T>(self.table.block_count * product)?),
            false => None,
        };
        self.params = PathParams {
            f: f.as_ref().map_or(0, Buffer::address).into(),
            es: es.address().into(),
            kl: kl.address().into(),
            xs: xs.address().into(),
            ..self.params
        };
        let products = f.into_iter().chain([es]).collect();
        self.older = Some(OlderSpans { kl, xs, products, gradients: Vec::new() });
        self.run(Pass::Spans, [spans, spec.kv_heads])
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
        let tiling = (&*self.tiling, self.gates.as_ref());
        let operands = (&older.xs, &older.kl);
        let tables = self.table.span_tiles(self.attention)?;
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
        let longest = self.table.spans.iter().map(|s| s.tiles).max().unwrap_or(0);
        let parts = longest.div_ceil(PART_TILES);
        let ds = gpu.alloc::<T>(self.virtual_len())?;
        let statistics = gpu.alloc::<f32>(4 * heads * rows)?;
        let dq = gpu.alloc::<f32>(heads * dq_len(spec.head_dim, rows))?;
        let [dk, dv] = [0, 1].map(|_| gpu.alloc::<T>(self.attention.inputs.k.len()));
        let (dk, dv) = (dk?, dv?);
        let dx_spans = gpu.alloc::<f32>(tiles * heads * PATH_BLOCK * width)?;
        let de_parts = gpu.alloc::<f32>(spans * spec.kv_heads * parts * width * width)?;
        self.params = PathParams {
            ds: ds.address().into(),
            rows: statistics.address().into(),
            dq_tiles: dq.address().into(),
            dkl: dk.address().into(),
            dvl: dv.address().into(),
            dx_spans: dx_spans.address().into(),
            de_parts: de_parts.address().into(),
            part_tiles: PART_TILES,
            parts,
            ..self.params
        };
        self.run(Pass::SpanQueries, [tiles, heads])?;
        let gradients = SpanGradients {
            rows: &statistics,
            gates: self.gates.as_ref(),
            gate_stride: self.tiling.gate_stride,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            column_sums,
        };
        let operands = (&older.xs, &older.kl);
        let tables = self.table.span_tiles(self.attention)?;
        self.attention.spans_backward(&tables, operands, &ds, &gradients)?;
        self.run(Pass::SpanWalk, [tiles, heads])?;
        self.run_grid(Pass::SpanProducts, [spans, spec.kv_heads, parts])?;
        if let Some(older) = &mut self.older {
            older.gradients.extend([dx_spans, de_parts]);
            older.products.extend([dk, dv]);
        }
        Ok(())
    }
}
