//! HGRN2's gates and their lower bounds.

use fox_tensor::{DType, HgrnGates, HgrnGrads, HgrnInputs, HgrnOps, Tensor};

use crate::backend::launcher::{Op, Variant, plain_variants};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const HGRN: Source = source!("hgrn", [], [Hgrn, HgrnForward, HgrnBackward, LowerBound]);

/// Threads per block.
const THREADS: usize = 128;

kernel_params! {
    struct Hgrn {
        /// `[R, C]`.
        q: ConstPtr<Real>,
        /// `[R, C]`.
        z: ConstPtr<Real>,
        /// `[C]`, or null.
        lower: ConstPtr<f32>,
        rows: usize,
        width: usize,
        rows_per_slice: usize,
    }

    list struct HgrnForward {
        /// `[R, C]`.
        q: Ptr<Real>,
        /// `[R, C]`.
        k: Ptr<Real>,
        /// `[R, C]`.
        log_f: Ptr<f32>,
        p: Hgrn,
    }

    list struct HgrnBackward {
        /// `[R, C]`.
        dq: Ptr<Real>,
        /// `[R, C]`.
        dz: Ptr<Real>,
        /// Partial gradients of the lower bounds `[slices, C]`; null without bounds.
        partial: Ptr<f32>,
        /// `[R, C]`.
        dq_out: ConstPtr<Real>,
        /// `[R, C]`.
        dk_out: ConstPtr<Real>,
        /// `[R, C]`.
        dlog_f: ConstPtr<f32>,
        p: Hgrn,
    }

    list struct LowerBound {
        /// `[C]`, or null.
        y: Ptr<f32>,
        /// `[L, C]`; null without `dy`.
        dtable: Ptr<f32>,
        /// `[C]`, or null.
        dy: ConstPtr<f32>,
        /// `[L, C]`.
        table: ConstPtr<f32>,
        layers: usize,
        width: usize,
        layer: usize,
    }
}

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(HGRN)
}

/// Work decomposition: a thread owns a vector of columns of a slice of rows.
struct HgrnGrid {
    variant: Variant,
    grid: [usize; 2],
    rows_per_slice: usize,
}

impl HgrnGrid {
    fn new(dtype: DType, rows: usize, width: usize) -> Self {
        let variant = Variant::plain(dtype, width);
        let rows_per_slice = (rows / 1024).clamp(1, 16);
        let columns = width.div_ceil(THREADS * variant.vec);
        HgrnGrid { variant, grid: [rows.div_ceil(rows_per_slice), columns], rows_per_slice }
    }

    fn op(&self, entry: &'static str) -> Op {
        let (variant, grid) = (self.variant, self.grid);
        Op::new(HGRN, entry, variant, grid, THREADS)
    }

    fn params(&self, inputs: &HgrnInputs<'_>, operands: &HgrnOperands<'_>) -> Hgrn {
        Hgrn {
            q: operands.0.address().into(),
            z: operands.1.address().into(),
            lower: address(&operands.2).into(),
            rows: inputs.q.rows(),
            width: inputs.q.cols(),
            rows_per_slice: self.rows_per_slice,
        }
    }
}

/// Queries, logits, lower bounds.
type HgrnOperands<'a> = (Operand<'a>, Operand<'a>, Option<Operand<'a>>);

impl Cuda {
    fn hgrn_operands<'a>(&self, inputs: &HgrnInputs<'a>) -> Result<HgrnOperands<'a>> {
        let lower = inputs.lower.map(|x| self.real(x)).transpose()?;
        Ok((self.activation(inputs.q)?, self.activation(inputs.z)?, lower))
    }

    /// Launches `lower_bound` on addresses `[y, dtable, dy]`, 0 if absent.
    ///
    /// # Safety
    /// They must be those of live f32 values: a row of `table`, all of it, and a row. The layer must exist.
    unsafe fn lower_bound(
        &self,
        [y, dtable, dy]: [u64; 3],
        table: &Tensor,
        layer: usize,
    ) -> Result<()> {
        let values = self.real(table)?;
        let params = LowerBound {
            y: y.into(),
            dtable: dtable.into(),
            dy: dy.into(),
            table: values.address().into(),
            layers: table.rows(),
            width: table.cols(),
            layer,
        };
        let (variant, grid) = (Variant::plain(DType::F32, 1), [table.cols().div_ceil(THREADS), 1]);
        let op = Op::new(HGRN, "lower_bound", variant, grid, THREADS);
        // SAFETY: the caller's promise.
        unsafe { self.launch(&op, params) }
    }
}

impl HgrnOps for Cuda {
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> fox_tensor::Result<HgrnGates> {
        fox_tensor::check_hgrn_gates_fwd(self, inputs)?;
        let _span = self.span("hgrn_gates fwd")?;
        let (shape, device, dtype) = (inputs.q.shape(), inputs.q.device(), self.activations());
        let grid = HgrnGrid::new(dtype, inputs.q.rows(), inputs.q.cols());
        let (q, q_at) = self.output(shape, dtype, device)?;
        let (k, k_at) = self.output(shape, dtype, device)?;
        let (log_f, log_f_at) = self.output(shape, DType::F32, device)?;
        let operands = self.hgrn_operands(inputs)?;
        let params = HgrnForward {
            q: q_at.into(),
            k: k_at.into(),
            log_f: log_f_at.into(),
            p: grid.params(inputs, &operands),
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("hgrn_gates_fwd"), params)? };
        Ok(HgrnGates { q, k, log_f })
    }

    fn hgrn_gates_bwd(
        &self,
        d_out: &HgrnGates,
        inputs: &HgrnInputs<'_>,
    ) -> fox_tensor::Result<HgrnGrads> {
        fox_tensor::check_hgrn_gates_bwd(self, d_out, inputs)?;
        let _span = self.span("hgrn_gates bwd")?;
        let (shape, device, dtype) = (inputs.q.shape(), inputs.q.device(), self.activations());
        let width = inputs.q.cols();
        let grid = HgrnGrid::new(dtype, inputs.q.rows(), width);
        let (dq, dq_at) = self.output(shape, dtype, device)?;
        let (dz, dz_at) = self.output(shape, dtype, device)?;
        let slices = grid.grid[0];
        let partial = inputs.lower.map(|_| self.gpu.alloc::<f32>(slices * width)).transpose()?;
        let operands = self.hgrn_operands(inputs)?;
        let (d_q, d_k, d_log_f) =
            (self.activation(&d_out.q)?, self.activation(&d_out.k)?, self.real(&d_out.log_f)?);
        let params = HgrnBackward {
            dq: dq_at.into(),
            dz: dz_at.into(),
            partial: partial.as_ref().map_or(0, |partial| partial.address()).into(),
            dq_out: d_q.address().into(),
            dk_out: d_k.address().into(),
            dlog_f: d_log_f.address().into(),
            p: grid.params(inputs, &operands),
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("hgrn_gates_bwd"), params)? };
        let dlower = partial.map(|sums| self.column_sums(&sums, [slices, width], None, device));
        let dlower = dlower.transpose()?;
        Ok(HgrnGrads { dq, dz, dlower })
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_lower_bound_fwd(self, table, layer)?;
        let _span = self.span("lower_bound fwd")?;
        let (y, at) = self.output([table.cols()], DType::F32, table.device())?;
        // SAFETY: the operands are validated at entry, and the output has the shape of the result.
        unsafe { self.lower_bound([at, 0, 0], table, layer)? };
        Ok(y)
    }

    fn lower_bound_bwd(
        &self,
        dy: &Tensor,
        table: &Tensor,
        layer: usize,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_lower_bound_bwd(self, dy, table, layer)?;
        let _span = self.span("lower_bound bwd")?;
        let (dtable, at) = self.output(table.shape(), DType::F32, table.device())?;
        let dy = self.real(dy)?;
        // SAFETY: the operands are validated at entry, and the output has the shape of the result.
        unsafe { self.lower_bound([0, at, dy.address()], table, layer)? };
        Ok(dtable)
    }
}
