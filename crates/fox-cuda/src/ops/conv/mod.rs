//! Short causal convolution with bias, activation and L2 norm.

use fox_tensor::{ConvGrads, ConvInputs, ConvOps, ConvSpec, DType, Tensor};

use super::head_fragments::activation_code;
use crate::backend::launcher::{Op, Variant};
use crate::backend::rows::{RowInfo, RowTable};
use crate::backend::{Cuda, Operand, address};
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const CONV: Source =
    source!("conv", [], [RowInfo, ConvParams, ConvForward, ConvBackward, ConvFilters]);

kernel_params! {
    struct ConvParams {
        /// `[R, C]`.
        x: ConstPtr<Real>,
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
        head_dim: usize,
        /// -1 for none.
        act: i32,
        /// Whether heads are L2-normalized.
        l2_norm: bool,
        rows_per_slice: usize,
        eps: f32,
    }

    list struct ConvForward {
        /// `[R, C]`.
        y: Ptr<Real>,
        p: ConvParams,
    }

    list struct ConvBackward {
        /// `[R, C]`.
        dx: Ptr<Real>,
        /// Partial gradients of filters and biases `[slices, taps + 1, C]`.
        partial: Ptr<f32>,
        /// `[R, C]`.
        dy: ConstPtr<Real>,
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
    let of = |dtype| {
        let kinds = [(128, 4), (4, 4), (29, 3)];
        kinds.map(|(head_dim, taps)| (CONV, Variant::filters(dtype, head_dim, taps).defines()))
    };
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

/// Threads per block, as in conv.cu: register pressure is high, and small blocks give better occupancy.
const THREADS: usize = 64;

/// Work decomposition over channels and rows.
struct ConvGrid {
    variant: Variant,
    head_dim: usize,
    heads_per_block: usize,
    grid: [usize; 2],
    rows_per_slice: usize,
}

impl ConvGrid {
    fn new(dtype: DType, inputs: &ConvInputs<'_>, spec: &ConvSpec, longest: usize) -> Self {
        let (rows, width) = (inputs.x.rows(), inputs.x.cols());
        // Without a norm, heads are just vectors of channels.
        let few = if width.is_multiple_of(4) { 4 } else { 1 };
        let head_dim = spec.l2_norm.map_or(few, |norm| norm.width);
        let variant = Variant::filters(dtype, head_dim, inputs.taps());
        let heads = width / head_dim;
        let heads_per_block = heads.min(THREADS / variant.lanes);
        // A slice re-reads taps - 1 rows before it and writes partial filter gradients: long slices are cheaper, as long
        // as there are enough of them to fill the GPU.
        let rows_per_slice = (rows / 1024).clamp(1, longest);
        ConvGrid {
            variant,
            head_dim,
            heads_per_block,
            grid: [rows.div_ceil(rows_per_slice), heads.div_ceil(heads_per_block)],
            rows_per_slice,
        }
    }

    fn op(&self, entry: &'static str) -> Op {
        let block = (self.heads_per_block * self.variant.lanes).next_multiple_of(32);
        let (variant, grid) = (self.variant, self.grid);
        Op::new(CONV, entry, variant, grid, block)
    }
}

/// Kernel parameters, and the operands they point to.
struct ConvOperands<'a> {
    _operands: (Operand<'a>, Operand<'a>, Option<Operand<'a>>, Option<Operand<'a>>),
    _info: std::sync::Arc<RowTable>,
    params: ConvParams,
}

impl Cuda {
    fn conv_operands<'a>(
        &self,
        inputs: &ConvInputs<'a>,
        spec: &ConvSpec,
        grid: &ConvGrid,
    ) -> Result<ConvOperands<'a>> {
        let (x, weight) = (self.activation(inputs.x)?, self.real(inputs.weight)?);
        let bias = inputs.bias.map(|x| self.real(x)).transpose()?;
        let before = inputs.before.map(|x| self.activation(x)).transpose()?;
        let info = self.row_table(&spec.segments, inputs.x.rows())?;
        let params = ConvParams {
            x: x.address().into(),
            weight: weight.address().into(),
            bias: address(&bias).into(),
            before: address(&before).into(),
            info: info.address().into(),
            rows: inputs.x.rows(),
            width: inputs.x.cols(),
            head_dim: grid.head_dim,
            act: spec.activation.map_or(-1, activation_code),
            l2_norm: spec.l2_norm.is_some(),
            rows_per_slice: grid.rows_per_slice,
            eps: spec.l2_norm.map_or(0.0, |norm| norm.eps),
        };
        Ok(ConvOperands { _operands: (x, weight, bias, before), _info: info, params })
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
        let dtype = self.activations();
        let grid = ConvGrid::new(dtype, inputs, spec, 16);
        let (y, at) = self.output(inputs.x.shape(), dtype, inputs.x.device())?;
        let held = self.conv_operands(inputs, spec, &grid)?;
        let params = ConvForward { y: at.into(), p: held.params };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("short_conv_fwd"), params)? };
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
        let grid = ConvGrid::new(dtype, inputs, spec, 32);
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, device)?;
        let (slices, sums) = (grid.grid[0], (taps + 1) * width);
        let partial = self.gpu.alloc::<f32>(slices * sums)?;
        let held = self.conv_operands(inputs, spec, &grid)?;
        let dy = self.activation(dy)?;
        let params = ConvBackward {
            dx: dx_at.into(),
            partial: partial.address().into(),
            dy: dy.address().into(),
            p: held.params,
        };
        // SAFETY: the operands are validated at entry; outputs and scratch are allocated from their shapes.
        unsafe { self.launch(&grid.op("short_conv_bwd"), params)? };
        let sums = self.column_sums(&partial, [slices, sums], None, device)?;
        let sums_at = self.real(&sums)?.address();
        let (dweight, dweight_at) = self.output(inputs.weight.shape(), DType::F32, device)?;
        let params = ConvFilters { dweight: dweight_at.into(), sums: sums_at.into(), width };
        let op = grid.op("short_conv_filters");
        let grid = [(width * taps).div_ceil(THREADS), 1];
        // SAFETY: as above; the sums are `taps + 1` rows of `width`.
        unsafe { self.launch(&Op { grid, block: THREADS, ..op }, params)? };
        let dbias = match inputs.bias {
            None => None,
            Some(_) => {
                let (dbias, at) = self.output([width], DType::F32, device)?;
                // SAFETY: the last row of the sums has `width` elements.
                unsafe { self.gpu.copy(at, sums_at + (4 * taps * width) as u64, 4 * width)? };
                Some(dbias)
            }
        };
        Ok(ConvGrads { dx, dweight, dbias })
    }
}
