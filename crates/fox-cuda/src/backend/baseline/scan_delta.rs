//! The delta rule in chunks: forward, backward, and token by token for a few tokens.

use std::sync::Arc;

use fox_tensor::{
    DType, ScanGrads, ScanInputs, ScanKeep, ScanOut, ScanSpec, Segments, Shape as Dims, Tensor,
};

use super::delta_shape::{CHUNK, NARROW, Pass, Shape};
use crate::attention::Recent;
use crate::backend::storage::{Data, memory};
use crate::backend::{Cuda, Operand, address, int};
use crate::launch::Arg;
use crate::{Buffer, Error, Kernel, KernelArg, Result, Source};

/// Segments up to this long are walked token by token when no gradient is asked for.
const FEW_TOKENS: usize = 16;
/// Threads of a block.
const THREADS: u32 = 256;

pub(in crate::backend) type DeltaKernels = Recent<(Source, &'static str, Shape), Kernel>;
/// By the queries of the segments: first row and length.
pub(in crate::backend) type DeltaTables = Recent<Vec<(usize, usize)>, DeltaTable>;

/// Segments cut into chunks.
pub(in crate::backend) struct DeltaTable {
    /// For each segment: first chunk, chunks, first row, rows. Then for each chunk: first row, rows.
    table: Buffer<i32>,
    segments: usize,
    chunks: usize,
    longest: usize,
    covered: usize,
}

impl DeltaTable {
    /// Where the chunks begin.
    fn chunks_at(&self) -> u64 {
        self.table.address() + (16 * self.segments) as u64
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DeltaParams {
    q: u64,
    k: u64,
    v: u64,
    d_out: u64,
    log_decay: u64,
    write: u64,
    skip: u64,
    state: u64,
    last_state: u64,
    o: u64,
    states: u64,
    errors: u64,
    y: u64,
    inverse: u64,
    factors: u64,
    d_states: u64,
    d_errors: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    dq_parts: u64,
    dk_parts: u64,
    dlog_decay: u64,
    dwrite: u64,
    dskip: u64,
    chunks: u64,
    runs: u64,
    heads: i32,
    key_heads: i32,
    group: i32,
    key_dim: i32,
    value_dim: i32,
    scale: f32,
}

// SAFETY: mirrors the struct of the same name in scan_delta.cuh.
unsafe impl KernelArg for DeltaParams {}

/// One call: the variant, the chunks and the operands, which live as long as it.
struct Call<'a> {
    cuda: &'a Cuda,
    shape: Shape,
    table: Arc<DeltaTable>,
    segments: usize,
    heads: usize,
    source: Source,
    params: DeltaParams,
    _operands: [Option<Operand<'a>>; 7],
}

impl<'a> Call<'a> {
    fn new(cuda: &'a Cuda, pass: Pass, inputs: &ScanInputs<'a>, spec: &ScanSpec) -> Result<Self> {
        let bf16 = cuda.activations() == DType::Bf16;
        let shape = Shape::new(spec, bf16, cuda.gpu.shared_bytes(), pass)?;
        let source = match pass {
            Pass::Forward => Source::SCAN_DELTA,
            Pass::Backward => Source::SCAN_DELTA_BWD,
        };
        let table = cuda.delta_table(&spec.segments)?;
        let activation = |x: &'a Tensor| cuda.activation(x).map(Some);
        let real = |x: Option<&'a Tensor>| x.map(|x| cuda.real(x)).transpose();
        let operands = [
            activation(inputs.q)?,
            activation(inputs.k)?,
            activation(inputs.v)?,
            real(inputs.log_decay)?,
            real(inputs.write)?,
            real(inputs.skip)?,
            real(inputs.state)?,
        ];
        let [q, k, v, log_decay, write, skip, state] =
            [0, 1, 2, 3, 4, 5, 6].map(|i| address(&operands[i]));
        let params = DeltaParams {
            q,
            k,
            v,
            log_decay,
            write,
            skip,
            state,
            chunks: table.chunks_at(),
            runs: table.table.address(),
            heads: int(spec.heads),
            key_heads: int(spec.key_heads),
            group: int(spec.heads / spec.key_heads),
            key_dim: int(spec.key_dim),
            value_dim: int(spec.value_dim),
            scale: spec.scale,
            ..DeltaParams::default()
        };
        let (segments, heads) = (spec.segments.len(), spec.heads);
        Ok(Call { cuda, shape, table, segments, heads, source, params, _operands: operands })
    }

    /// Chunks times heads: the number of tiles of each kind of scratch.
    fn tiles(&self) -> usize {
        self.table.chunks * self.heads
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
        shape: impl Into<Dims>,
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
        unsafe { self.launch(entry, [self.table.chunks, self.heads, 1], shared, &[]) }
    }

    /// Launches a kernel whose blocks walk over the chunks of a segment.
    ///
    /// # Safety
    /// As for [`crate::Launch::run`].
    unsafe fn over_segments(&self, entry: &'static str, shared: usize) -> Result<()> {
        let grid = [self.shape.dv / NARROW, self.heads, self.segments];
        // SAFETY: the caller's promise.
        unsafe { self.launch(entry, grid, shared, &[]) }
    }

    unsafe fn launch(
        &self,
        entry: &'static str,
        grid: [usize; 3],
        shared: usize,
        args: &[Arg],
    ) -> Result<()> {
        let gpu = &self.cuda.gpu;
        gpu.bind()?;
        let kernel = self.cuda.delta_kernels.get((self.source, entry, self.shape), || {
            gpu.kernel(self.source, &self.shape.defines(), entry)
        })?;
        let launch = kernel.launch(grid.map(|n| n as u32), THREADS).shared(shared as u32);
        let launch = launch.args(args).arg(&self.params);
        // SAFETY: the caller's promise.
        self.cuda.timed(entry, || unsafe { launch.run(|| format!("{:?}", self.shape)) })
    }

    /// Elements per tile of what the backward pass wants: the states, then the errors.
    fn saved_len(&self) -> (usize, usize) {
        (self.shape.dk * self.shape.dv, CHUNK * self.shape.dv)
    }

    fn set_saved(&mut self, at: u64) {
        let states = self.tiles() * self.saved_len().0 * self.cuda.activations().size();
        (self.params.states, self.params.errors) = (at, at + states as u64);
    }
}

impl Cuda {
    fn delta_table(&self, segments: &Segments) -> Result<Arc<DeltaTable>> {
        let rows: Vec<_> = segments.as_slice().iter().map(|s| (s.q_start, s.q_len)).collect();
        self.delta_tables.get(rows.clone(), || {
            let (mut table, mut chunks) = (Vec::new(), Vec::new());
            for &(start, len) in &rows {
                table.extend([chunks.len() / 2, len.div_ceil(CHUNK), start, len].map(int));
                for first in (0..len).step_by(CHUNK) {
                    chunks.extend([start + first, CHUNK.min(len - first)].map(int));
                }
            }
            let count = chunks.len() / 2;
            table.extend(chunks);
            Ok(DeltaTable {
                table: self.gpu.upload(&table)?,
                segments: rows.len(),
                chunks: count,
                longest: rows.iter().map(|(_, len)| *len).max().unwrap_or(0),
                covered: rows.iter().map(|(_, len)| len).sum(),
            })
        })
    }

    /// The forward pass. What it saves are the states before all chunks and what the chunks write.
    pub(super) fn delta_forward(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanKeep,
    ) -> Result<ScanOut> {
        let mut call = Call::new(self, Pass::Forward, inputs, spec)?;
        let (o, o_at) = call.rows(inputs.v, self.activations())?;
        call.params.o = o_at;
        let mut state = None;
        if keep.state {
            let dims = [spec.segments.len(), spec.state_len()];
            let (last, at) = self.output(dims, DType::F32, inputs.v.device())?;
            call.params.last_state = at;
            state = Some(last);
        }
        if !keep.backward && call.table.longest <= FEW_TOKENS {
            // SAFETY: parameters as declared in scan_delta.cuh; the tape checked the shapes.
            unsafe { call.over_segments("delta_steps", 0)? };
            return Ok(ScanOut { o, state, saved: None });
        }
        let (states, errors) = call.saved_len();
        let dims = [call.tiles(), states + errors];
        let (saved, saved_at) = self.output(dims, self.activations(), inputs.v.device())?;
        call.set_saved(saved_at);
        let (y, factors) = (call.scratch(CHUNK * call.shape.dk)?, call.factors()?);
        (call.params.y, call.params.factors) = (y.address(), factors.address());
        // SAFETY: parameters as declared in scan_delta.cuh; scratch has the sizes that stand there.
        unsafe {
            call.over_chunks("delta_prepare", call.shape.prepare())?;
            call.over_segments("delta_states", call.shape.states())?;
            call.over_chunks("delta_output", call.shape.output())?;
        }
        Ok(ScanOut { o, state, saved: keep.backward.then_some(saved) })
    }

    pub(super) fn delta_backward(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        let saved = match saved {
            Some(saved) => saved.clone(),
            None => {
                let keep = ScanKeep { state: false, backward: true };
                let saved = self.delta_forward(inputs, spec, keep)?.saved;
                saved.ok_or_else(|| Error::argument("scan", "no states were saved"))?
            }
        };
        let mut call = Call::new(self, Pass::Backward, inputs, spec)?;
        let (shape, dtype, device) = (call.shape, self.activations(), inputs.v.device());
        let d_out = self.activation(d_out)?;
        let shared_keys = spec.heads != spec.key_heads;
        let (dq, dq_at) = call.rows(inputs.q, dtype)?;
        let (dk, dk_at) = call.rows(inputs.k, dtype)?;
        let (dv, dv_at) = call.rows(inputs.v, dtype)?;
        let gates = |x: Option<&Tensor>| x.map(|x| call.rows(x, DType::F32)).transpose();
        let (dlog_decay, dwrite) = (gates(inputs.log_decay)?, gates(inputs.write)?);
        let parts = match shared_keys {
            true => {
                let part = || {
                    call.rows_of([inputs.k.rows(), spec.heads * spec.key_dim], inputs.k, DType::F32)
                };
                Some((part()?, part()?))
            }
            false => None,
        };
        let dskip = match inputs.skip {
            Some(_) => Some(self.gpu.alloc::<f32>(call.tiles())?),
            None => None,
        };
        let (y, inverse, factors) =
            (call.scratch(CHUNK * shape.dk)?, call.scratch(CHUNK * CHUNK)?, call.factors()?);
        let (d_states, d_errors) =
            (call.scratch(shape.dk * shape.dv)?, call.scratch(CHUNK * shape.dv)?);
        let at = |x: &Option<(Tensor, u64)>| x.as_ref().map_or(0, |(_, at)| *at);
        call.params = DeltaParams {
            d_out: d_out.address(),
            y: y.address(),
            inverse: inverse.address(),
            factors: factors.address(),
            d_states: d_states.address(),
            d_errors: d_errors.address(),
            dq: dq_at,
            dk: dk_at,
            dv: dv_at,
            dq_parts: parts.as_ref().map_or(0, |(dq, _)| dq.1),
            dk_parts: parts.as_ref().map_or(0, |(_, dk)| dk.1),
            dlog_decay: at(&dlog_decay),
            dwrite: at(&dwrite),
            dskip: dskip.as_ref().map_or(0, Buffer::address),
            ..call.params
        };
        call.set_saved(memory(&saved)?.data.address());
        // SAFETY: parameters as declared in scan_delta.cuh; scratch has the sizes that stand there.
        unsafe {
            call.over_chunks("delta_prepare_bwd", shape.prepare_bwd())?;
            call.over_segments("delta_states_bwd", shape.states_bwd())?;
            call.over_chunks("delta_gradients", shape.gradients())?;
        }
        if let Some((dq_parts, dk_parts)) = &parts {
            let count = inputs.k.len();
            let grid = [count.div_ceil(THREADS as usize), 1, 1];
            for (out, parts) in [(dq_at, dq_parts.1), (dk_at, dk_parts.1)] {
                let args = [out.into(), parts.into(), count.into()];
                // SAFETY: as above; `parts` has as many elements for each head.
                unsafe { call.launch("delta_share_keys", grid, 0, &args)? };
            }
        }
        let dskip = match &dskip {
            Some(sums) => {
                let at = sums.address();
                Some(self.column_sums(
                    at,
                    DType::F32,
                    call.table.chunks,
                    spec.heads,
                    None,
                    device,
                )?)
            }
            None => None,
        };
        let tensor = |x: Option<(Tensor, u64)>| x.map(|(x, _)| x);
        Ok(ScanGrads { dq, dk, dv, dlog_decay: tensor(dlog_decay), dwrite: tensor(dwrite), dskip })
    }
}
