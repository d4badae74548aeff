//! A decode step as launches: one set for all rows.

use super::kernels::{
    ATTENTION_THREADS, BUCKETS, CHOICE_THREADS, FEW_ROWS, Family, Kernels, MAX_PARTS, MAX_ROWS,
    MAX_RUNS, ROW_THREADS, Tiling, product,
};
use super::model::{DeviceWeights, single};
use super::params::{
    PARTS, DecodeAttention, DecodeSample, TokenDraw, DecodeHeads, DecodeMerge, DecodeNorm,
    DecodeMatrix, DecodeMatmul, DecodeTable, DecodeToken,
};
use super::unpack::Unpacking;
use crate::launch::{Kernel, Launch};
use crate::ops::pieces::activation_code;
use crate::params::Param;
use crate::{Buffer, Gpu, Result};

/// Warps of a block of the kernels of `decode_rows`.
const ROW_WARPS: usize = ROW_THREADS / 32;

/// The kernels of the products of a bucket.
struct Products {
    family: Family,
    /// Projections and output projection, and logits.
    wide: Kernel,
    wide_tiling: Tiling,
    /// Output of the heads.
    heads: Kernel,
    heads_tiling: Tiling,
    /// Gate and up.
    glu: Kernel,
    glu_tiling: Tiling,
    /// Down.
    down: Kernel,
    down_tiling: Tiling,
}

impl Products {
    fn new(gpu: &Gpu, rows: usize, weights: &DeviceWeights) -> Result<Self> {
        let widths = [weights.width, weights.heads_width, weights.inner];
        let family = Family::of(gpu, rows, &widths);
        let tiling = |width: usize, glu: bool| Tiling::new(family, rows, width, glu);
        let product = |tiling: Tiling| product(gpu, tiling, weights.most_packed > 0);
        let (wide_tiling, heads_tiling) =
            (tiling(weights.width, false), tiling(weights.heads_width, false).split());
        let (glu_tiling, down_tiling) =
            (tiling(weights.width, true), tiling(weights.inner, false).split());
        Ok(Products {
            family,
            wide: product(wide_tiling)?,
            wide_tiling,
            heads: product(heads_tiling)?,
            heads_tiling,
            glu: product(glu_tiling)?,
            glu_tiling,
            down: product(down_tiling)?,
            down_tiling,
        })
    }
}

const ROW_BYTES: usize = size_of::<<DecodeToken as Param>::Device>();
const DRAW_BYTES: usize = size_of::<<TokenDraw as Param>::Device>();

/// Memory of a step, for [`MAX_ROWS`] rows.
pub(super) struct Work {
    /// The rows of a step, and behind them how each draws its next token: [`DecodeToken`]s and [`TokenDraw`]s.
    pub(super) input: Buffer<u8>,
    h: Buffer<f32>,
    /// `[runs][rows, width]`.
    delta: Buffer<f32>,
    x: Buffer<u16>,
    raw: Buffer<f32>,
    q: Buffer<f32>,
    parts: Buffer<f32>,
    mixed: Buffer<u16>,
    inner: Buffer<u16>,
    /// Weights of the product under way that are in 8 bits otherwise.
    unpacked: Buffer<u16>,
    /// `[rows, V]`.
    pub(super) logits: Buffer<f32>,
    /// Ids, then scores `[2, MAX_ROWS]`.
    pub(super) choices: Buffer<u32>,
}

impl Work {
    pub(super) fn new(gpu: &Gpu, rows: usize, weights: &DeviceWeights) -> Result<Self> {
        let shape = &weights.shape;
        Ok(Work {
            input: gpu.zeros(rows * (ROW_BYTES + DRAW_BYTES))?,
            h: gpu.alloc(rows * weights.width)?,
            delta: gpu.alloc(MAX_PARTS * rows * weights.width)?,
            x: gpu.alloc(rows * weights.width)?,
            raw: gpu.alloc(rows * weights.stride)?,
            q: gpu.alloc(rows * weights.heads_width)?,
            parts: gpu.alloc(rows * shape.heads * MAX_RUNS * (shape.head_dim + 4))?,
            mixed: gpu.alloc(rows * weights.heads_width)?,
            inner: gpu.alloc(rows * weights.inner)?,
            unpacked: gpu.alloc(if rows > FEW_ROWS { weights.most_packed } else { 0 })?,
            logits: gpu.alloc(rows * weights.vocab)?,
            choices: gpu.zeros(2 * MAX_ROWS)?,
        })
    }
}

/// What the slots remember beside their pages.
pub(super) struct Slots {
    /// `[slots][layers]`.
    pub(super) tables: Buffer<<DecodeTable as Param>::Device>,
    /// Sums of the log gates `[slots][layers][heads]`.
    pub(super) now: Buffer<f64>,
    /// Raw rows of keys and values `[slots][layers][2][kv_heads * d]`.
    pub(super) last: Buffer<u16>,
}

/// The kernels of steps of a model.
pub(super) struct Steps {
    /// By bucket.
    kernels: Vec<Kernels>,
    products: Vec<Products>,
    unpacking: Unpacking,
    overlapping: bool,
}

/// Numbers the thread blocks of the parts that are there and moves those to the front; the parts and thread blocks.
fn number_blocks(parts: &mut [DecodeMatrix; PARTS], tiling: Tiling) -> (usize, usize) {
    let (mut count, mut blocks) = (0, 0);
    for n in 0..PARTS {
        if parts[n].rows > 0 {
            parts[count] = DecodeMatrix { first_block: blocks, ..parts[n] };
            blocks += tiling.blocks(parts[n].rows);
            count += 1;
        }
    }
    (count, blocks)
}

/// Launches a product.
///
/// # Safety
/// The addresses belong to live buffers of the sizes that the product implies.
pub(super) unsafe fn launch_product(
    kernel: &Kernel,
    tiling: Tiling,
    rows: usize,
    mut params: DecodeMatmul,
    overlapping: bool,
) -> Result<()> {
    let (count, blocks) = number_blocks(&mut params.parts, tiling);
    params.part_count = count;
    let width = params.width;
    let grid = [tiling.row_blocks(rows), blocks, tiling.runs()];
    let launch = kernel.launch(grid, tiling.threads()).shared(tiling.shared());
    let launch = launch.overlapping(overlapping).params(params)?;
    // SAFETY: the caller's promise.
    unsafe { launch.run(|| format!("{rows} rows of {width}")) }
}

impl Steps {
    /// `overlapping` launches may begin before those in front of them have ended, where the GPU can.
    pub(super) fn new(
        gpu: &Gpu,
        buckets: usize,
        weights: &DeviceWeights,
        overlapping: bool,
    ) -> Result<Self> {
        let products = BUCKETS[..buckets].iter().map(|rows| Products::new(gpu, *rows, weights));
        let products = products.collect::<Result<Vec<_>>>()?;
        let kernels = |(products, rows): (&Products, &usize)| {
            Kernels::new(gpu, products.family, *rows, weights.width, weights.shape.head_dim)
        };
        Ok(Steps {
            kernels: products.iter().zip(&BUCKETS).map(kernels).collect::<Result<_>>()?,
            products,
            unpacking: Unpacking::new(gpu)?,
            overlapping: overlapping && gpu.architecture().major >= 9,
        })
    }

    /// All launches of a step of a bucket whose sequences have at most `runs` runs of pages.
    pub(super) fn launch(
        &self,
        bucket: usize,
        runs: usize,
        weights: &DeviceWeights,
        work: &Work,
        slots: &Slots,
    ) -> Result<()> {
        let (rows, products, kernels) =
            (BUCKETS[bucket], &self.products[bucket], &self.kernels[bucket]);
        let (shape, width) = (&weights.shape, weights.width);
        let run = |launch: Launch<'_>| -> Result<()> {
            let launch = launch.overlapping(self.overlapping);
            // SAFETY: the buffers have room for the rows of any bucket, the slots for all that rows may name.
            unsafe { launch.run(|| format!("{rows} rows of {width}")) }
        };
        let multiply = |kernel: &Kernel, tiling: Tiling, mut params: DecodeMatmul| {
            let to = work.unpacked.address();
            // SAFETY: as above; there is room for the weights of any product.
            unsafe {
                let unpacked = !tiling.reads_int8()
                    && self.unpacking.run(&mut params, tiling.is_glu(), to, self.overlapping)?;
                // Products read weights before they wait.
                launch_product(kernel, tiling, rows, params, self.overlapping && !unpacked)
            }
        };
        // After a product, whose runs it adds up.
        let norm = |norm: u64, embeddings: u64, product: Tiling| -> Result<()> {
            let params = DecodeNorm {
                rows: work.input.address().into(),
                embeddings: embeddings.into(),
                h: work.h.address().into(),
                delta: work.delta.address().into(),
                norm: norm.into(),
                x: work.x.address().into(),
                width,
                runs: product.runs(),
                eps: shape.norm_eps,
            };
            run(kernels.norm.launch([rows, 1, 1], ROW_THREADS).params(params)?)
        };
        let on_x = DecodeMatmul {
            x: work.x.address().into(),
            y: work.raw.address().into(),
            inner: work.inner.address().into(),
            width,
            stride: weights.stride,
            act: activation_code(shape.mlp_act),
            ..DecodeMatmul::default()
        };
        for (l, layer) in weights.layers.iter().enumerate() {
            let embeddings = if l == 0 { weights.embeddings } else { 0 };
            norm(layer.mixer_norm, embeddings, products.down_tiling)?;
            let params = DecodeMatmul { parts: layer.parts, ..on_x };
            multiply(&products.wide, products.wide_tiling, params)?;
            self.attend(l, bucket, runs, weights, work, slots)?;
            let params = DecodeMatmul {
                x: work.mixed.address().into(),
                y: work.delta.address().into(),
                parts: single(layer.o_proj),
                width: weights.heads_width,
                stride: width,
                ..DecodeMatmul::default()
            };
            multiply(&products.heads, products.heads_tiling, params)?;
            norm(layer.mlp_norm, 0, products.heads_tiling)?;
            let params = DecodeMatmul { parts: single(layer.gate_up), ..on_x };
            multiply(&products.glu, products.glu_tiling, params)?;
            let params = DecodeMatmul {
                x: work.inner.address().into(),
                y: work.delta.address().into(),
                parts: single(layer.down),
                width: weights.inner,
                stride: width,
                ..DecodeMatmul::default()
            };
            multiply(&products.down, products.down_tiling, params)?;
        }
        norm(weights.norm, 0, products.down_tiling)?;
        let params = DecodeMatmul {
            y: work.logits.address().into(),
            parts: single(weights.head),
            stride: weights.vocab,
            ..on_x
        };
        multiply(&products.wide, products.wide_tiling, params)?;
        let choices = work.choices.address();
        let params = DecodeSample {
            logits: work.logits.address().into(),
            draws: (work.input.address() + (rows * ROW_BYTES) as u64).into(),
            ids: choices.into(),
            scores: (choices + 4 * MAX_ROWS as u64).into(),
            vocab: weights.vocab,
        };
        run(kernels.choice.launch([rows, 1, 1], CHOICE_THREADS).params(params)?)
    }

    /// From the raw projections of layer `l` to the input of its output projection.
    fn attend(
        &self,
        l: usize,
        bucket: usize,
        runs: usize,
        weights: &DeviceWeights,
        work: &Work,
        slots: &Slots,
    ) -> Result<()> {
        let (rows, kernels) = (BUCKETS[bucket], &self.kernels[bucket]);
        let (shape, layer) = (&weights.shape, &weights.layers[l]);
        let (heads, kv_heads, layers) = (shape.heads, shape.kv_heads, weights.layers.len());
        let run = |launch: Launch<'_>| -> Result<()> {
            let launch = launch.overlapping(self.overlapping);
            // SAFETY: the buffers have room for the rows of any bucket, the slots for all that rows may name.
            unsafe { launch.run(|| format!("{rows} rows of {heads} heads")) }
        };
        let [q, k, v, k_shift, v_shift, gate, output_gate] = weights.start;
        let params = DecodeHeads {
            rows: work.input.address().into(),
            raw: work.raw.address().into(),
            q: work.q.address().into(),
            tables: slots.tables.address().into(),
            last: slots.last.address().into(),
            now: slots.now.address().into(),
            q_norm: layer.q_norm.into(),
            k_norm: layer.k_norm.into(),
            gate_bias: layer.gate_bias.into(),
            rope: weights.rope.as_ref().map_or(0, |table| table.address()).into(),
            start: [q, k, v, k_shift, v_shift, gate],
            stride: weights.stride,
            layers,
            layer: l,
            heads,
            kv_heads,
            q_shared: layer.q_shared,
            k_shared: layer.k_shared,
            qk_eps: shape.qk_eps,
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
        };
        let units = (heads + 2 * kv_heads).div_ceil(ROW_WARPS);
        run(kernels.heads.launch([units, rows, 1], ROW_THREADS).params(params)?)?;
        let params = DecodeAttention {
            rows: work.input.address().into(),
            tables: slots.tables.address().into(),
            q: work.q.address().into(),
            now: slots.now.address().into(),
            thresholds: (weights.thresholds.address() + (8 * l * heads) as u64).into(),
            parts: work.parts.address().into(),
            layers,
            layer: l,
            heads,
            kv_heads,
            window: shape.window.unwrap_or(0),
            gated: gate >= 0,
        };
        let grid = [runs, kv_heads, rows];
        run(kernels.attention.launch(grid, ATTENTION_THREADS).params(params)?)?;
        let params = DecodeMerge {
            rows: work.input.address().into(),
            parts: work.parts.address().into(),
            raw: work.raw.address().into(),
            norm: layer.output_norm.into(),
            y: work.mixed.address().into(),
            stride: weights.stride,
            heads,
            gate: output_gate,
            act: activation_code(shape.output_act),
            eps: shape.norm_eps,
        };
        let grid = [heads.div_ceil(ROW_WARPS), rows, 1];
        run(kernels.merge.launch(grid, ROW_THREADS).params(params)?)
    }
}
