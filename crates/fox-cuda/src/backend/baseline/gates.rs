//! Time steps, HGRN2's gates and their lower bounds.

use fox_tensor::{DType, HgrnGates, HgrnGrads, HgrnInputs, Tensor, TimeStepInputs};

use crate::backend::launcher::{Op, Variant};
use crate::backend::{Cuda, Operand, address, int};
use crate::launch::Arg;
use crate::{KernelArg, Result, Source};

#[repr(C)]
#[derive(Clone, Copy)]
struct TimeStep {
    z: u64,
    bias: u64,
    a_log: u64,
    count: u64,
    heads: i32,
    low: f32,
    high: f32,
}

// SAFETY: mirrors the struct of the same name in baseline.cu.
unsafe impl KernelArg for TimeStep {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Hgrn {
    q: u64,
    z: u64,
    lower: u64,
    rows: i32,
    width: i32,
    rows_per_slice: i32,
    unused: i32,
}

// SAFETY: mirrors the struct of the same name in baseline.cu.
unsafe impl KernelArg for Hgrn {}

/// Threads of a block.
const THREADS: usize = 128;

/// How HGRN2's columns and rows are dealt out to blocks: a thread has a few columns of a slice of rows.
struct Division {
    variant: Variant,
    grid: [usize; 2],
    rows_per_slice: usize,
}

impl Division {
    fn new(dtype: DType, rows: usize, width: usize) -> Self {
        let variant = Variant::plain(dtype, width);
        let rows_per_slice = (rows / 1024).clamp(1, 16);
        let columns = width.div_ceil(THREADS * variant.vec);
        Division { variant, grid: [rows.div_ceil(rows_per_slice), columns], rows_per_slice }
    }

    fn op<'a>(&self, entry: &'static str, args: &'a [Arg]) -> Op<'a> {
        let (variant, grid) = (self.variant, self.grid);
        Op { source: Source::BASELINE, entry, variant, grid, block: THREADS, shared: 0, args }
    }

    fn params(&self, inputs: &HgrnInputs<'_>, operands: &HgrnOperands<'_>) -> Hgrn {
        Hgrn {
            q: operands.0.address(),
            z: operands.1.address(),
            lower: address(&operands.2),
            rows: int(inputs.q.rows()),
            width: int(inputs.q.cols()),
            rows_per_slice: int(self.rows_per_slice),
            unused: 0,
        }
    }
}

/// Queries, logits, lower bounds.
type HgrnOperands<'a> = (Operand<'a>, Operand<'a>, Option<Operand<'a>>);

impl Cuda {
    /// `(dt, log_decay)`, both `[R, H]` in f32.
    pub(super) fn step_forward(&self, inputs: &TimeStepInputs<'_>) -> Result<(Tensor, Tensor)> {
        let device = inputs.z.device();
        let (dt, dt_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        let (decay, decay_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        self.time_step(inputs, "time_step_fwd", &[dt_at.into(), decay_at.into()])?;
        Ok((dt, decay))
    }

    /// `(dz[R, H], da_log[H])`.
    pub(super) fn step_backward(
        &self,
        ddt: Option<&Tensor>,
        dlog_decay: Option<&Tensor>,
        inputs: &TimeStepInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (rows, heads, device) = (inputs.z.rows(), inputs.z.cols(), inputs.z.device());
        let (dz, dz_at) = self.output(inputs.z.shape(), DType::F32, device)?;
        let shares = self.gpu.alloc::<f32>(rows * heads)?;
        let ddt = ddt.map(|x| self.real(x)).transpose()?;
        let ddecay = dlog_decay.map(|x| self.real(x)).transpose()?;
        let args =
            [dz_at.into(), shares.address().into(), address(&ddt).into(), address(&ddecay).into()];
        self.time_step(inputs, "time_step_bwd", &args)?;
        let da_log = self.column_sums(shares.address(), DType::F32, rows, heads, None, device)?;
        Ok((dz, da_log))
    }

    fn time_step(
        &self,
        inputs: &TimeStepInputs<'_>,
        entry: &'static str,
        args: &[Arg],
    ) -> Result<()> {
        let (z, bias, a_log) =
            (self.real(inputs.z)?, self.real(inputs.bias)?, self.real(inputs.a_log)?);
        let count = inputs.z.len();
        let params = TimeStep {
            z: z.address(),
            bias: bias.address(),
            a_log: a_log.address(),
            count: count as u64,
            heads: int(inputs.z.cols()),
            low: inputs.limits.0,
            high: inputs.limits.1,
        };
        let blocks = count.div_ceil(THREADS).min(self.gpu.processors() as usize * 16);
        let (variant, grid) = (Variant::plain(DType::F32, 1), [blocks, 1]);
        let op =
            Op { source: Source::BASELINE, entry, variant, grid, block: THREADS, shared: 0, args };
        // SAFETY: parameters as declared in baseline.cu; the tape checked the shapes.
        unsafe { self.launch_struct(&op, &params) }
    }

    fn hgrn_operands<'a>(&self, inputs: &HgrnInputs<'a>) -> Result<HgrnOperands<'a>> {
        let lower = inputs.lower.map(|x| self.real(x)).transpose()?;
        Ok((self.activation(inputs.q)?, self.activation(inputs.z)?, lower))
    }

    /// Queries and keys as activations, log decays in f32; all `[R, C]`.
    pub(super) fn hgrn_forward(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        let (shape, device, dtype) = (inputs.q.shape(), inputs.q.device(), self.activations());
        let division = Division::new(dtype, inputs.q.rows(), inputs.q.cols());
        let (q, q_at) = self.output(shape, dtype, device)?;
        let (k, k_at) = self.output(shape, dtype, device)?;
        let (log_f, log_f_at) = self.output(shape, DType::F32, device)?;
        let operands = self.hgrn_operands(inputs)?;
        let args = [q_at.into(), k_at.into(), log_f_at.into()];
        let params = division.params(inputs, &operands);
        // SAFETY: parameters as declared in baseline.cu; the tape checked the shapes.
        unsafe { self.launch_struct(&division.op("hgrn_gates_fwd", &args), &params)? };
        Ok(HgrnGates { q, k, log_f })
    }

    pub(super) fn hgrn_backward(
        &self,
        d_out: &HgrnGates,
        inputs: &HgrnInputs<'_>,
    ) -> Result<HgrnGrads> {
        let (shape, device, dtype) = (inputs.q.shape(), inputs.q.device(), self.activations());
        let width = inputs.q.cols();
        let division = Division::new(dtype, inputs.q.rows(), width);
        let (dq, dq_at) = self.output(shape, dtype, device)?;
        let (dz, dz_at) = self.output(shape, dtype, device)?;
        let slices = division.grid[0];
        let partial = match inputs.lower {
            Some(_) => Some(self.gpu.alloc::<f32>(slices * width)?),
            None => None,
        };
        let operands = self.hgrn_operands(inputs)?;
        let (d_q, d_k, d_log_f) =
            (self.activation(&d_out.q)?, self.activation(&d_out.k)?, self.real(&d_out.log_f)?);
        let args = [
            dq_at.into(),
            dz_at.into(),
            partial.as_ref().map_or(0, |partial| partial.address()).into(),
            d_q.address().into(),
            d_k.address().into(),
            d_log_f.address().into(),
        ];
        let params = division.params(inputs, &operands);
        // SAFETY: parameters as declared in baseline.cu; the tape checked the shapes.
        unsafe { self.launch_struct(&division.op("hgrn_gates_bwd", &args), &params)? };
        let dlower = match partial {
            Some(partial) => {
                let at = partial.address();
                Some(self.column_sums(at, DType::F32, slices, width, None, device)?)
            }
            None => None,
        };
        Ok(HgrnGrads { dq, dz, dlower })
    }

    /// The lower bounds `[C]` of a layer.
    pub(super) fn bound_forward(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        let (y, at) = self.output([table.cols()], DType::F32, table.device())?;
        self.lower_bound([at, 0, 0], table, layer)?;
        Ok(y)
    }

    /// `dtable[L, C]`.
    pub(super) fn bound_backward(
        &self,
        dy: &Tensor,
        table: &Tensor,
        layer: usize,
    ) -> Result<Tensor> {
        let (dtable, at) = self.output(table.shape(), DType::F32, table.device())?;
        let dy = self.real(dy)?;
        self.lower_bound([0, at, dy.address()], table, layer)?;
        Ok(dtable)
    }

    /// `[y, dtable, dy]` are addresses, 0 for what is absent.
    fn lower_bound(&self, [y, dtable, dy]: [u64; 3], table: &Tensor, layer: usize) -> Result<()> {
        let values = self.real(table)?;
        let args = [
            y.into(),
            dtable.into(),
            dy.into(),
            values.address().into(),
            int(table.rows()).into(),
            int(table.cols()).into(),
            int(layer).into(),
        ];
        let op = Op {
            source: Source::BASELINE,
            entry: "lower_bound",
            variant: Variant::plain(DType::F32, 1),
            grid: [table.cols().div_ceil(THREADS), 1],
            block: THREADS,
            shared: 0,
            args: &args,
        };
        // SAFETY: parameters as declared in baseline.cu; the tape checked the shapes.
        unsafe { self.launch(&op) }
    }
}
