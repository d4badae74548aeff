//! The short convolution with its bias, nonlinearity and norm.

use fox_tensor::{ConvGrads, ConvInputs, ConvSpec, DType, Tensor};

use crate::backend::heads::activation_code;
use crate::backend::launcher::{Op, Variant};
use crate::backend::{Cuda, Operand, address, int};
use crate::launch::Arg;
use crate::{Buffer, KernelArg, Result, Source};

#[repr(C)]
#[derive(Clone, Copy)]
struct ConvParams {
    x: u64,
    weight: u64,
    bias: u64,
    before: u64,
    info: u64,
    rows: i32,
    width: i32,
    head_dim: i32,
    act: i32,
    l2_norm: i32,
    rows_per_slice: i32,
    eps: f32,
}

// SAFETY: mirrors the struct of the same name in conv.cu.
unsafe impl KernelArg for ConvParams {}

/// Threads of a block, as conv.cu has it: threads have many registers, and small blocks fit better.
const THREADS: usize = 64;

/// How channels and rows are dealt out to blocks.
struct Division {
    variant: Variant,
    head_dim: usize,
    heads_per_block: usize,
    grid: [usize; 2],
    rows_per_slice: usize,
}

impl Division {
    fn new(dtype: DType, inputs: &ConvInputs<'_>, spec: &ConvSpec, longest: usize) -> Self {
        let (rows, width) = (inputs.x.rows(), inputs.x.cols());
        // Without a norm, any few channels may be a head.
        let few = if width.is_multiple_of(4) { 4 } else { 1 };
        let head_dim = spec.l2_norm.map_or(few, |norm| norm.width);
        let variant = Variant::filters(dtype, head_dim, inputs.taps());
        let heads = width / head_dim;
        let heads_per_block = heads.min(THREADS / variant.lanes);
        // A slice reads again the rows that its first rows look back at, and writes sums for the filters: long
        // slices are cheap. But there must be enough of them for every multiprocessor.
        let rows_per_slice = (rows / 1024).clamp(1, longest);
        Division {
            variant,
            head_dim,
            heads_per_block,
            grid: [rows.div_ceil(rows_per_slice), heads.div_ceil(heads_per_block)],
            rows_per_slice,
        }
    }

    fn op<'a>(&self, entry: &'static str, args: &'a [Arg]) -> Op<'a> {
        let block = (self.heads_per_block * self.variant.lanes).next_multiple_of(32);
        let (variant, grid) = (self.variant, self.grid);
        Op { source: Source::CONV, entry, variant, grid, block, shared: 0, args }
    }
}

/// Operands on their way to the kernel.
struct Held<'a> {
    _operands: (Operand<'a>, Operand<'a>, Option<Operand<'a>>, Option<Operand<'a>>),
    _info: std::sync::Arc<Buffer<i32>>,
    params: ConvParams,
}

impl Cuda {
    fn conv_operands<'a>(
        &self,
        inputs: &ConvInputs<'a>,
        spec: &ConvSpec,
        division: &Division,
    ) -> Result<Held<'a>> {
        let (x, weight) = (self.activation(inputs.x)?, self.real(inputs.weight)?);
        let bias = inputs.bias.map(|x| self.real(x)).transpose()?;
        let before = inputs.before.map(|x| self.activation(x)).transpose()?;
        let info = self.row_table(&spec.segments, inputs.x.rows())?;
        let params = ConvParams {
            x: x.address(),
            weight: weight.address(),
            bias: address(&bias),
            before: address(&before),
            info: info.address(),
            rows: int(inputs.x.rows()),
            width: int(inputs.x.cols()),
            head_dim: int(division.head_dim),
            act: spec.activation.map_or(-1, activation_code),
            l2_norm: i32::from(spec.l2_norm.is_some()),
            rows_per_slice: int(division.rows_per_slice),
            eps: spec.l2_norm.map_or(0.0, |norm| norm.eps),
        };
        Ok(Held { _operands: (x, weight, bias, before), _info: info, params })
    }

    /// `y: [R, C]`.
    pub(super) fn conv_forward(&self, inputs: &ConvInputs<'_>, spec: &ConvSpec) -> Result<Tensor> {
        let dtype = self.activations();
        let division = Division::new(dtype, inputs, spec, 16);
        let (y, at) = self.output(inputs.x.shape(), dtype, inputs.x.device())?;
        let held = self.conv_operands(inputs, spec, &division)?;
        // SAFETY: parameters as declared in conv.cu; the tape checked the shapes.
        unsafe {
            self.launch_struct(&division.op("short_conv_fwd", &[at.into()]), &held.params)?;
        }
        Ok(y)
    }

    pub(super) fn conv_backward(
        &self,
        dy: &Tensor,
        inputs: &ConvInputs<'_>,
        spec: &ConvSpec,
    ) -> Result<ConvGrads> {
        let (width, taps, device) = (inputs.x.cols(), inputs.taps(), inputs.x.device());
        let dtype = self.activations();
        let division = Division::new(dtype, inputs, spec, 32);
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, device)?;
        let (slices, sums) = (division.grid[0], (taps + 1) * width);
        let partial = self.gpu.alloc::<f32>(slices * sums)?;
        let held = self.conv_operands(inputs, spec, &division)?;
        let dy = self.activation(dy)?;
        let args = [dx_at.into(), partial.address().into(), dy.address().into()];
        // SAFETY: parameters as declared in conv.cu; the tape checked the shapes.
        unsafe { self.launch_struct(&division.op("short_conv_bwd", &args), &held.params)? };
        let sums = self.column_sums(partial.address(), DType::F32, slices, sums, None, device)?;
        let sums_at = self.real(&sums)?.address();
        let (dweight, dweight_at) = self.output(inputs.weight.shape(), DType::F32, device)?;
        let args = [dweight_at.into(), sums_at.into(), int(width).into()];
        let op = division.op("short_conv_filters", &args);
        let grid = [(width * taps).div_ceil(THREADS), 1];
        // SAFETY: as above; the sums are `taps + 1` rows of `width`.
        unsafe { self.launch(&Op { grid, block: THREADS, ..op })? };
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
