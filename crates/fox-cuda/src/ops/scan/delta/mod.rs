//! The chunked delta rule; the algorithm is described in `scan_delta.cuh`.

use std::sync::Arc;

use fox_tensor::{DType, ScanExtras, ScanGrads, ScanInputs, ScanOut, ScanSpec, Shape, Tensor};

mod shape;

use super::chunks::{Chunk, ChunkTable, ChunkedSegment};
use super::operands::{HeldOperands, ScanOperands, check_saved};
use crate::backend::storage::{Data, memory};
use crate::backend::{Cuda, address};
use crate::params::{ConstPtr, KernelParams, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Error, Result, Source};
use shape::{CHANNEL_SLAB, CHUNK, DeltaShape, Pass, STATE_COLUMNS};

/// Segments up to this length are scanned token by token when no backward follows.
const STEPWISE_LEN: usize = 16;
/// Threads per block.
const THREADS: usize = 256;

kernel_params! {
    #[derive(Default)]
    struct DeltaParams {
        x: ScanOperands,
        /// States after the segments, shaped like `x.state`; or null.
        last_state: Ptr<f32>,
        /// Gradients of the states after the segments, shaped like `x.state`; null for zeros.
        d_last: ConstPtr<f32>,
        /// Gradients of the states before the segments, shaped like `x.state`; or null.
        d_first: Ptr<f32>,
        /// `[R, H * dv]`.
        o: Ptr<Real>,
        /// Before each chunk `[chunks, H, DK, DV]`.
        states: Ptr<Real>,
        /// `M V`, then `E`, `[chunks, H, 64, DV]`.
        errors: Ptr<Real>,
        /// `[chunks, H, 64, DK]`.
        y: Ptr<Real>,
        /// `M`, `[chunks, H, 64, 64]`.
        inverse: Ptr<Real>,
        /// `[chunks, H, 5, 64]`.
        factors: Ptr<f32>,
        /// `G`, `[chunks, H, DK, DV]`.
        d_states: Ptr<Real>,
        /// `scale (Q K^T * D)^T dO`, then `F`, `[chunks, H, 64, DV]`.
        d_errors: Ptr<Real>,
        /// With a decay per channel: `diag(p) K`, `diag(s) K` and `diag(p) Q`, `[chunks, H, 64, DK]`.
        reading_keys: Ptr<Real>,
        writing_keys: Ptr<Real>,
        reading_queries: Ptr<Real>,
        /// `K K^T * D` and `Q K^T * D`, `[chunks, H, 64, 64]`.
        overlaps: Ptr<f32>,
        scores: Ptr<f32>,
        /// Decays over each chunk `[chunks, H, DK]`.
        whole: Ptr<f32>,
        /// Gradients of these tiles and products, shaped like them.
        d_reading_keys: Ptr<f32>,
        d_writing_keys: Ptr<f32>,
        d_reading_queries: Ptr<f32>,
        d_overlaps: Ptr<f32>,
        d_scores: Ptr<f32>,
        /// As `q`, `k` and `v`.
        dq: Ptr<Real>,
        dk: Ptr<Real>,
        dv: Ptr<Real>,
        /// `[R, H * dk]` where heads share keys, else null.
        dq_parts: Ptr<f32>,
        dk_parts: Ptr<f32>,
        /// `[R, H]` or `[R, H * dk]`, or null.
        dlog_decay: Ptr<f32>,
        /// `[R, H]`, or null.
        dwrite: Ptr<f32>,
        /// `[chunks, H]`, or null.
        dskip: Ptr<f32>,
        chunks: ConstPtr<Chunk>,
        /// `[segments]`.
        segments: ConstPtr<ChunkedSegment>,
        /// Heads that share keys.
        group: usize,
    }

    list struct ShareKeys {
        /// `[R, G, dk]`.
        out: Ptr<Real>,
        /// `[R, H, dk]`.
        parts: ConstPtr<f32>,
        /// `R * G * dk`.
        count: u64,
        p: DeltaParams,
    }
}

const SCAN_DELTA: Source =
    source!("scan_delta", ["scan_delta.cuh"], [Chunk, ChunkedSegment, ScanOperands, DeltaParams]);
const SCAN_DELTA_BWD: Source = source!(
    "scan_delta_bwd",
    ["scan_delta.cuh"],
    [Chunk, ChunkedSegment, ScanOperands, DeltaParams, ShareKeys]
);

const SCAN_DELTA_CHANNEL: Source = source!(
    "scan_delta_channel",
    ["scan_delta.cuh"],
    [Chunk, ChunkedSegment, ScanOperands, DeltaParams]
);

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    let shapes = shape::typical();
    let of = |source| shapes.iter().map(move |shape| (source, shape.defines()));
    let channel = shapes.iter().filter(|shape| shape.channel);
    let channel = channel.map(|shape| (SCAN_DELTA_CHANNEL, shape.defines()));
    of(SCAN_DELTA).chain(of(SCAN_DELTA_BWD)).chain(channel).collect()
}

/// A call of the scan: variant, tables and operands.
struct DeltaScan<'a> {
    cuda: &'a Cuda,
    shape: DeltaShape,
    table: Arc<ChunkTable>,
    segments: usize,
    heads: usize,
    source: Source,
    params: DeltaParams,
    _operands: HeldOperands<'a>,
}

impl<'a> DeltaScan<'a> {
    fn new(cuda: &'a Cuda, pass: Pass, inputs: &ScanInputs<'a>, spec: &ScanSpec) -> Result<Self> {
        let bf16 = cuda.activations() == DType::Bf16;
        let channel = inputs.log_decay.is_some_and(|decay| decay.cols() != spec.heads);
        let shape = DeltaShape::new(spec, channel, bf16, cuda.gpu.shared_bytes(), pass)?;
        let source = match pass {
            Pass::Forward => SCAN_DELTA,
            Pass::Backward => SCAN_DELTA_BWD,
        };
        let table = cuda.chunk_table(&spec.segments, CHUNK)?;
        let (x, operands) = cuda.scan_operands(inputs, spec)?;
        let params = DeltaParams {
            x,
            chunks: table.chunks.address().into(),
            segments: table.segments.address().into(),
            group: spec.heads / spec.key_heads,
            ..DeltaParams::default()
        };
        let (segments, heads) = (spec.segments.len(), spec.heads);
        Ok(DeltaScan { cuda, shape, table, segments, heads, source, params, _operands: operands })
    }

    /// Number of scratch tiles: chunks times heads.
    fn tiles(&self) -> usize {
        self.table.count * self.heads
    }

    /// Scratch for `len` activations in each tile.
    fn scratch(&self, len: usize) -> Result<Data> {
        Data::alloc(&self.cuda.gpu, self.tiles() * len, self.cuda.activations())
    }

    fn factors(&self) -> Result<Buffer<f32>> {
        self.cuda.gpu.alloc(self.tiles() * 5 * CHUNK)
    }

    /// An output whose rows outside every segment are zero.
    fn rows(&self, like: &Tensor, dtype: DType) -> Result<(Tensor, u64)> {
        self.rows_of(like.shape(), like, dtype)
    }

    fn rows_of(
        &self,
        shape: impl Into<Shape>,
        like: &Tensor,
        dtype: DType,
    ) -> Result<(Tensor, u64)> {
        let (mut out, _) = self.cuda.output(shape, dtype, like.device())?;
        if self.table.covered < like.rows() {
            self.cuda.fill_with(&mut out, 0.0)?;
        }
        let at = memory(&out)?.data.address();
        Ok((out, at))
    }

    /// Launches a kernel over all chunks and heads.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    unsafe fn over_chunks(&self, entry: &'static str, shared: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(entry, [self.table.count, self.heads, 1], shared, self.params) }
    }

    /// Launches a kernel whose blocks iterate over the chunks of a segment.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    unsafe fn over_segments(&self, entry: &'static str, shared: usize) -> Result<()> {
        let grid = [self.shape.dv / STATE_COLUMNS, self.heads, self.segments];
        // SAFETY: the caller's promise.
        unsafe { self.launch(entry, grid, shared, self.params) }
    }

    unsafe fn launch<P: KernelParams>(
        &self,
        entry: &'static str,
        grid: [usize; 3],
        shared: usize,
        params: P,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_from(self.source, entry, grid, shared, params) }
    }

    /// The same for a kernel of another source.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    unsafe fn launch_from<P: KernelParams>(
        &self,
        source: Source,
        entry: &'static str,
        grid: [usize; 3],
        shared: usize,
        params: P,
    ) -> Result<()> {
        let gpu = &self.cuda.gpu;
        let kernel = gpu.cached_kernel(source, entry, self.shape, |shape| shape.defines())?;
        let launch = kernel.launch(grid, THREADS).shared(shared).params(params)?;
        // SAFETY: the caller's promise.
        self.cuda.timed(entry, || unsafe { launch.run(|| format!("{:?}", self.shape)) })
    }

    /// With a decay per channel: computes the decayed tiles and products, which the other kernels read.
    fn prepare_channels(&mut self) -> Result<Option<ChannelTiles>> {
        if !self.shape.channel {
            return Ok(None);
        }
        let (dk, tiles) = (self.shape.dk, self.tiles());
        let reals = [(); 3].map(|()| self.scratch(CHUNK * dk));
        let [reading_keys, writing_keys, reading_queries] = reals;
        let (reading_keys, writing_keys, reading_queries) =
            (reading_keys?, writing_keys?, reading_queries?);
        let overlaps = self.cuda.gpu.alloc::<f32>(tiles * CHUNK * CHUNK)?;
        let scores = self.cuda.gpu.alloc::<f32>(tiles * CHUNK * CHUNK)?;
        let whole = self.cuda.gpu.alloc::<f32>(tiles * dk)?;
        self.params.reading_keys = reading_keys.address().into();
        self.params.writing_keys = writing_keys.address().into();
        self.params.reading_queries = reading_queries.address().into();
        self.params.overlaps = overlaps.address().into();
        self.params.scores = scores.address().into();
        self.params.whole = whole.address().into();
        let grid = [self.table.count, self.heads, 1];
        // SAFETY: the operands are validated at entry; scratch is allocated in the sizes that `DeltaParams` documents.
        unsafe { self.launch_from(SCAN_DELTA_CHANNEL, "delta_channel", grid, 0, self.params)? };
        Ok(Some(ChannelTiles {
            _tiles: [reading_keys, writing_keys, reading_queries],
            _products: [overlaps, scores, whole],
        }))
    }

    /// Scratch for the gradients of the decayed tiles and products.
    fn channel_gradients(&mut self) -> Result<Option<[Buffer<f32>; 5]>> {
        if !self.shape.channel {
            return Ok(None);
        }
        let (keys, square) = (CHUNK * self.shape.dk, CHUNK * CHUNK);
        let alloc = |len: usize| self.cuda.gpu.alloc::<f32>(self.tiles() * len);
        let buffers = [alloc(keys)?, alloc(keys)?, alloc(keys)?, alloc(square)?, alloc(square)?];
        let [reading_keys, writing_keys, reading_queries, overlaps, scores] =
            buffers.each_ref().map(Buffer::address);
        self.params.d_reading_keys = reading_keys.into();
        self.params.d_writing_keys = writing_keys.into();
        self.params.d_reading_queries = reading_queries.into();
        self.params.d_overlaps = overlaps.into();
        self.params.d_scores = scores.into();
        Ok(Some(buffers))
    }

    /// Elements per tile saved for the backward: the states, then the errors.
    fn saved_len(&self) -> (usize, usize) {
        (self.shape.dk * self.shape.dv, CHUNK * self.shape.dv)
    }

    /// Dimensions of what is saved for the backward.
    fn saved_dims(&self) -> [usize; 2] {
        let (states, errors) = self.saved_len();
        [self.tiles(), states + errors]
    }

    fn set_saved(&mut self, at: u64) {
        let states = self.tiles() * self.saved_len().0 * self.cuda.activations().size();
        (self.params.states, self.params.errors) = (at.into(), (at + states as u64).into());
    }
}

/// Owners of the scratch of [`DeltaScan::prepare_channels`].
struct ChannelTiles {
    _tiles: [Data; 3],
    _products: [Buffer<f32>; 3],
}

impl Cuda {
    /// The forward pass. Saves the states before every chunk and the chunks' errors for the backward.
    pub(crate) fn delta_forward(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> Result<ScanOut> {
        let mut scan = DeltaScan::new(self, Pass::Forward, inputs, spec)?;
        let (o, o_at) = scan.rows(inputs.v, self.activations())?;
        scan.params.o = o_at.into();
        let mut state = None;
        if keep.state {
            let dims = [spec.segments.len(), spec.state_len()];
            let (last, at) = self.output(dims, DType::F32, inputs.v.device())?;
            scan.params.last_state = at.into();
            state = Some(last);
        }
        if !keep.backward && scan.table.longest <= STEPWISE_LEN {
            // SAFETY: the operands are validated at entry; outputs are allocated from their shapes.
            unsafe { scan.over_segments("delta_steps", 0)? };
            return Ok(ScanOut { o, state, saved: None });
        }
        let (saved, saved_at) =
            self.output(scan.saved_dims(), self.activations(), inputs.v.device())?;
        scan.set_saved(saved_at);
        let (y, factors) = (scan.scratch(CHUNK * scan.shape.dk)?, scan.factors()?);
        scan.params.y = y.address().into();
        scan.params.factors = factors.address().into();
        let _channels = scan.prepare_channels()?;
        // SAFETY: the operands are validated at entry; scratch is allocated in the sizes that `DeltaParams` documents.
        unsafe {
            scan.over_chunks("delta_prepare", scan.shape.prepare())?;
            scan.over_segments("delta_states", scan.shape.states())?;
            scan.over_chunks("delta_output", scan.shape.output())?;
        }
        Ok(ScanOut { o, state, saved: keep.backward.then_some(saved) })
    }

    pub(crate) fn delta_backward(
        &self,
        d_out: &Tensor,
        d_state: Option<&Tensor>,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        let saved = match saved {
            Some(saved) => saved.clone(),
            None => {
                let keep = ScanExtras { state: false, backward: true };
                let saved = self.delta_forward(inputs, spec, keep)?.saved;
                saved.ok_or_else(|| Error::argument("scan", "no states were saved"))?
            }
        };
        let mut scan = DeltaScan::new(self, Pass::Backward, inputs, spec)?;
        let (shape, dtype, device) = (scan.shape, self.activations(), inputs.v.device());
        let d_out = self.activation(d_out)?;
        let d_last = d_state.map(|x| self.real(x)).transpose()?;
        let dstate = match inputs.state {
            Some(state) => Some(self.output(state.shape(), DType::F32, device)?),
            None => None,
        };
        let shared_keys = spec.heads != spec.key_heads;
        let (dq, dq_at) = scan.rows(inputs.q, dtype)?;
        let (dk, dk_at) = scan.rows(inputs.k, dtype)?;
        let (dv, dv_at) = scan.rows(inputs.v, dtype)?;
        let gates = |x: Option<&Tensor>| x.map(|x| scan.rows(x, DType::F32)).transpose();
        let (dlog_decay, dwrite) = (gates(inputs.log_decay)?, gates(inputs.write)?);
        let parts = match shared_keys {
            true => {
                let part = || {
                    scan.rows_of([inputs.k.rows(), spec.heads * spec.key_dim], inputs.k, DType::F32)
                };
                Some((part()?, part()?))
            }
            false => None,
        };
        let dskip = inputs.skip.map(|_| self.gpu.alloc::<f32>(scan.tiles())).transpose()?;
        let (y, inverse, factors) =
            (scan.scratch(CHUNK * shape.dk)?, scan.scratch(CHUNK * CHUNK)?, scan.factors()?);
        let (d_states, d_errors) =
            (scan.scratch(shape.dk * shape.dv)?, scan.scratch(CHUNK * shape.dv)?);
        let at = |x: &Option<(Tensor, u64)>| x.as_ref().map_or(0, |(_, at)| *at);
        scan.params = DeltaParams {
            x: scan.params.x.with_gradient(d_out.address()),
            y: y.address().into(),
            inverse: inverse.address().into(),
            factors: factors.address().into(),
            d_last: address(&d_last).into(),
            d_first: at(&dstate).into(),
            d_states: d_states.address().into(),
            d_errors: d_errors.address().into(),
            dq: dq_at.into(),
            dk: dk_at.into(),
            dv: dv_at.into(),
            dq_parts: parts.as_ref().map_or(0, |(dq, _)| dq.1).into(),
            dk_parts: parts.as_ref().map_or(0, |(_, dk)| dk.1).into(),
            dlog_decay: at(&dlog_decay).into(),
            dwrite: at(&dwrite).into(),
            dskip: dskip.as_ref().map_or(0, Buffer::address).into(),
            ..scan.params
        };
        check_saved(&saved, scan.saved_dims())?;
        let saved = self.activation(&saved)?;
        scan.set_saved(saved.address());
        let (_channels, _gradients) = (scan.prepare_channels()?, scan.channel_gradients()?);
        // SAFETY: the operands are validated at entry; scratch is allocated in the sizes that `DeltaParams` documents.
        unsafe {
            scan.over_chunks("delta_prepare_bwd", shape.prepare_bwd())?;
            scan.over_segments("delta_states_bwd", shape.states_bwd())?;
            scan.over_chunks("delta_gradients", shape.gradients())?;
            if shape.channel {
                let grid = [scan.table.count, spec.heads, shape.dk / CHANNEL_SLAB];
                let (entry, shared) = ("delta_channel_gradients", shape::CHANNEL_BYTES);
                scan.launch_from(SCAN_DELTA_CHANNEL, entry, grid, shared, scan.params)?;
            }
        }
        if let Some((dq_parts, dk_parts)) = &parts {
            let count = inputs.k.len();
            let grid = [count.div_ceil(THREADS), 1, 1];
            for (out, parts) in [(dq_at, dq_parts.1), (dk_at, dk_parts.1)] {
                let (out, parts) = (out.into(), parts.into());
                let params = ShareKeys { out, parts, count: count as u64, p: scan.params };
                // SAFETY: as above; `parts` has as many elements for each head.
                unsafe { scan.launch("delta_share_keys", grid, 0, params)? };
            }
        }
        let sizes = [scan.table.count, spec.heads];
        let dskip = dskip.map(|sums| self.column_sums(&sums, sizes, None, device)).transpose()?;
        let tensor = |x: Option<(Tensor, u64)>| x.map(|(x, _)| x);
        let (dlog_decay, dwrite, dstate) = (tensor(dlog_decay), tensor(dwrite), tensor(dstate));
        Ok(ScanGrads { dq, dk, dv, dlog_decay, dwrite, dskip, dstate })
    }
}
