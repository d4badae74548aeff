//! Steps of one token: products of a few rows, and a whole block in five launches.

use fox_tensor::{DType, DecodeBlock, DecodeOut, DecodeProjection, Tensor};

use super::heads::activation_code;
use super::storage::memory;
use super::{Cuda, Operand, Precision, int};
use crate::{Buffer, Kernel, KernelArg, Result, Source};

/// Sequences of one launch, at most; the kernels' `MAX_BATCH`.
pub(super) const MAX_BATCH: usize = 8;
const MAX_PARTS: usize = 7;
const MAX_GROUP: usize = 8;
const THREADS: usize = 256;
/// Rows of a matrix instruction.
const TILE: usize = 16;
/// Shared memory that every supported GPU gives to one block.
const SHARED: usize = 99 * 1024;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Part {
    w: u64,
    bias: u64,
    y: u64,
    rows: i32,
    wide: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MatvecParams {
    h: u64,
    delta: u64,
    norm: u64,
    sum: u64,
    width: i32,
    batch: i32,
    eps: f32,
    part_count: i32,
    glu: i32,
    act: i32,
    tiles: i32,
    unused: i32,
    parts: [Part; MAX_PARTS],
}

// SAFETY: mirrors the struct of the same name in decode.cu.
unsafe impl KernelArg for MatvecParams {}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AttendParams {
    q: u64,
    k: u64,
    v: u64,
    k_shift: u64,
    v_shift: u64,
    gate: u64,
    gate_bias: u64,
    last_k: u64,
    last_v: u64,
    next_k: u64,
    next_v: u64,
    q_norm: u64,
    k_norm: u64,
    rope: u64,
    k_cache: u64,
    v_cache: u64,
    gate_cache: u64,
    partial: u64,
    y: u64,
    out_norm: u64,
    out_gate: u64,
    heads: i32,
    kv_heads: i32,
    splits: i32,
    window: i32,
    q_shared: i32,
    k_shared: i32,
    act: i32,
    unused: i32,
    scale: f32,
    qk_eps: f32,
    out_eps: f32,
    k_start: [i32; MAX_BATCH],
    k_len: [i32; MAX_BATCH],
}

// SAFETY: mirrors the struct of the same name in decode.cu.
unsafe impl KernelArg for AttendParams {}

/// Keys of one thread block of the attention; the kernels' `SPLIT`.
fn split(head_dim: usize) -> usize {
    8 * THREADS / (head_dim / 8)
}

/// Defines of the kernels for such a width of products and such heads.
pub(super) fn defines(width: usize, head_dim: usize) -> Vec<String> {
    let pieces = width.div_ceil(256);
    let chunks = pieces.div_ceil(pieces.div_ceil(8));
    vec![format!("CHUNKS={chunks}"), format!("HEAD_DIM={head_dim}")]
}

/// Products of one input with several matrices.
struct Matvec {
    params: MatvecParams,
}

impl Matvec {
    fn new(h: u64, batch: usize, width: usize) -> Self {
        let params =
            MatvecParams { h, width: int(width), batch: int(batch), ..MatvecParams::default() };
        Matvec { params }
    }

    /// The input is `rms(h + delta) * w`; the sum is written to `sum`.
    fn norm(mut self, delta: u64, w: u64, eps: f32, sum: u64) -> Self {
        self.params = MatvecParams { delta, norm: w, eps, sum, ..self.params };
        self
    }

    fn part(mut self, w: u64, bias: u64, rows: usize, y: u64, wide: bool) -> Self {
        let at = self.params.part_count as usize;
        self.params.parts[at] = Part { w, bias, y, rows: int(rows), wide: i32::from(wide) };
        self.params.part_count += 1;
        self.params.tiles += int(rows.div_ceil(TILE));
        self
    }

    /// Pairs of rows `n` and `n + rows` of a part: gate and up.
    fn glu(mut self, w: u64, rows: usize, y: u64, act: i32) -> Self {
        self = self.part(w, 0, rows, y, false);
        self.params =
            MatvecParams { glu: 1, act, tiles: int(rows.div_ceil(TILE / 2)), ..self.params };
        self
    }
}

impl Cuda {
    /// Whether products of so many rows of this width go through the kernel for few rows.
    pub(super) fn is_thin(&self, rows: usize, width: usize) -> bool {
        self.precision == Precision::Bf16
            && (1..=MAX_BATCH).contains(&rows)
            && width.is_multiple_of(8)
            && 2 * rows * width <= SHARED
    }

    /// `y[R, N] = x[R, K] w[N, K]^T` for few rows.
    pub(super) fn thin_product(
        &self,
        x: &Operand<'_>,
        w: &Operand<'_>,
        y: u64,
        [rows, n, k]: [usize; 3],
        wide: bool,
    ) -> Result<()> {
        let product = Matvec::new(x.address(), rows, k).part(w.address(), 0, n, y, wide);
        self.run_matvec(&product)
    }

    fn run_matvec(&self, product: &Matvec) -> Result<()> {
        let p = &product.params;
        let (batch, width) = (p.batch as usize, p.width as usize);
        let kernel = self.decode_kernel("matvec", width, 64)?;
        // As many blocks as may run at once.
        let blocks = (p.tiles as usize).min(2 * self.gpu.processors() as usize);
        let shared = 2 * batch * width;
        let launch = kernel.launch([blocks as u32, 1, 1], THREADS as u32).shared(shared as u32);
        let launch = launch.overlapping(self.overlaps());
        // SAFETY: parameters as declared in decode.cu; the callers' operands have the sizes named.
        unsafe { launch.arg(p).run(|| format!("{batch} rows of {width}, {} tiles", p.tiles)) }
    }

    /// Whether a launch may begin before the one in front of it has ended: since Hopper.
    fn overlaps(&self) -> bool {
        self.gpu.architecture().major >= 9
    }

    fn decode_kernel(
        &self,
        entry: &'static str,
        width: usize,
        head_dim: usize,
    ) -> Result<std::sync::Arc<Kernel>> {
        self.gpu.bind()?;
        let key = (entry, width, head_dim);
        self.decode_kernels
            .get(key, || self.gpu.kernel(Source::DECODE, &defines(width, head_dim), entry))
    }

    /// Whether the fused step can do this block.
    fn can_decode(&self, block: &DecodeBlock<'_>) -> bool {
        let (batch, width) = (block.h.rows(), block.h.cols());
        let inner = block.down.cols();
        let single = block.segments.as_slice().iter().enumerate();
        self.is_thin(batch, width)
            && self.is_thin(batch, inner)
            && matches!(block.head_dim, 64 | 128 | 256)
            && block.heads / block.kv_heads <= MAX_GROUP
            && block.segments.len() == batch
            && single.clone().all(|(b, s)| s.q_len == 1 && s.q_start == b)
            && block.k_cache.dtype() == DType::Bf16
            && !block.k_cache.is_shared()
            && !block.v_cache.is_shared()
            && block.gate_cache.as_ref().is_none_or(|gates| !gates.is_shared())
    }

    /// Five launches, six with long sequences; `None` when the block is not of the kind they know.
    pub(super) fn decode_one(&self, mut block: DecodeBlock<'_>) -> Result<Option<DecodeOut>> {
        if !self.can_decode(&block) {
            return Ok(None);
        }
        let (batch, width, device) = (block.h.rows(), block.h.cols(), block.h.device().clone());
        let (q_width, kv_width) = (block.heads * block.head_dim, block.kv_heads * block.head_dim);
        let h = self.activation(block.h)?;
        let delta = block.delta.map(|x| self.activation(x)).transpose()?;
        // Everything that comes of the normalised stream, in one launch.
        let raw: Buffer<f32> = self
            .gpu
            .alloc(batch * (2 * q_width + 2 * kv_width + 2 * block.kv_heads + block.heads))?;
        let mut free = raw.address();
        let mut take = |len: usize| {
            let at = free;
            free += 4 * (batch * len) as u64;
            at
        };
        let (sum, sum_at) = self.output([batch, width], DType::Bf16, &device)?;
        let norm = self.real(block.mixer_norm)?;
        let mut product = Matvec::new(h.address(), batch, width).norm(
            super::address(&delta),
            norm.address(),
            block.norm_eps,
            sum_at,
        );
        let mut held = Vec::new();
        let mut add =
            |w: &Tensor, bias: Option<&Tensor>, product: Matvec| -> Result<(Matvec, u64)> {
                let weights = self.weight_address(w)?;
                let bias = bias.map(|x| self.real_address(x)).transpose()?.unwrap_or(0);
                let y = take(w.rows());
                held.push(y);
                Ok((product.part(weights, bias, w.rows(), y, true), y))
            };
        let mut params = AttendParams::default();
        (product, params.q) = add(block.q.weight, block.q.bias, product)?;
        (product, params.k) = add(block.k.weight, block.k.bias, product)?;
        (product, params.v) = add(block.v.weight, block.v.bias, product)?;
        for (shift, at) in
            [(block.k.shift, &mut params.k_shift), (block.v.shift, &mut params.v_shift)]
        {
            if let Some(w) = shift {
                (product, *at) = add(w, None, product)?;
            }
        }
        if let Some((w, bias)) = block.gate {
            (product, params.gate) = add(w, None, product)?;
            params.gate_bias = self.real_address(bias)?;
        }
        if let Some(w) = block.output_gate {
            (product, params.out_gate) = add(w, None, product)?;
        }
        self.run_matvec(&product)?;
        let (last_k, last_v, y) = self.decode_attention(&mut block, params, batch, &device)?;
        let (mixed, mixed_at) = self.output([batch, width], DType::Bf16, &device)?;
        let o_proj = self.weight_address(block.o_proj)?;
        let product = Matvec::new(y.address(), batch, q_width);
        self.run_matvec(&product.part(o_proj, 0, width, mixed_at, false))?;
        // The MLP: gate and up rows in pairs, then down.
        let inner_width = block.down.cols();
        let inner = self.gpu.alloc::<half::bf16>(batch * inner_width)?;
        let (stream, stream_at) = self.output([batch, width], DType::Bf16, &device)?;
        let norm = self.real(block.mlp_norm)?;
        let gate_up = self.weight_address(block.gate_up)?;
        let product = Matvec::new(sum_at, batch, width)
            .norm(mixed_at, norm.address(), block.norm_eps, stream_at)
            .glu(gate_up, inner_width, inner.address(), activation_code(block.mlp_act));
        self.run_matvec(&product)?;
        let (delta, delta_at) = self.output([batch, width], DType::Bf16, &device)?;
        let down = self.weight_address(block.down)?;
        let product = Matvec::new(inner.address(), batch, inner_width);
        self.run_matvec(&product.part(down, 0, width, delta_at, false))?;
        // Memory of the stages goes back now: whatever uses it next comes later in the stream.
        drop((sum, mixed));
        Ok(Some(DecodeOut { h: stream, delta, last_k, last_v }))
    }

    /// Shift, norms, rotation, cache, attention, output norm and gate: the raw rows to be kept, and
    /// `[batch, H * d]`.
    #[allow(clippy::type_complexity)]
    fn decode_attention(
        &self,
        block: &mut DecodeBlock<'_>,
        mut params: AttendParams,
        batch: usize,
        device: &fox_tensor::Device,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Buffer<half::bf16>)> {
        let (heads, head_dim) = (block.heads, block.head_dim);
        let segments = block.segments.as_slice();
        let longest = segments.iter().map(|s| s.k_len).max().unwrap_or(1);
        let splits = longest.div_ceil(split(head_dim));
        let y = self.gpu.alloc::<half::bf16>(batch * heads * head_dim)?;
        let partial = match splits {
            1 => None,
            _ => Some(self.gpu.alloc::<f32>(batch * heads * splits * (head_dim + 4))?),
        };
        let rope = match block.rope {
            Some(rope) => Some(self.rope_table(rope, head_dim, block.segments)?),
            None => None,
        };
        let keep = |p: &DecodeProjection<'_>| -> Result<(Option<Tensor>, u64, u64)> {
            let Some(last) = p.last else { return Ok((None, 0, 0)) };
            let (next, at) = self.output(last.shape(), DType::Bf16, device)?;
            Ok((Some(next), memory(last)?.data.address(), at))
        };
        let (last_k, last_v);
        (last_k, params.last_k, params.next_k) = keep(&block.k)?;
        (last_v, params.last_v, params.next_v) = keep(&block.v)?;
        let maybe = |x: Option<&Tensor>| x.map_or(Ok(0), |x| self.real_address(x));
        let shared = |w: Option<&Tensor>| i32::from(w.is_some_and(|w| w.len() == head_dim));
        params.q_norm = maybe(block.q.norm)?;
        params.k_norm = maybe(block.k.norm)?;
        params.out_norm = maybe(block.output_norm)?;
        params.rope = rope.as_ref().map_or(0, |table| table.address());
        params.k_cache = self.writable(block.k_cache)?.write().address();
        params.v_cache = self.writable(block.v_cache)?.write().address();
        if let Some(gates) = block.gate_cache.as_deref_mut() {
            params.gate_cache = self.writable(gates)?.write().address();
        }
        params.partial = partial.as_ref().map_or(0, Buffer::address);
        params.y = y.address();
        (params.heads, params.kv_heads) = (int(heads), int(block.kv_heads));
        (params.splits, params.window) = (int(splits), block.window.map_or(0, int));
        (params.q_shared, params.k_shared) = (shared(block.q.norm), shared(block.k.norm));
        params.act = activation_code(block.output_act);
        params.scale = 1.0 / (head_dim as f32).sqrt();
        (params.qk_eps, params.out_eps) = (block.qk_eps, block.norm_eps);
        for (b, s) in segments.iter().enumerate() {
            (params.k_start[b], params.k_len[b]) = (int(s.k_start), int(s.k_len));
        }
        let kernel = self.decode_kernel("attend", 256, head_dim)?;
        let grid = [splits as u32, block.kv_heads as u32, batch as u32];
        let shapes = || format!("{batch} x {heads} heads of {head_dim}, {longest} keys");
        // SAFETY: parameters as declared in decode.cu; the cache has room for every segment's keys.
        unsafe {
            let launch = kernel.launch(grid, THREADS as u32).overlapping(self.overlaps());
            launch.arg(&params).run(shapes)?;
        }
        if splits > 1 {
            let kernel = self.decode_kernel("attend_splits", 256, head_dim)?;
            let grid = [heads as u32, batch as u32, 1];
            // SAFETY: as above.
            unsafe {
                let launch = kernel.launch(grid, THREADS as u32).overlapping(self.overlaps());
                launch.arg(&params).run(shapes)?;
            }
        }
        Ok((last_k, last_v, y))
    }

    /// Where the bf16 copy of weights lies; it is kept with them.
    fn weight_address(&self, w: &Tensor) -> Result<u64> {
        Ok(self.weights(w)?.address())
    }

    /// Where f32 values lie that need no conversion: parameters.
    fn real_address(&self, x: &Tensor) -> Result<u64> {
        Ok(super::f32_buffer(x)?.address())
    }
}
