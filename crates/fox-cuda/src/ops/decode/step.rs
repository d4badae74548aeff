//! The launches of a decode step.

use super::dequantize::Dequantizer;
use super::kernels::{
    ATTENTION_THREADS, BUCKETS, FEW_ROWS, Family, Kernels, MAX_ROWS, ROW_THREADS, SAMPLE_THREADS,
    Tiling, attend_grid, product, product_module,
};
use super::params::{
    DecodeAttentionParams, DecodeHeads, DecodeMatmul, DecodeMatrix, DecodeMerge, DecodeNorm,
    DecodeSample, DecodeTable, DecodeToken, DrawParams, MAX_MATRICES,
};
use super::weights::{DeviceWeights, single};
use crate::launch::{Kernel, Launch};
use crate::ops::attention::tensor_map::TensorMap;
use crate::ops::head_fragments::activation_code;
use crate::params::{MAX_K_SPLITS, MAX_KV_SPLITS, Param};
use crate::{Buffer, Error, Gpu, Result};

/// Largest head dim of attention in one launch: wider heads spill registers.
const ATTEND_WIDTH: usize = 128;

/// Pages of a head up to which attention in one launch is faster: measured to 8 pages (12% of a step of 256 rows; 60% at
/// 16,000 tokens of which a few pages are held), while at 63 pages it takes 1.6 times as long with 32 rows.
pub(super) const SHORT_PAGES: usize = 8;

/// How a step attends. The bits are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionLaunches {
    /// In one launch, when no head holds more than [`SHORT_PAGES`].
    One,
    /// In three, over at most this many KV splits.
    Split(usize),
}

/// Warps of a thread block of the row-wise kernels.
const ROW_WARPS: usize = ROW_THREADS / 32;

/// The tile sizes of the matmuls of a bucket.
#[derive(Clone, Copy)]
struct Tilings {
    family: Family,
    /// Query, key and value projections, and logits.
    wide: Tiling,
    /// Output projection of attention.
    heads: Tiling,
    /// Gate and up.
    glu: Tiling,
    /// Down.
    down: Tiling,
}

impl Tilings {
    fn new(gpu: &Gpu, rows: usize, weights: &DeviceWeights) -> Self {
        let widths = [weights.width, weights.heads_width, weights.inner];
        let family = Family::of(gpu, rows, &widths);
        let tiling = |width: usize, glu: bool| Tiling::new(family, rows, width, glu);
        Tilings {
            family,
            wide: tiling(weights.width, false),
            heads: tiling(weights.heads_width, false).split(),
            glu: tiling(weights.width, true),
            down: tiling(weights.inner, false).split(),
        }
    }
}

/// The matmul kernels of a bucket.
struct Products {
    tilings: Tilings,
    wide: Kernel,
    heads: Kernel,
    glu: Kernel,
    down: Kernel,
}

impl Products {
    fn new(gpu: &Gpu, tilings: Tilings, int8: bool) -> Result<Self> {
        let product = |tiling: Tiling| product(gpu, tiling, int8);
        Ok(Products {
            tilings,
            wide: product(tilings.wide)?,
            heads: product(tilings.heads)?,
            glu: product(tilings.glu)?,
            down: product(tilings.down)?,
        })
    }
}

const ROW_BYTES: usize = size_of::<<DecodeToken as Param>::Device>();
const DRAW_BYTES: usize = size_of::<<DrawParams as Param>::Device>();

/// The buffers of a step, for the rows of the largest bucket.
pub(super) struct Workspace {
    /// The rows of a step, [`DecodeToken`]s, and behind them their sampling parameters, [`DrawParams`].
    pub(super) input: Buffer<u8>,
    /// Residual stream `[rows, width]`.
    h: Buffer<f32>,
    /// Output of a block half `[k_splits][rows, width]`.
    delta: Buffer<f32>,
    /// Normalized residual stream, blocked `[rows, width]`.
    x: Buffer<u16>,
    /// Raw projections `[rows, stride]`.
    raw: Buffer<f32>,
    /// `[rows, heads * d]`.
    q: Buffer<f32>,
    /// Split-KV partial results `[rows][heads][MAX_KV_SPLITS][d + 4]`.
    partials: Buffer<f32>,
    /// Output of attention, blocked `[rows, heads * d]`.
    mixed: Buffer<u16>,
    /// Output of the GLU, blocked `[rows, inner]`.
    inner: Buffer<u16>,
    /// Dequantized weights of the matmul under way.
    dequantized: Buffer<u16>,
    /// `[rows, V]`.
    pub(super) logits: Buffer<f32>,
    /// Ids, then bits of log-probabilities `[2, MAX_ROWS]`.
    pub(super) sampled: Buffer<u32>,
}

impl Workspace {
    pub(super) fn new(gpu: &Gpu, rows: usize, weights: &DeviceWeights) -> Result<Self> {
        let shape = &weights.shape;
        Ok(Workspace {
            input: gpu.zeros(rows * (ROW_BYTES + DRAW_BYTES))?,
            h: gpu.alloc(rows * weights.width)?,
            delta: gpu.alloc(MAX_K_SPLITS * rows * weights.width)?,
            x: gpu.alloc(rows * weights.width)?,
            raw: gpu.alloc(rows * weights.stride)?,
            q: gpu.alloc(rows * weights.heads_width)?,
            partials: gpu.alloc(rows * shape.heads * MAX_KV_SPLITS * (shape.head_dim + 4))?,
            mixed: gpu.alloc(rows * weights.heads_width)?,
            inner: gpu.alloc(rows * weights.inner)?,
            dequantized: gpu.alloc(if rows > FEW_ROWS { weights.most_packed } else { 0 })?,
            logits: gpu.alloc(rows * weights.vocab)?,
            sampled: gpu.zeros(2 * MAX_ROWS)?,
        })
    }
}

/// The state of all slots on the device, except pages.
pub(super) struct SlotState {
    /// `[slots][layers]`.
    pub(super) tables: Buffer<<DecodeTable as Param>::Device>,
    /// Sums of the log gates `[slots][layers][heads]`.
    pub(super) gate_sums: Buffer<f64>,
    /// Last raw rows of keys and values `[slots][layers][2][kv_heads * d]`.
    pub(super) last: Buffer<u16>,
}

/// The kernels of the steps of a model, by bucket.
pub(super) struct Steps {
    kernels: Vec<Kernels>,
    products: Vec<Products>,
    dequantizer: Dequantizer,
    overlapping: bool,
}

/// Moves the present matrices to the front and assigns their thread blocks; the numbers of matrices and thread blocks.
fn number_blocks(matrices: &mut [DecodeMatrix; MAX_MATRICES], tiling: Tiling) -> (usize, usize) {
    let (mut count, mut blocks) = (0, 0);
    for n in 0..MAX_MATRICES {
        if matrices[n].rows > 0 {
            matrices[count] = DecodeMatrix { first_block: blocks, ..matrices[n] };
            blocks += tiling.blocks(matrices[n].rows);
            count += 1;
        }
    }
    (count, blocks)
}

/// The descriptors of a matmul's weights, `[1 or with GLU 2][outputs][width]` in boxes of `weight_box` rows and outputs;
/// unused descriptors repeat the first.
fn weight_maps(
    matrices: &[DecodeMatrix],
    width: usize,
    weight_box: [usize; 2],
) -> Result<[TensorMap; MAX_MATRICES]> {
    let map = |matrix: &DecodeMatrix| {
        TensorMap::of_bf16(matrix.w.address(), [weight_box[0], matrix.rows, width], weight_box)
    };
    let none = || Error::argument("step", "a matmul without weights");
    let mut maps = [map(matrices.first().ok_or_else(none)?)?; MAX_MATRICES];
    for (to, matrix) in maps.iter_mut().zip(matrices).skip(1) {
        *to = map(matrix)?;
    }
    Ok(maps)
}

/// Launches a matmul.
///
/// # Safety
/// The addresses must belong to live buffers of the sizes that the matmul implies.
pub(super) unsafe fn launch_product(
    kernel: &Kernel,
    tiling: Tiling,
    rows: usize,
    mut params: DecodeMatmul,
    overlapping: bool,
) -> Result<()> {
    let (count, blocks) = number_blocks(&mut params.matrices, tiling);
    params.matrix_count = count;
    let width = params.width;
    let grid = [tiling.row_blocks(rows), blocks, tiling.k_splits()];
    let mut launch = kernel.launch(grid, tiling.threads()).shared(tiling.shared());
    if let Some(weight_box) = tiling.weight_box() {
        launch = launch.opaque(weight_maps(&params.matrices[..count], width, weight_box)?);
    }
    let launch = launch.overlapping(overlapping).params(params)?;
    // SAFETY: the caller's promise.
    unsafe { launch.run(|| format!("{rows} rows of {width}")) }
}

impl Steps {
    /// Compiles the kernels; `overlapping` launches use programmatic dependent launch on GPUs that have it.
    pub(super) fn new(
        gpu: &Gpu,
        buckets: usize,
        weights: &DeviceWeights,
        overlapping: bool,
    ) -> Result<Self> {
        let int8 = weights.most_packed > 0;
        let (width, head_dim) = (weights.width, weights.shape.head_dim);
        let tilings =
            BUCKETS[..buckets].iter().map(|rows| (*rows, Tilings::new(gpu, *rows, weights)));
        let tilings: Vec<(usize, Tilings)> = tilings.collect();
        let attends = gpu.generation().has_wgmma()
            && weights.shape.heads == weights.shape.kv_heads
            && head_dim <= ATTEND_WIDTH;
        let mut modules = Vec::new();
        for &(rows, Tilings { family, wide, heads, glu, down }) in &tilings {
            modules.extend([wide, heads, glu, down].map(|tiling| product_module(tiling, int8)));
            modules.extend(Kernels::modules(family, rows, width, head_dim, attends));
        }
        gpu.compile_all(&modules)?;
        let kernels = |&(rows, tilings): &(usize, Tilings)| {
            Kernels::new(gpu, tilings.family, rows, width, head_dim, attends)
        };
        let products = |&(_, tilings): &(usize, Tilings)| Products::new(gpu, tilings, int8);
        Ok(Steps {
            kernels: tilings.iter().map(kernels).collect::<Result<_>>()?,
            products: tilings.iter().map(products).collect::<Result<_>>()?,
            dequantizer: Dequantizer::new(gpu)?,
            overlapping: overlapping && gpu.generation().has_dependent_launch(),
        })
    }

    /// Whether steps of a bucket can attend in one launch: where the model and the GPU allow it.
    pub(super) fn attends_in_one(&self, bucket: usize) -> bool {
        self.kernels[bucket].attend.is_some()
    }

    /// Launches a step of a bucket.
    pub(super) fn launch(
        &self,
        bucket: usize,
        attention: AttentionLaunches,
        weights: &DeviceWeights,
        work: &Workspace,
        slots: &SlotState,
    ) -> Result<()> {
        let (rows, products, kernels) =
            (BUCKETS[bucket], &self.products[bucket], &self.kernels[bucket]);
        let width = weights.width;
        let run = |launch: Launch<'_>| -> Result<()> {
            let launch = launch.overlapping(self.overlapping);
            // SAFETY: the buffers have room for the rows of any bucket, and `begin` has checked slots and positions.
            unsafe { launch.run(|| format!("{rows} rows of {width}")) }
        };
        let multiply = |kernel: &Kernel, tiling: Tiling, mut params: DecodeMatmul| {
            let to = work.dequantized.address();
            // SAFETY: as above; there is room for the int8 weights of any matmul.
            unsafe {
                let dequantized = !tiling.reads_int8()
                    && self.dequantizer.run(&mut params, tiling.is_glu(), to, self.overlapping)?;
                // Matmuls read weights before they wait for their predecessor.
                launch_product(kernel, tiling, rows, params, self.overlapping && !dequantized)
            }
        };
        // Adds up the partial sums of the matmul before it.
        let norm = |norm: u64, embeddings: u64, product: Tiling| -> Result<()> {
            let params = DecodeNorm {
                rows: work.input.address().into(),
                embeddings: embeddings.into(),
                sampled: work.sampled.address().into(),
                h: work.h.address().into(),
                delta: work.delta.address().into(),
                norm: norm.into(),
                x: work.x.address().into(),
                width,
                k_splits: product.k_splits(),
                eps: weights.norm_eps,
            };
            run(kernels.norm.launch([rows, 1, 1], ROW_THREADS).params(params)?)
        };
        let on_x = DecodeMatmul {
            x: work.x.address().into(),
            y: work.raw.address().into(),
            inner: work.inner.address().into(),
            width,
            stride: weights.stride,
            act: activation_code(weights.mlp_act),
            ..DecodeMatmul::default()
        };
        for (l, layer) in weights.layers.iter().enumerate() {
            let embeddings = if l == 0 { weights.embeddings } else { 0 };
            norm(layer.mixer_norm, embeddings, products.tilings.down)?;
            let params = DecodeMatmul { matrices: layer.matrices, ..on_x };
            multiply(&products.wide, products.tilings.wide, params)?;
            self.attend(l, bucket, attention, weights, work, slots)?;
            let params = DecodeMatmul {
                x: work.mixed.address().into(),
                y: work.delta.address().into(),
                matrices: single(layer.o_proj),
                width: weights.heads_width,
                stride: width,
                ..DecodeMatmul::default()
            };
            multiply(&products.heads, products.tilings.heads, params)?;
            norm(layer.mlp_norm, 0, products.tilings.heads)?;
            let params = DecodeMatmul { matrices: single(layer.gate_up), ..on_x };
            multiply(&products.glu, products.tilings.glu, params)?;
            let params = DecodeMatmul {
                x: work.inner.address().into(),
                y: work.delta.address().into(),
                matrices: single(layer.down),
                width: weights.inner,
                stride: width,
                ..DecodeMatmul::default()
            };
            multiply(&products.down, products.tilings.down, params)?;
        }
        norm(weights.norm, 0, products.tilings.down)?;
        let params = DecodeMatmul {
            y: work.logits.address().into(),
            matrices: single(weights.head),
            stride: weights.vocab,
            ..on_x
        };
        multiply(&products.wide, products.tilings.wide, params)?;
        let sampled = work.sampled.address();
        let params = DecodeSample {
            logits: work.logits.address().into(),
            draws: (work.input.address() + (rows * ROW_BYTES) as u64).into(),
            ids: sampled.into(),
            logprobs: (sampled + 4 * MAX_ROWS as u64).into(),
            vocab: weights.vocab,
        };
        run(kernels.sample.launch([rows, 1, 1], SAMPLE_THREADS).params(params)?)
    }

    /// Launches attention of layer `l`: from the raw projections to the input of the output projection.
    fn attend(
        &self,
        l: usize,
        bucket: usize,
        attention: AttentionLaunches,
        weights: &DeviceWeights,
        work: &Workspace,
        slots: &SlotState,
    ) -> Result<()> {
        let (rows, kernels) = (BUCKETS[bucket], &self.kernels[bucket]);
        let (shape, layer) = (&weights.shape, &weights.layers[l]);
        let (heads, kv_heads, layers) = (shape.heads, shape.kv_heads, weights.layers.len());
        let run = |launch: Launch<'_>| -> Result<()> {
            let launch = launch.overlapping(self.overlapping);
            // SAFETY: the buffers have room for the rows of any bucket, and `begin` has checked slots and positions.
            unsafe { launch.run(|| format!("{rows} rows of {heads} heads")) }
        };
        let [q, k, v, k_shift, v_shift, gate, output_gate] = weights.start;
        let to_heads = DecodeHeads {
            rows: work.input.address().into(),
            raw: work.raw.address().into(),
            q: work.q.address().into(),
            tables: slots.tables.address().into(),
            last: slots.last.address().into(),
            gate_sums: slots.gate_sums.address().into(),
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
        let to_attention = DecodeAttentionParams {
            rows: work.input.address().into(),
            tables: slots.tables.address().into(),
            q: work.q.address().into(),
            gate_sums: slots.gate_sums.address().into(),
            thresholds: (weights.thresholds.address() + (8 * l * heads) as u64).into(),
            partials: work.partials.address().into(),
            layers,
            layer: l,
            heads,
            kv_heads,
            window: shape.window.unwrap_or(0),
            gated: gate >= 0,
        };
        let to_merge = DecodeMerge {
            rows: work.input.address().into(),
            partials: work.partials.address().into(),
            raw: work.raw.address().into(),
            norm: layer.output_norm.into(),
            sinks: layer.sinks.into(),
            y: work.mixed.address().into(),
            stride: weights.stride,
            heads,
            gate: output_gate,
            act: activation_code(shape.output_act),
            eps: shape.norm_eps,
        };
        let kv_splits = match (attention, &kernels.attend) {
            (AttentionLaunches::One, Some(attend)) => {
                let (grid, threads) = attend_grid(rows, heads);
                let launch = attend.launch(grid, threads).params(to_heads)?;
                return run(launch.params(to_attention)?.params(to_merge)?);
            }
            (AttentionLaunches::One, None) => {
                return Err(Error::argument("step", "attention in one launch is not compiled"));
            }
            (AttentionLaunches::Split(kv_splits), _) => kv_splits,
        };
        let units = (heads + 2 * kv_heads).div_ceil(ROW_WARPS);
        run(kernels.heads.launch([units, rows, 1], ROW_THREADS).params(to_heads)?)?;
        let grid = [kv_splits, kv_heads, rows];
        run(kernels.attention.launch(grid, ATTENTION_THREADS).params(to_attention)?)?;
        let grid = [heads.div_ceil(ROW_WARPS), rows, 1];
        run(kernels.merge.launch(grid, ROW_THREADS).params(to_merge)?)
    }
}
