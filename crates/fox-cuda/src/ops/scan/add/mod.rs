//! The additive scan in chunks: Mamba-2's decay per head, HGRN2's per channel, or none.
//!
//! The algorithm is described in `scan_add.cu` and `scan_add_bwd.cu`; here are the launches and their scratch memory.

use std::sync::Arc;

use fox_tensor::{DType, Device, ScanExtras, ScanGrads, ScanInputs, ScanOut, ScanSpec, Tensor};

mod shape;

use super::chunks::{Chunk, ChunkTable, ChunkedSegment};
use super::operands::{HeldOperands, ScanOperands, check_saved};
use crate::backend::{Cuda, address};
use crate::launch::Kernel;
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};
use shape::ScanShape;

/// Threads per block of the chunk kernels, `scan_carry`, `scan_step` and `scan_sum`.
const CHUNK_THREADS: usize = 512;
const CARRY_THREADS: usize = 128;
const STEP_THREADS: usize = 256;
const SUM_THREADS: usize = 256;
/// State elements per thread of `scan_carry`.
const CARRY_PER_THREAD: usize = 4;
/// Maximum heads per thread block, as in `scan_add.cuh` and `scan_add_bwd.cu`.
const MAX_HEADS: usize = 16;
const MAX_HEADS_BWD: usize = 24;
/// Segments up to this length are scanned token by token.
const STEPWISE_LEN: usize = 8;

kernel_params! {
    #[derive(Default)]
    struct ScanAddParams {
        x: ScanOperands,
        /// `[R, H * dv]`.
        o: Ptr<Real>,
        /// States after the segments, shaped like `state`; or null. Written by the forward, read with `reverse`.
        last: Ptr<f32>,
        /// Gradients of the states after the segments, shaped like `state`; null for zeros.
        d_last: ConstPtr<f32>,
        /// Gradients of the states before the segments, shaped like `state`; or null.
        d_first: Ptr<f32>,
        /// States before each chunk `[chunks][heads][DK][DV]`.
        states: Ptr<Real>,
        /// Gradients of the states after each chunk, shaped like `states`.
        d_states: Ptr<Real>,
        /// Decay over the chunk `[chunks][heads][CHANNELS ? DK : 1]`.
        totals: Ptr<f32>,
        /// Gradient of the log decay after each chunk `[chunks][heads][DK]`, or null.
        flows: Ptr<f32>,
        /// `[R, G * dk]` in the type of activations, or `[splits, R, G * dk]` in f32; like `dk`.
        dq: Ptr<()>,
        dk: Ptr<()>,
        /// `[R, H * dv]`.
        dv: Ptr<Real>,
        d_log_decay: Ptr<f32>,
        d_write: Ptr<f32>,
        /// `[chunks][heads]`.
        d_skip: Ptr<f32>,
        chunks: ConstPtr<Chunk>,
        /// `[segments]`.
        segments: ConstPtr<ChunkedSegment>,
        row_count: usize,
        /// Thread blocks over which the heads of a key head are split.
        splits: usize,
        /// Heads per thread block.
        heads_per_block: usize,
        /// Computes gradients of states, from the last chunk to the first.
        reverse: bool,
    }

    list struct ScanSum {
        /// `[count]`.
        to: Ptr<Real>,
        /// `[splits][count]`.
        from: ConstPtr<f32>,
        splits: usize,
        count: u64,
    }
}

const SCAN_ADD: Source = source!(
    "scan_add",
    ["scan_add.cuh", "scan_channel.cuh"],
    [Chunk, ChunkedSegment, ScanOperands, ScanAddParams]
);
const SCAN_ADD_BWD: Source = source!(
    "scan_add_bwd",
    ["scan_add.cuh", "scan_channel.cuh"],
    [Chunk, ChunkedSegment, ScanOperands, ScanAddParams, ScanSum]
);

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    let shapes = shape::typical();
    let of = |source| shapes.iter().map(move |shape| (source, shape.defines()));
    of(SCAN_ADD).chain(of(SCAN_ADD_BWD)).collect()
}

/// How the heads of a key head are divided over thread blocks.
#[derive(Clone, Copy)]
struct HeadSplits {
    /// Thread blocks.
    count: usize,
    /// Heads of a thread block.
    heads: usize,
}

impl HeadSplits {
    /// At least `wanted` splits of `group` heads, with at most `most` heads each.
    fn new(group: usize, wanted: usize, most: usize) -> Self {
        let heads = group.div_ceil(wanted.max(group.div_ceil(most)));
        HeadSplits { count: group.div_ceil(heads), heads }
    }
}

/// A call of the scan: variant, tables and operands.
struct AdditiveScan<'a> {
    cuda: &'a Cuda,
    shape: ScanShape,
    table: Arc<ChunkTable>,
    /// How `scan_grads` divides the heads of a key head; the other kernels' division is in `params`.
    grads_splits: HeadSplits,
    /// Whether segments cover all rows.
    covered: bool,
    /// Parameters common to all kernels.
    params: ScanAddParams,
    spec: &'a ScanSpec,
    _operands: HeldOperands<'a>,
}

impl<'a> AdditiveScan<'a> {
    fn new(
        cuda: &'a Cuda,
        inputs: &ScanInputs<'a>,
        spec: &'a ScanSpec,
        backward: bool,
    ) -> Result<Self> {
        let channels = inputs.log_decay.is_some_and(|x| x.cols() != spec.heads);
        let (dtype, shared_bytes) = (cuda.activations(), cuda.gpu.shared_bytes());
        let shape = ScanShape::new(dtype, spec, channels, backward, shared_bytes)?;
        let table = cuda.chunk_table(&spec.segments, shape.chunk)?;
        let (rows, group) = (inputs.q.rows(), spec.heads / spec.key_heads);
        // Heads of a block share the loads of keys; but there must be enough blocks to fill the GPU.
        let enough = 2 * cuda.gpu.processors() as usize;
        let wanted = enough.div_ceil((table.count * spec.key_heads).max(1)).min(group);
        let splits = HeadSplits::new(group, wanted, MAX_HEADS);
        // Without splits there are no partial gradients of keys and queries to be written and added up.
        let grads_splits = HeadSplits::new(group, wanted, MAX_HEADS_BWD);
        let (x, operands) = cuda.scan_operands(inputs, spec)?;
        let params = ScanAddParams {
            x,
            chunks: table.chunks.address().into(),
            segments: table.segments.address().into(),
            row_count: rows,
            splits: splits.count,
            heads_per_block: splits.heads,
            ..ScanAddParams::default()
        };
        let covered = table.covered == rows;
        Ok(AdditiveScan {
            cuda,
            shape,
            table,
            grads_splits,
            covered,
            params,
            spec,
            _operands: operands,
        })
    }

    /// An output by row, zeroed first if some rows are outside every segment.
    fn rows_output(
        &self,
        shape: fox_tensor::Shape,
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, u64)> {
        let (mut tensor, at) = self.cuda.output(shape, dtype, device)?;
        if !self.covered {
            self.cuda.fill_with(&mut tensor, 0.0)?;
        }
        Ok((tensor, at))
    }

    fn kernel(&self, source: Source, entry: &'static str) -> Result<Arc<Kernel>> {
        self.cuda.gpu.cached_kernel(source, entry, self.shape, |shape| shape.defines())
    }

    /// # Safety
    /// The addresses in `params` must be those of the operands of this scan and of buffers allocated from their shapes.
    unsafe fn launch(&self, entry: &'static str, params: ScanAddParams) -> Result<()> {
        let chunk_grid = [self.table.count, self.spec.key_heads * params.splits];
        let state_len = self.spec.heads * self.shape.state_len();
        let state_grid = [self.spec.segments.len(), state_len / (CARRY_PER_THREAD * CARRY_THREADS)];
        let (source, grid, threads, shared) = match entry {
            "scan_states" => (SCAN_ADD, chunk_grid, CHUNK_THREADS, self.shape.states_bytes()),
            "scan_read" => (SCAN_ADD, chunk_grid, CHUNK_THREADS, self.shape.read_bytes()),
            "scan_carry" | "scan_carry_back" => (SCAN_ADD, state_grid, CARRY_THREADS, 0),
            "scan_step" => {
                let grid = [self.spec.segments.len(), self.spec.heads];
                (SCAN_ADD, grid, STEP_THREADS, 0)
            }
            _ => (SCAN_ADD_BWD, chunk_grid, CHUNK_THREADS, self.shape.grads_bytes()),
        };
        let kernel = self.kernel(source, entry)?;
        let launch = kernel.launch([grid[0], grid[1], 1], threads).shared(shared).params(params)?;
        // SAFETY: the caller's promise.
        self.cuda.timed(entry, || unsafe { launch.run(|| format!("{:?}", self.shape)) })
    }

    /// Dimensions of a state per chunk and head.
    fn state_dims(&self) -> [usize; 2] {
        [self.table.count, self.spec.heads * self.shape.state_len()]
    }

    /// Buffer for a state per chunk and head.
    fn state_buffer(&self, device: &Device) -> Result<(Tensor, u64)> {
        self.cuda.output(self.state_dims(), self.cuda.activations(), device)
    }

    /// Buffer for the decays over the chunks.
    fn totals(&self) -> Result<Buffer<f32>> {
        let width = if self.shape.channels { self.shape.dk } else { 1 };
        self.cuda.gpu.alloc(self.table.count * self.spec.heads * width)
    }

    /// States before every chunk and, if `last` is not 0, after every segment.
    ///
    /// # Safety
    /// `last` must be 0 or a live state of every segment in f32.
    unsafe fn states(&self, last: u64, device: &Device) -> Result<Tensor> {
        let (states, at) = self.state_buffer(device)?;
        let totals = self.totals()?;
        let params = ScanAddParams {
            states: at.into(),
            totals: totals.address().into(),
            last: last.into(),
            ..self.params
        };
        // SAFETY: operands of this scan, states and decays of all chunks, and the caller's promise.
        unsafe {
            self.launch("scan_states", params)?;
            self.launch("scan_carry", params)?;
        }
        Ok(states)
    }

    /// Buffer for the gradient of queries or keys.
    fn key_output(&self, like: &Tensor) -> Result<KeyOutput> {
        if self.grads_splits.count == 1 {
            let dtype = self.cuda.activations();
            return Ok(KeyOutput::Final(self.rows_output(like.shape(), dtype, like.device())?));
        }
        let shape = [self.grads_splits.count, like.len()];
        Ok(KeyOutput::Partial(self.rows_output(shape.into(), DType::F32, like.device())?))
    }

    /// Gradient of queries or keys: the sum over splits.
    fn key_gradient(&self, output: KeyOutput, like: &Tensor) -> Result<Tensor> {
        let (_held, from) = match output {
            KeyOutput::Final((tensor, _)) => return Ok(tensor),
            KeyOutput::Partial(splits) => splits,
        };
        let (sum, at) = self.cuda.output(like.shape(), self.cuda.activations(), like.device())?;
        let (splits, count) = (self.grads_splits.count, like.len() as u64);
        let params = ScanSum { to: at.into(), from: from.into(), splits, count };
        let kernel = self.kernel(SCAN_ADD_BWD, "scan_sum")?;
        let blocks = like.len().div_ceil(self.shape.vec * SUM_THREADS);
        let launch = kernel.launch([blocks, 1, 1], SUM_THREADS).params(params)?;
        // SAFETY: `from` has `splits` times the elements of the sum.
        self.cuda.timed("scan_sum", || unsafe { launch.run(|| format!("{:?}", self.shape)) })?;
        Ok(sum)
    }
}

/// Kernel output for the gradient of queries or keys.
enum KeyOutput {
    /// Final, shaped like the operand.
    Final((Tensor, u64)),
    /// Partial sums in f32, one per split.
    Partial((Tensor, u64)),
}

impl KeyOutput {
    fn address(&self) -> u64 {
        match self {
            KeyOutput::Final((_, at)) | KeyOutput::Partial((_, at)) => *at,
        }
    }
}

impl Cuda {
    /// The forward pass. Saves the states before every chunk for the backward.
    pub(crate) fn scan_add_forward(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> Result<ScanOut> {
        let (scan, device) =
            (AdditiveScan::new(self, inputs, spec, keep.backward)?, inputs.v.device());
        let (o, o_at) = scan.rows_output(inputs.v.shape(), self.activations(), device)?;
        let state = match keep.state {
            true => {
                Some(self.output([spec.segments.len(), spec.state_len()], DType::F32, device)?)
            }
            false => None,
        };
        let last = state.as_ref().map_or(0, |(_, at)| *at);
        let state = state.map(|(state, _)| state);
        if scan.table.longest <= STEPWISE_LEN {
            let params = ScanAddParams { o: o_at.into(), last: last.into(), ..scan.params };
            // SAFETY: operands of this scan; outputs are allocated from their shapes.
            unsafe { scan.launch("scan_step", params)? };
            return Ok(ScanOut { o, state, saved: None });
        }
        // SAFETY: `last` is 0 or the address of `state`.
        let states = unsafe { scan.states(last, device)? };
        let at = self.activation(&states)?.address();
        let params = ScanAddParams { o: o_at.into(), states: at.into(), ..scan.params };
        // SAFETY: operands of this scan; outputs are allocated from their shapes.
        unsafe { scan.launch("scan_read", params)? };
        Ok(ScanOut { o, state, saved: keep.backward.then_some(states) })
    }

    /// The backward pass.
    pub(crate) fn scan_add_backward(
        &self,
        d_out: &Tensor,
        d_state: Option<&Tensor>,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        let (scan, device) = (AdditiveScan::new(self, inputs, spec, true)?, inputs.v.device());
        if let Some(saved) = saved {
            check_saved(saved, scan.state_dims())?;
        }
        let all_states = spec.segments.len() * spec.state_len();
        // The gradient of the decays needs the last states where these have a gradient; they were not saved.
        let last: Option<Buffer<f32>> = match (d_state, inputs.log_decay) {
            (Some(_), Some(_)) => Some(self.gpu.alloc(all_states)?),
            _ => None,
        };
        let states = match (saved, &last) {
            (Some(saved), None) => saved.clone(),
            // SAFETY: `last` has a state of every segment.
            (_, last) => unsafe { scan.states(last.as_ref().map_or(0, Buffer::address), device)? },
        };
        let d_last = d_state.map(|x| self.real(x)).transpose()?;
        let dstate = match inputs.state {
            Some(state) => Some(self.output(state.shape(), DType::F32, device)?),
            None => None,
        };
        let (states_at, d_out) = (self.activation(&states)?, self.activation(d_out)?);
        let (d_states, d_states_at) = scan.state_buffer(device)?;
        let totals = scan.totals()?;
        let chunk_heads = scan.table.count * spec.heads;
        let flows: Option<Buffer<f32>> =
            inputs.log_decay.map(|_| self.gpu.alloc(chunk_heads * scan.shape.dk)).transpose()?;
        let params = ScanAddParams {
            states: states_at.address().into(),
            d_states: d_states_at.into(),
            x: scan.params.x.with_gradient(d_out.address()),
            totals: totals.address().into(),
            flows: flows.as_ref().map_or(0, Buffer::address).into(),
            last: last.as_ref().map_or(0, Buffer::address).into(),
            d_last: address(&d_last).into(),
            d_first: dstate.as_ref().map_or(0, |(_, at)| *at).into(),
            ..scan.params
        };
        let reverse = ScanAddParams { reverse: true, ..params };
        // SAFETY: operands of this scan; saved states have its dimensions, and scratch is allocated with them.
        unsafe {
            scan.launch("scan_states", reverse)?;
            scan.launch("scan_carry_back", reverse)?;
        }
        let like = |x: Option<&Tensor>| {
            x.map(|x| scan.rows_output(x.shape(), DType::F32, device)).transpose()
        };
        let (dlog_decay, dwrite) = (like(inputs.log_decay)?, like(inputs.write)?);
        let (dv, dv_at) = scan.rows_output(inputs.v.shape(), self.activations(), device)?;
        let (dq, dk) = (scan.key_output(inputs.q)?, scan.key_output(inputs.k)?);
        let skip_partials: Option<Buffer<f32>> =
            inputs.skip.map(|_| self.gpu.alloc(chunk_heads)).transpose()?;
        let at = |x: &Option<(Tensor, u64)>| x.as_ref().map_or(0, |(_, at)| *at);
        let grads = ScanAddParams {
            dq: dq.address().into(),
            dk: dk.address().into(),
            dv: dv_at.into(),
            d_log_decay: at(&dlog_decay).into(),
            d_write: at(&dwrite).into(),
            d_skip: skip_partials.as_ref().map_or(0, Buffer::address).into(),
            splits: scan.grads_splits.count,
            heads_per_block: scan.grads_splits.heads,
            ..params
        };
        // SAFETY: as above; gradients are allocated from the shapes of the operands.
        unsafe { scan.launch("scan_grads", grads)? };
        drop(d_states);
        let sizes = [scan.table.count, spec.heads];
        let dskip = skip_partials.map(|sums| self.column_sums(&sums, sizes, None, device));
        let dskip = dskip.transpose()?;
        Ok(ScanGrads {
            dq: scan.key_gradient(dq, inputs.q)?,
            dk: scan.key_gradient(dk, inputs.k)?,
            dv,
            dlog_decay: dlog_decay.map(|(x, _)| x),
            dwrite: dwrite.map(|(x, _)| x),
            dskip,
            dstate: dstate.map(|(x, _)| x),
        })
    }
}
