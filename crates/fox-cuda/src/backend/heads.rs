//! Ops on the heads of each row: token shift, norm, RoPE; output norm and gate.

use fox_tensor::{
    Activation, DType, Device, GatedNormInputs, HeadGrads, HeadInputs, HeadSpec, Tensor,
};

use super::launcher::{Op, Variant};
use super::{Cuda, Operand, address, int};
use crate::launch::Arg;
use crate::{Buffer, KernelArg, Result, Source};

#[repr(C)]
#[derive(Clone, Copy)]
struct HeadParams {
    u: u64,
    shift: u64,
    prev: u64,
    norm: u64,
    rope: u64,
    info: u64,
    rows: i32,
    heads: i32,
    head_dim: i32,
    shared_norm: i32,
    rows_per_slice: i32,
    unused: i32,
    eps: f32,
}

// SAFETY: mirrors the struct of the same name in heads.cu.
unsafe impl KernelArg for HeadParams {}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatedParams {
    x: u64,
    norm: u64,
    gate: u64,
    rows: i32,
    groups: i32,
    width: i32,
    act: i32,
    rows_per_slice: i32,
    eps: f32,
}

// SAFETY: mirrors the struct of the same name in gated.cu.
unsafe impl KernelArg for GatedParams {}

/// Threads of a block, at most.
const THREADS: usize = 256;

/// How the heads of all rows are dealt out to blocks.
struct Division {
    variant: Variant,
    heads_per_block: usize,
    head_blocks: usize,
    rows_per_slice: usize,
    slices: usize,
}

impl Division {
    fn new(dtype: DType, head_dim: usize, heads: usize, rows: usize, backward: bool) -> Self {
        let variant = Variant::heads(dtype, head_dim);
        let heads_per_block = heads.min(THREADS / variant.lanes);
        // Sums for the weights leave a block once per slice: longer slices write less. But there must be
        // enough of them for every multiprocessor, several times over.
        // Forward there are no such sums; four rows are what a thread reads ahead.
        let longest = if backward { 16 } else { 4 };
        let rows_per_slice = (rows / 2048).clamp(1, longest);
        Division {
            variant,
            heads_per_block,
            head_blocks: heads.div_ceil(heads_per_block),
            rows_per_slice,
            slices: rows.div_ceil(rows_per_slice),
        }
    }

    /// Whole warps.
    fn threads(&self) -> usize {
        (self.heads_per_block * self.variant.lanes).next_multiple_of(32)
    }

    /// A head in f32 for each head of the block: how RoPE's pairs meet.
    fn shared(&self) -> usize {
        let Variant { lanes, chunks, vec, .. } = self.variant;
        4 * self.threads() / lanes * lanes * chunks * vec
    }

    fn op<'a>(&self, source: Source, entry: &'static str, args: &'a [Arg]) -> Op<'a> {
        Op {
            source,
            entry,
            variant: self.variant,
            grid: [self.slices, self.head_blocks],
            block: self.threads(),
            shared: 0,
            args,
        }
    }
}

/// Operands of `prepare_heads` on their way to the kernel.
struct HeadOperands<'a> {
    operands: [Option<Operand<'a>>; 4],
    params: HeadParams,
    // Keeps the tables alive until the launch.
    _tables: (std::sync::Arc<Buffer<i32>>, Option<std::sync::Arc<Buffer<f32>>>),
}

impl Cuda {
    fn head_operands<'a>(
        &self,
        inputs: &HeadInputs<'a>,
        spec: &HeadSpec,
        division: &Division,
    ) -> Result<HeadOperands<'a>> {
        let rows = inputs.u.rows();
        let info = self.row_table(&spec.segments, rows)?;
        let rope = match spec.rope {
            Some(rope) => Some(self.rope_table(rope, spec.head_dim, &spec.segments)?),
            None => None,
        };
        let operands = [
            Some(self.activation(inputs.u)?),
            inputs.shift.map(|x| self.real(x)).transpose()?,
            inputs.prev.map(|x| self.activation(x)).transpose()?,
            inputs.norm.map(|x| self.real(x)).transpose()?,
        ];
        let shared = inputs.norm.is_some_and(|w| w.len() == spec.head_dim);
        let params = HeadParams {
            u: address(&operands[0]),
            shift: address(&operands[1]),
            prev: address(&operands[2]),
            norm: address(&operands[3]),
            rope: rope.as_ref().map_or(0, |table| table.address()),
            info: info.address(),
            rows: int(rows),
            heads: int(spec.heads),
            head_dim: int(spec.head_dim),
            shared_norm: i32::from(shared),
            rows_per_slice: int(division.rows_per_slice),
            unused: 0,
            eps: spec.norm_eps,
        };
        Ok(HeadOperands { operands, params, _tables: (info, rope) })
    }

    pub(super) fn prepare_forward(
        &self,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<Tensor> {
        let dtype = self.activations();
        let rows = inputs.u.rows();
        let division = Division::new(dtype, spec.head_dim, spec.heads, rows, false);
        let (y, at) = self.output(inputs.u.shape(), dtype, inputs.u.device())?;
        let held = self.head_operands(inputs, spec, &division)?;
        let args = [at.into()];
        let op = division.op(Source::HEADS, "prepare_heads_fwd", &args);
        let shared = if spec.rope.is_some() { division.shared() } else { 0 };
        self.launch_with(&op, shared, &held.params)?;
        drop(held.operands);
        Ok(y)
    }

    pub(super) fn prepare_backward(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads> {
        let (rows, device, dtype) = (inputs.u.rows(), inputs.u.device(), self.activations());
        let division = Division::new(dtype, spec.head_dim, spec.heads, rows, true);
        let (du, du_at) = self.output(inputs.u.shape(), dtype, device)?;
        let dshift = match inputs.shift {
            Some(shift) => Some(self.output(shift.shape(), DType::F32, device)?),
            None => None,
        };
        let width = spec.heads * spec.head_dim;
        let partial = match inputs.norm {
            Some(_) => Some(self.gpu.alloc::<f32>(division.slices * width)?),
            None => None,
        };
        let held = self.head_operands(inputs, spec, &division)?;
        let dy = self.activation(dy)?;
        let args = [
            du_at.into(),
            dshift.as_ref().map_or(0, |(_, at)| *at).into(),
            partial.as_ref().map_or(0, Buffer::address).into(),
            dy.address().into(),
        ];
        let entry = match (inputs.shift, inputs.norm) {
            (None, None) => "prepare_heads_bwd",
            (None, Some(_)) => "prepare_heads_bwd_norm",
            (Some(_), None) => "prepare_heads_bwd_shift",
            (Some(_), Some(_)) => "prepare_heads_bwd_shift_norm",
        };
        let op = division.op(Source::HEADS, entry, &args);
        let shared = if spec.rope.is_some() { division.shared() } else { 0 };
        self.launch_with(&op, shared, &held.params)?;
        drop(held.operands);
        let dnorm = match (inputs.norm, partial) {
            (Some(norm), Some(partial)) => {
                Some(self.head_weights(&partial, division.slices, width, norm.len(), device)?)
            }
            _ => None,
        };
        Ok(HeadGrads { du, dshift: dshift.map(|(dshift, _)| dshift), dnorm })
    }

    /// Sums over slices, and over heads where they share the weights.
    fn head_weights(
        &self,
        partial: &Buffer<f32>,
        slices: usize,
        width: usize,
        len: usize,
        device: &Device,
    ) -> Result<Tensor> {
        let sums = self.column_sums(partial.address(), DType::F32, slices, width, None, device)?;
        if len == width {
            return Ok(sums);
        }
        let at = self.real(&sums)?.address();
        self.column_sums(at, DType::F32, width / len, len, None, device)
    }

    pub(super) fn gated_forward(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        let dtype = self.activations();
        let (y, at) = self.output(inputs.x.shape(), dtype, inputs.x.device())?;
        let division = gated_division(dtype, inputs, false);
        let (x, norm, gate) = self.gated_operands(inputs)?;
        let args = [at.into()];
        let op = division.op(Source::GATED, "gated_norm_fwd", &args);
        self.launch_with(&op, 0, &gated_params(inputs, &division, &x, &norm, &gate))?;
        Ok(y)
    }

    pub(super) fn gated_backward(
        &self,
        dy: &Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<HeadGrads> {
        let dy = self.activation(dy)?;
        self.gated_gradients(dy.address(), 0, inputs)
    }

    /// With the output once more, in the place of `dy` if that is free.
    pub(super) fn gated_backward_again(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<(HeadGrads, Tensor)> {
        let y = self.replaced(dy)?;
        let grads = self.gated_gradients(y.from, y.to, inputs)?;
        Ok((grads, y.out))
    }

    fn gated_gradients(&self, dy: u64, y: u64, inputs: &GatedNormInputs<'_>) -> Result<HeadGrads> {
        let (width, device, dtype) = (inputs.x.cols(), inputs.x.device(), self.activations());
        let division = gated_division(dtype, inputs, true);
        let (dx, dx_at) = self.output(inputs.x.shape(), dtype, device)?;
        let dgate = match inputs.gate {
            Some(gate) => Some(self.output(gate.shape(), dtype, device)?),
            None => None,
        };
        let partial = match inputs.norm {
            Some(_) => Some(self.gpu.alloc::<f32>(division.slices * width)?),
            None => None,
        };
        let (x, norm, gate) = self.gated_operands(inputs)?;
        let args = [
            dx_at.into(),
            dgate.as_ref().map_or(0, |(_, at)| *at).into(),
            y.into(),
            partial.as_ref().map_or(0, Buffer::address).into(),
            dy.into(),
        ];
        let op = division.op(Source::GATED, "gated_norm_bwd", &args);
        self.launch_with(&op, 0, &gated_params(inputs, &division, &x, &norm, &gate))?;
        let dnorm = match partial {
            Some(partial) => {
                Some(self.head_weights(&partial, division.slices, width, width, device)?)
            }
            None => None,
        };
        Ok(HeadGrads { du: dx, dshift: dgate.map(|(dgate, _)| dgate), dnorm })
    }

    #[allow(clippy::type_complexity)]
    fn gated_operands<'a>(
        &self,
        inputs: &GatedNormInputs<'a>,
    ) -> Result<(Operand<'a>, Option<Operand<'a>>, Option<Operand<'a>>)> {
        Ok((
            self.activation(inputs.x)?,
            inputs.norm.map(|x| self.real(x)).transpose()?,
            inputs.gate.map(|x| self.activation(x)).transpose()?,
        ))
    }

    fn launch_with<P: KernelArg>(&self, op: &Op<'_>, shared: usize, params: &P) -> Result<()> {
        let kernel = self.kernel(op)?;
        let launch = kernel.launch([op.grid[0] as u32, op.grid[1] as u32, 1], op.block as u32);
        let launch = launch.shared(shared as u32).args(op.args).arg(params);
        // SAFETY: parameters as declared in heads.cu and gated.cu; the tape checked the shapes.
        unsafe { launch.run(|| format!("{:?} in {:?} blocks", op.variant, op.grid)) }
    }
}

fn gated_division(dtype: DType, inputs: &GatedNormInputs<'_>, backward: bool) -> Division {
    let (rows, width) = (inputs.x.rows(), inputs.x.cols());
    Division::new(dtype, width / inputs.groups, inputs.groups, rows, backward)
}

fn gated_params(
    inputs: &GatedNormInputs<'_>,
    division: &Division,
    x: &Operand<'_>,
    norm: &Option<Operand<'_>>,
    gate: &Option<Operand<'_>>,
) -> GatedParams {
    GatedParams {
        x: x.address(),
        norm: address(norm),
        gate: address(gate),
        rows: int(inputs.x.rows()),
        groups: int(inputs.groups),
        width: int(inputs.x.cols()),
        act: activation_code(inputs.act),
        rows_per_slice: int(division.rows_per_slice),
        eps: inputs.eps,
    }
}

pub(super) fn activation_code(act: Activation) -> i32 {
    match act {
        Activation::Sigmoid => 0,
        Activation::Silu => 1,
    }
}
