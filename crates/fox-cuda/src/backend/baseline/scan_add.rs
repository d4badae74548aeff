//! The additive scan in chunks: Mamba-2's decay per head, HGRN2's per channel, or none.
//!
//! The kernels and their mathematics are in `scan_add.cu` and `scan_add_bwd.cu`. Here: which variant, in
//! which order, and the memory between them.

use std::sync::Arc;

use fox_tensor::{
    DType, Device, ScanGrads, ScanInputs, ScanKeep, ScanOut, ScanSpec, Segments, Tensor,
};

use super::super::{Cuda, Operand, address, int};
use super::add_shape::ScanShape;
use crate::attention::Recent;
use crate::{Buffer, Kernel, KernelArg, Result, Source};

/// Threads of the kernels that work on chunks, that carry states, that go token by token,
/// and that sum.
const CHUNK_THREADS: u32 = 512;
const CARRY_THREADS: u32 = 128;
const STEP_THREADS: u32 = 256;
const SUM_THREADS: u32 = 256;
/// Elements of a state that a thread carries.
const CARRIED: usize = 4;
/// Heads that one block can work on, as in `scan_add.cuh`.
const MOST_HEADS: usize = 16;
/// Segments up to this length are scanned token by token.
const SHORT: usize = 8;
/// Kernels by source, entry and shape.
pub(in super::super) type ScanKernels = Recent<(Source, &'static str, ScanShape), Kernel>;
/// Tables by (first row, tokens) of the segments and tokens of a chunk.
pub(in super::super) type ChunkTables = Recent<(Vec<[usize; 2]>, usize), ChunkTable>;

/// How segments are cut into chunks.
pub(in super::super) struct ChunkTable {
    count: usize,
    /// (first row, tokens, segment, 0) of each chunk.
    chunks: Buffer<i32>,
    /// (first chunk, chunks) of each segment.
    segments: Buffer<i32>,
    /// (first row, tokens) of each segment.
    rows: Buffer<i32>,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params {
    q: u64,
    k: u64,
    v: u64,
    d_out: u64,
    log_decay: u64,
    write: u64,
    skip: u64,
    state: u64,
    o: u64,
    last: u64,
    states: u64,
    d_states: u64,
    totals: u64,
    flows: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    d_log_decay: u64,
    d_write: u64,
    d_skip: u64,
    chunks: u64,
    segments: u64,
    rows: u64,
    row_count: i32,
    heads: i32,
    key_heads: i32,
    key_dim: i32,
    value_dim: i32,
    parts: i32,
    heads_per_block: i32,
    reverse: i32,
    scale: f32,
}

// SAFETY: mirrors the struct of the same name in scan_add.cuh.
unsafe impl KernelArg for Params {}

/// A call on its way to the kernels.
struct Job<'a> {
    cuda: &'a Cuda,
    shape: ScanShape,
    table: Arc<ChunkTable>,
    /// Blocks that share a head of keys.
    parts: usize,
    /// Whether every row belongs to a segment.
    covered: bool,
    /// Operands and options; kernels get a copy with their own places.
    params: Params,
    spec: &'a ScanSpec,
    _operands: [Option<Operand<'a>>; 7],
}

impl<'a> Job<'a> {
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
        // Blocks share the work of their heads; but there must be enough of them.
        let enough = 2 * cuda.gpu.processors() as usize;
        let wanted = enough.div_ceil((table.count * spec.key_heads).max(1)).min(group);
        let heads_per_block = group.div_ceil(wanted.max(group.div_ceil(MOST_HEADS)));
        let parts = group.div_ceil(heads_per_block);
        let real = |x: Option<&'a Tensor>| x.map(|x| cuda.real(x)).transpose();
        let operands = [
            Some(cuda.activation(inputs.q)?),
            Some(cuda.activation(inputs.k)?),
            Some(cuda.activation(inputs.v)?),
            real(inputs.log_decay)?,
            real(inputs.write)?,
            real(inputs.skip)?,
            real(inputs.state)?,
        ];
        let params = Params {
            q: address(&operands[0]),
            k: address(&operands[1]),
            v: address(&operands[2]),
            log_decay: address(&operands[3]),
            write: address(&operands[4]),
            skip: address(&operands[5]),
            state: address(&operands[6]),
            chunks: table.chunks.address(),
            segments: table.segments.address(),
            rows: table.rows.address(),
            row_count: int(rows),
            heads: int(spec.heads),
            key_heads: int(spec.key_heads),
            key_dim: int(spec.key_dim),
            value_dim: int(spec.value_dim),
            parts: int(parts),
            heads_per_block: int(heads_per_block),
            scale: spec.scale,
            ..Params::default()
        };
        let tokens: usize = spec.segments.as_slice().iter().map(|s| s.q_len).sum();
        let covered = tokens == rows;
        Ok(Job { cuda, shape, table, parts, covered, params, spec, _operands: operands })
    }

    /// A tensor for results by row: zeros first where no segment has the row.
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
        let (cuda, shape) = (self.cuda, self.shape);
        cuda.gpu.bind()?;
        cuda.scan_kernels
            .get((source, entry, shape), || cuda.gpu.kernel(source, &shape.defines(), entry))
    }

    fn launch(&self, entry: &'static str, params: &Params) -> Result<()> {
        let chunk_grid = [self.table.count, self.spec.key_heads * self.parts];
        let state_len = self.spec.heads * self.shape.state_len();
        let state_grid = [self.spec.segments.len(), state_len / (CARRIED * CARRY_THREADS as usize)];
        let (source, grid, threads, shared) = match entry {
            "scan_states" => {
                (Source::SCAN_ADD, chunk_grid, CHUNK_THREADS, self.shape.states_bytes())
            }
            "scan_read" => (Source::SCAN_ADD, chunk_grid, CHUNK_THREADS, self.shape.read_bytes()),
            "scan_carry" | "scan_carry_back" => (Source::SCAN_ADD, state_grid, CARRY_THREADS, 0),
            "scan_step" => {
                let grid = [self.spec.segments.len(), self.spec.heads];
                (Source::SCAN_ADD, grid, STEP_THREADS, 0)
            }
            _ => (Source::SCAN_ADD_BWD, chunk_grid, CHUNK_THREADS, self.shape.grads_bytes()),
        };
        let kernel = self.kernel(source, entry)?;
        let launch = kernel.launch([int(grid[0]) as u32, int(grid[1]) as u32, 1], threads);
        let launch = launch.shared(shared as u32).arg(params);
        // SAFETY: parameters as declared in scan_add.cuh; the tape checked the shapes.
        self.cuda.timed(entry, || unsafe { launch.run(|| format!("{:?}", self.shape)) })
    }

    /// Memory for a state per chunk and head.
    fn state_buffer(&self, device: &Device) -> Result<(Tensor, u64)> {
        let shape = [self.table.count, self.spec.heads * self.shape.state_len()];
        self.cuda.output(shape, self.cuda.activations(), device)
    }

    /// Decays over the chunks.
    fn totals(&self) -> Result<Buffer<f32>> {
        let width = if self.shape.channels { self.shape.dk } else { 1 };
        self.cuda.gpu.alloc(self.table.count * self.spec.heads * width)
    }

    /// The states before every chunk and, if there is a place for them, after every segment.
    fn states(&self, last: u64, device: &Device) -> Result<Tensor> {
        let (states, at) = self.state_buffer(device)?;
        let totals = self.totals()?;
        let params = Params { states: at, totals: totals.address(), last, ..self.params };
        self.launch("scan_states", &params)?;
        self.launch("scan_carry", &params)?;
        Ok(states)
    }

    /// A gradient of queries or keys: where the kernel puts it, and what becomes of that.
    fn key_output(&self, like: &Tensor) -> Result<KeyOutput> {
        if self.parts == 1 {
            let dtype = self.cuda.activations();
            return Ok(KeyOutput::Whole(self.rows_output(like.shape(), dtype, like.device())?));
        }
        let shape = [self.parts, like.len()];
        Ok(KeyOutput::Parts(self.rows_output(shape.into(), DType::F32, like.device())?))
    }

    /// The sum over parts.
    fn key_gradient(&self, output: KeyOutput, like: &Tensor) -> Result<Tensor> {
        let (_held, from) = match output {
            KeyOutput::Whole((tensor, _)) => return Ok(tensor),
            KeyOutput::Parts(parts) => parts,
        };
        let (sum, at) = self.cuda.output(like.shape(), self.cuda.activations(), like.device())?;
        let args = [at.into(), from.into(), int(self.parts).into(), like.len().into()];
        let kernel = self.kernel(Source::SCAN_ADD_BWD, "scan_sum")?;
        let blocks = like.len().div_ceil(self.shape.vec * SUM_THREADS as usize);
        let launch = kernel.launch([int(blocks) as u32, 1, 1], SUM_THREADS).args(&args);
        // SAFETY: parameters as declared in scan_add_bwd.cu.
        self.cuda.timed("scan_sum", || unsafe { launch.run(|| format!("{:?}", self.shape)) })?;
        Ok(sum)
    }
}

/// Where a gradient of queries or keys goes.
enum KeyOutput {
    /// As the operand.
    Whole((Tensor, u64)),
    /// In f32, a part for each of the blocks that share keys.
    Parts((Tensor, u64)),
}

impl KeyOutput {
    fn address(&self) -> u64 {
        match self {
            KeyOutput::Whole((_, at)) | KeyOutput::Parts((_, at)) => *at,
        }
    }
}

impl Cuda {
    fn chunk_table(&self, segments: &Segments, chunk: usize) -> Result<Arc<ChunkTable>> {
        let rows: Vec<[usize; 2]> =
            segments.as_slice().iter().map(|s| [s.q_start, s.q_len]).collect();
        self.chunk_tables.get((rows.clone(), chunk), || {
            let (mut chunks, mut spans) = (Vec::new(), Vec::new());
            for (n, &[first, tokens]) in rows.iter().enumerate() {
                spans.extend([int(chunks.len() / 4), int(tokens.div_ceil(chunk))]);
                for start in (0..tokens).step_by(chunk) {
                    let count = chunk.min(tokens - start);
                    chunks.extend([int(first + start), int(count), int(n), 0]);
                }
            }
            let rows: Vec<i32> = rows.as_flattened().iter().map(|&x| int(x)).collect();
            Ok(ChunkTable {
                count: chunks.len() / 4,
                chunks: self.gpu.upload(&chunks)?,
                segments: self.gpu.upload(&spans)?,
                rows: self.gpu.upload(&rows)?,
            })
        })
    }

    /// The forward pass. What it saves are the states at the start of every chunk.
    pub(super) fn scan_add_forward(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanKeep,
    ) -> Result<ScanOut> {
        let (job, device) = (Job::new(self, inputs, spec, keep.backward)?, inputs.v.device());
        let (o, o_at) = job.rows_output(inputs.v.shape(), self.activations(), device)?;
        let state = match keep.state {
            true => {
                Some(self.output([spec.segments.len(), spec.state_len()], DType::F32, device)?)
            }
            false => None,
        };
        let last = state.as_ref().map_or(0, |(_, at)| *at);
        let state = state.map(|(state, _)| state);
        let longest = spec.segments.as_slice().iter().map(|s| s.q_len).max().unwrap_or(0);
        if longest <= SHORT {
            job.launch("scan_step", &Params { o: o_at, last, ..job.params })?;
            return Ok(ScanOut { o, state, saved: None });
        }
        let states = job.states(last, device)?;
        let at = self.activation(&states)?.address();
        job.launch("scan_read", &Params { o: o_at, states: at, ..job.params })?;
        Ok(ScanOut { o, state, saved: keep.backward.then_some(states) })
    }

    /// The backward pass.
    pub(super) fn scan_add_backward(
        &self,
        d_out: &Tensor,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        let (job, device) = (Job::new(self, inputs, spec, true)?, inputs.v.device());
        let states = match saved {
            Some(saved) => saved.clone(),
            None => job.states(0, device)?,
        };
        let (states_at, d_out) = (self.activation(&states)?, self.activation(d_out)?);
        let (d_states, d_states_at) = job.state_buffer(device)?;
        let totals = job.totals()?;
        let chunk_heads = job.table.count * spec.heads;
        let flows: Option<Buffer<f32>> = match inputs.log_decay {
            Some(_) => Some(self.gpu.alloc(chunk_heads * job.shape.dk)?),
            None => None,
        };
        let params = Params {
            states: states_at.address(),
            d_states: d_states_at,
            d_out: d_out.address(),
            totals: totals.address(),
            flows: flows.as_ref().map_or(0, Buffer::address),
            ..job.params
        };
        let reverse = Params { reverse: 1, ..params };
        job.launch("scan_states", &reverse)?;
        job.launch("scan_carry_back", &reverse)?;
        let like = |x: Option<&Tensor>| {
            x.map(|x| job.rows_output(x.shape(), DType::F32, device)).transpose()
        };
        let (dlog_decay, dwrite) = (like(inputs.log_decay)?, like(inputs.write)?);
        let (dv, dv_at) = job.rows_output(inputs.v.shape(), self.activations(), device)?;
        let (dq, dk) = (job.key_output(inputs.q)?, job.key_output(inputs.k)?);
        let skip_parts: Option<Buffer<f32>> = match inputs.skip {
            Some(_) => Some(self.gpu.alloc(chunk_heads)?),
            None => None,
        };
        let at = |x: &Option<(Tensor, u64)>| x.as_ref().map_or(0, |(_, at)| *at);
        let grads = Params {
            dq: dq.address(),
            dk: dk.address(),
            dv: dv_at,
            d_log_decay: at(&dlog_decay),
            d_write: at(&dwrite),
            d_skip: skip_parts.as_ref().map_or(0, Buffer::address),
            ..params
        };
        job.launch("scan_grads", &grads)?;
        drop(d_states);
        let dskip = match skip_parts {
            Some(parts) => {
                let (at, chunks) = (parts.address(), job.table.count);
                Some(self.column_sums(at, DType::F32, chunks, spec.heads, None, device)?)
            }
            None => None,
        };
        Ok(ScanGrads {
            dq: job.key_gradient(dq, inputs.q)?,
            dk: job.key_gradient(dk, inputs.k)?,
            dv,
            dlog_decay: dlog_decay.map(|(x, _)| x),
            dwrite: dwrite.map(|(x, _)| x),
            dskip,
        })
    }
}
