//! Short causal convolution with bias, activation and L2 norm.

use fox_tensor::{
    ConvGrads, ConvInputs, ConvOps, ConvSpec, DType, L2Norm, Tensor,
    short_conv_split_bwd_by_copies, short_conv_split_fwd_by_copies,
};

use super::head_fragments::activation_code;
use crate::backend::launcher::{Op, Variant};
use crate::backend::rows::{RowInfo, RowTable};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};

const CONV: Source =
    source!("conv", [], [RowInfo, ConvPart, ConvParams, ConvForward, ConvBackward, ConvFilters]);

/// Matrices that the output is divided over, at most; as in conv.cu.
const PARTS: usize = 4;

kernel_params! {
    /// Columns of the output that form a separate matrix.
    #[derive(Default)]
    struct ConvPart {
        /// `[R, width]`: written by the forward; its gradient, read by the backward.
        at: Ptr<Real>,
        /// Its first column in the output; `C` for an unused part.
        first: usize,
        width: usize,
    }

    struct ConvParams {
        /// `[R, C]`, rows `stride` elements apart.
        x: ConstPtr<Real>,
        parts: [ConvPart; PARTS],
        /// `[C, taps]`, the last tap for the current row.
        weight: ConstPtr<f32>,
        /// `[C]`, or null.
        bias: ConstPtr<f32>,
        /// The rows before the segments `[segments * (taps - 1), C]`, oldest first, or null.
        before: ConstPtr<Real>,
        /// `[R]`.
        info: ConstPtr<RowInfo>,
        rows: usize,
        width: usize,
        stride: usize,
        head_dim: usize,
        /// -1 for none.
        act: i32,
        /// Whether heads are L2-normalized.
        l2_norm: bool,
        rows_per_slice: usize,
        eps: f32,
    }

    list struct ConvForward {
        p: ConvParams,
    }

    list struct ConvBackward {
        /// Like `x`.
        dx: Ptr<Real>,
        /// Partial gradients of filters and biases `[blocks of slices, taps + 1, C]`.
        partial: Ptr<f32>,
        p: ConvParams,
    }

    list struct ConvFilters {
        /// `[C, taps]`.
        dweight: Ptr<f32>,
        /// `[taps, C]`.
        sums: ConstPtr<f32>,
        width: usize,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    let of = |dtype: DType| {
        let wide = 16 / dtype.size();
        let kinds = [(128, 4, wide), (128, 4, 4), (wide, 4, wide), (4, 4, 4), (29, 3, 1)];
        kinds.map(|(head_dim, taps, vec)| {
            (CONV, Variant::filters(dtype, head_dim, taps, vec).defines())
        })
    };
    let mut all: Vec<_> = [DType::F32, DType::Bf16].into_iter().flat_map(of).collect();
    all.dedup();
    all
}

/// Warps of a block, as in conv.cu.
const WARPS: usize = 4;
const THREADS: usize = 32 * WARPS;

/// Rows of a warp, at most: a slice reads taps - 1 rows before it again.
const LONGEST_SLICE: usize = 32;

/// Work decomposition over channels and rows.
struct ConvGrid {
    variant: Variant,
    head_dim: usize,
    grid: [usize; 2],
    rows_per_slice: usize,
}

impl ConvGrid {
    /// For `rows` rows of an input, `stride` elements apart, of which `width` columns are filtered, and parts of the
    /// output of these widths.
    fn new(
        dtype: DType,
        [rows, width, stride, taps]: [usize; 4],
        parts: &[usize],
        l2_norm: Option<L2Norm>,
        backward: bool,
    ) -> Self {
        // The backward has three times as many values per channel in registers: 8 bytes of bf16 per access instead of
        // 16, and twice as many warps.
        let widest = if backward { 4 } else { 16 / dtype.size() };
        let even = |vec: &usize| {
            let unit = l2_norm.map_or(width, |norm| norm.width);
            stride.is_multiple_of(*vec)
                && unit.is_multiple_of(*vec)
                && parts.iter().all(|part| part.is_multiple_of(*vec))
        };
        let vec = [widest, 4, 1].into_iter().find(even).unwrap_or(1);
        // Without a norm, heads are just vectors of channels.
        let head_dim = l2_norm.map_or(vec, |norm| norm.width);
        let variant = Variant::filters(dtype, head_dim, taps, vec);
        let across = (width / head_dim).div_ceil(32 / variant.lanes);
        // Enough warps for several waves, and long slices if there are. Few rows are decode steps.
        let shortest = if rows < 128 { 1 } else { 8 };
        let rows_per_slice = (rows * across / 8192).clamp(shortest, LONGEST_SLICE);
        let blocks = |slice: usize| rows.div_ceil(slice).div_ceil(WARPS);
        let rows_per_slice = match blocks(rows_per_slice) <= MAX_GRID_Y {
            true => rows_per_slice,
            false => rows.div_ceil(WARPS * MAX_GRID_Y),
        };
        ConvGrid { variant, head_dim, grid: [across, blocks(rows_per_slice)], rows_per_slice }
    }

    fn op(&self, entry: &'static str) -> Op {
        Op::new(CONV, entry, self.variant, self.grid, THREADS)
    }
}

/// Thread blocks of a launch in its second dimension, at most.
const MAX_GRID_Y: usize = 65_535;

/// Kernel parameters, and the operands they point to.
struct ConvOperands<'a> {
    _operands: (Operand<'a>, Operand<'a>, Option<Operand<'a>>, Option<Operand<'a>>),
    _info: std::sync::Arc<RowTable>,
    params: ConvParams,
}

/// A matrix `[R, width]` that holds columns of the output, or their gradient.
#[derive(Clone, Copy)]
struct OutputColumns {
    address: u64,
    width: usize,
}

/// The matrices that columns of the output are written to, or their gradients read from.
fn parts(parts: &[OutputColumns]) -> [ConvPart; PARTS] {
    let width = parts.iter().map(|part| part.width).sum();
    let mut all = [ConvPart { at: 0.into(), first: width, width: 0 }; PARTS];
    let mut first = 0;
    for (to, &OutputColumns { address, width }) in all.iter_mut().zip(parts) {
        *to = ConvPart { at: address.into(), first, width };
        first += width;
    }
    all
}

impl Cuda {
    /// For the first `width` columns of `inputs.x`.
    fn conv_operands<'a>(
        &self,
        inputs: &ConvInputs<'a>,
        width: usize,
        spec: &ConvSpec,
        grid: &ConvGrid,
        parts: [ConvPart; PARTS],
    ) -> Result<ConvOperands<'a>> {
        let (x, weight) = (self.activation(inputs.x)?, self.real(inputs.weight)?);
        let bias = inputs.bias.map(|x| self.real(x)).transpose()?;
        let before = inputs.before.map(|x| self.activation(x)).transpose()?;
        let info = self.row_table(&spec.segments, inputs.x.rows())?;
        let params = ConvParams {
            x: x.address().into(),
            parts,
            weight: weight.address().into(),
            bias: address(&bias).into(),
            before: address(&before).into(),
            info: info.address().into(),
            rows: inputs.x.rows(),
            width,
            stride: inputs.x.cols(),
            head_dim: grid.head_dim,
            act: spec.activation.map_or(-1, activation_code),
            l2_norm: spec.l2_norm.is_some(),
            rows_per_slice: grid.rows_per_slice,
            eps: spec.l2_norm.map_or(0.0, |norm| norm.eps),
        };
        Ok(ConvOperands { _operands: (x, weight, bias, before), _info: info, params })
    }

    /// Gradients of filters and biases, from the backward kernel's sums.
    fn filter_gradients(
        &self,
        partial: &Buffer<f32>,
        grid: &ConvGrid,
        inputs: &ConvInputs<'_>,
        width: usize,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (taps, device) = (grid.variant.taps, inputs.x.device());
        let sums = self.column_sums(partial, [grid.grid[1], (taps + 1) * width], None, device)?;
        let sums_at = self.real(&sums)?.address();
        let (dweight, dweight_at) = self.output(inputs.weight.shape(), DType::F32, device)?;
        let params = ConvFilters { dweight: dweight_at.into(), sums: sums_at.into(), width };
        let op = grid.op("short_conv_filters");
        let grid = [(width * taps).div_ceil(THREADS), 1];
        // SAFETY: the sums are `taps + 1` rows of `width`, and the gradient is shaped like the filters.
        unsafe { self.launch(&Op { grid, ..op }, params)? };
        let dbias = match inputs.bias {
            None => None,
            Some(_) => {
                let (dbias, at) = self.output([width], DType::F32, device)?;
                // SAFETY: the last row of the sums has `width` elements.
                unsafe { self.gpu.copy(at, sums_at + (4 * taps * width) as u64, 4 * width)? };
                Some(dbias)
            }
        };
        Ok((dweight, dbias))
    }
}

impl ConvOps for Cuda {
    fn short_conv_fwd(
        &self,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> fox_tensor::Result<Tensor> {
        fox_tensor::check_short_conv_fwd(self, inputs, spec)?;
        let _span = self.span("short_conv fwd")?;
        let (dtype, width) = (self.activations(), inputs.x.cols());
        let shape = [inputs.x.rows(), width, width, inputs.taps()];
        let grid = ConvGrid::new(dtype, shape, &[width], spec.l2_norm, false);
        let (y, address) = self.output(inputs.x.shape(), dtype, inputs.x.device())?;
        let parts = parts(&[OutputColumns { address, width }]);
        let held = self.conv_operands(inputs, width, spec, &grid, parts)?;
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("short_conv_fwd"), ConvForward { p: held.params })? };
        Ok(y)
    }

    fn short_conv_bwd(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> fox_tensor::Result<ConvGrads> {
        fox_tensor::check_short_conv_bwd(self, dy, inputs, spec)?;
        let _span = self.span("short_conv bwd")?;
        let (width, taps, device) = (inputs.x.cols(), inputs.taps(), inputs.x.device());
        let dtype = self.activations();
        let shape = [inputs.x.rows(), width, width, taps];
        let grid = ConvGrid::new(dtype, shape, &[width], spec.l2_norm, true);
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, device)?;
        let partial = self.gpu.alloc::<f32>(grid.grid[1] * (taps + 1) * width)?;
        let dy = self.activation(dy)?;
        let parts = parts(&[OutputColumns { address: dy.address(), width }]);
        let held = self.conv_operands(inputs, width, spec, &grid, parts)?;
        let params =
            ConvBackward { dx: dx_at.into(), partial: partial.address().into(), p: held.params };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("short_conv_bwd"), params)? };
        let (dweight, dbias) = self.filter_gradients(&partial, &grid, inputs, width)?;
        Ok(ConvGrads { dx, dweight, dbias })
    }

    fn short_conv_split_fwd(
        &self,
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> fox_tensor::Result<Vec<Tensor>> {
        fox_tensor::check_short_conv_split_fwd(self, inputs, widths, spec)?;
        if widths.len() > PARTS {
            return short_conv_split_fwd_by_copies(self, inputs, widths, spec);
        }
        let _span = self.span("short_conv fwd")?;
        let (dtype, rows, all) = (self.activations(), inputs.x.rows(), inputs.x.cols());
        let width = inputs.weight.rows();
        let shape = [rows, width, all, inputs.taps()];
        let grid = ConvGrid::new(dtype, shape, widths, spec.l2_norm, false);
        let (mut outs, mut own) = (Vec::with_capacity(widths.len() + 1), Vec::new());
        for &width in widths {
            let (y, address) = self.output([rows, width], dtype, inputs.x.device())?;
            outs.push(y);
            own.push(OutputColumns { address, width });
        }
        let held = self.conv_operands(inputs, width, spec, &grid, parts(&own))?;
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("short_conv_fwd"), ConvForward { p: held.params })? };
        if width < all {
            let (rest, to) = self.output([rows, all - width], dtype, inputs.x.device())?;
            let from = held.params.x.address() + (width * dtype.size()) as u64;
            // SAFETY: the columns of the input after `width`, and a matrix of as many.
            unsafe {
                self.copy_block_of_columns(
                    (from, all),
                    (to, all - width),
                    [rows, all - width],
                    dtype,
                )?;
            }
            outs.push(rest);
        }
        Ok(outs)
    }

    fn short_conv_split_bwd(
        &self,
        dys: &[Tensor],
        inputs: &ConvInputs<'_>,
        widths: &[usize],
        spec: &ConvSpec,
    ) -> fox_tensor::Result<ConvGrads> {
        fox_tensor::check_short_conv_split_bwd(self, dys, inputs, widths, spec)?;
        if widths.len() > PARTS {
            return short_conv_split_bwd_by_copies(self, dys, inputs, widths, spec);
        }
        let _span = self.span("short_conv bwd")?;
        let (dtype, rows, all) = (self.activations(), inputs.x.rows(), inputs.x.cols());
        let width = inputs.weight.rows();
        let taps = inputs.taps();
        let grid = ConvGrid::new(dtype, [rows, width, all, taps], widths, spec.l2_norm, true);
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, inputs.x.device())?;
        let partial = self.gpu.alloc::<f32>(grid.grid[1] * (taps + 1) * width)?;
        let held: Vec<_> = dys.iter().map(|dy| self.activation(dy)).collect::<Result<_>>()?;
        let own: Vec<OutputColumns> = held
            .iter()
            .zip(widths)
            .map(|(dy, &width)| OutputColumns { address: dy.address(), width })
            .collect();
        let operands = self.conv_operands(inputs, width, spec, &grid, parts(&own))?;
        let params = ConvBackward {
            dx: dx_at.into(),
            partial: partial.address().into(),
            p: operands.params,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("short_conv_bwd"), params)? };
        if let Some(rest) = held.get(widths.len()) {
            let to = dx_at + (width * dtype.size()) as u64;
            let from = (rest.address(), all - width);
            // SAFETY: the gradient of the columns after `width`, and their place in `dx`.
            unsafe { self.copy_block_of_columns(from, (to, all), [rows, all - width], dtype)? };
        }
        let (dweight, dbias) = self.filter_gradients(&partial, &grid, inputs, width)?;
        Ok(ConvGrads { dx, dweight, dbias })
    }
}
