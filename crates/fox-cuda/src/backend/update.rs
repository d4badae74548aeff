//! The optimizer's ops: each one launch for all parameters.

use fox_tensor::{AdamW, DType, ParamUpdate, Tensor};

use super::launcher::{Op, Variant};
use super::storage::{Data, memory};
use super::{Cuda, int};
use crate::{Result, Source};

#[repr(C)]
#[derive(Clone, Copy)]
struct AdamParams {
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
    scale: f32,
    correct1: f32,
    correct2: f32,
}

/// A parameter and what belongs to it, as `AdamEntry` in update.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AdamEntry {
    param: u64,
    m: u64,
    v: u64,
    copy: u64,
    grad: u64,
    count: u64,
    first: i32,
    halves: i32,
    step: AdamParams,
}

/// A tensor whose squares are summed, as `SquaresEntry` in update.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct SquaresEntry {
    at: u64,
    count: u64,
    first: i32,
    kind: i32,
}

// SAFETY: numbers without gaps; zeros are values.
unsafe impl bytemuck::Zeroable for AdamEntry {}
// SAFETY: as above, and so are all other bits.
unsafe impl bytemuck::Pod for AdamEntry {}
// SAFETY: numbers without gaps; zeros are values.
unsafe impl bytemuck::Zeroable for SquaresEntry {}
// SAFETY: as above, and so are all other bits.
unsafe impl bytemuck::Pod for SquaresEntry {}

/// Threads of a block of these kernels.
const THREADS: usize = 256;
/// Elements to a thread block.
const PIECE: usize = 16 * 1024;

impl AdamParams {
    fn new(step: &AdamW) -> Self {
        let correct = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(step.step as f64))) as f32;
        AdamParams {
            lr: step.lr,
            beta1: step.beta1,
            beta2: step.beta2,
            eps: step.eps,
            decay: step.weight_decay,
            scale: step.grad_scale,
            correct1: correct(step.beta1),
            correct2: correct(step.beta2),
        }
    }
}

impl Cuda {
    pub(super) fn adamw_steps(&self, updates: &mut [ParamUpdate<'_>]) -> Result<()> {
        let (mut entries, mut grads) = (Vec::with_capacity(updates.len()), Vec::new());
        let mut pieces = 0;
        for u in updates.iter_mut() {
            let count = u.param.len();
            let held = self.unshared(u.param)?;
            // The copy for products is written along with the parameter, so it stays valid.
            let copy = held.narrow_copy();
            let grad = self.real(u.grad)?;
            entries.push(AdamEntry {
                param: held.data.address(),
                m: self.writable(u.m)?.write().address(),
                v: self.writable(u.v)?.write().address(),
                copy: copy.map_or(0, |copy| copy.address()),
                grad: grad.address(),
                count: count as u64,
                first: int(pieces),
                halves: i32::from(matches!(held.data, Data::Halves(_))),
                step: AdamParams::new(&u.step),
            });
            grads.push(grad);
            pieces += count.div_ceil(PIECE);
        }
        let table = self.gpu.upload(&entries)?;
        let args = [table.address().into(), int(entries.len()).into()];
        self.launch_pieces("adamw", pieces, &args)
    }

    /// Waits for the result: the host decides by it.
    pub(super) fn squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        let (mut entries, mut pieces) = (Vec::with_capacity(tensors.len()), 0);
        for x in tensors {
            let data = &memory(x)?.data;
            entries.push(SquaresEntry {
                at: data.address(),
                count: x.len() as u64,
                first: int(pieces),
                kind: match data {
                    Data::Bf16(_) => 1,
                    Data::Halves(_) => 2,
                    _ => 0,
                },
            });
            pieces += x.len().div_ceil(PIECE);
        }
        if pieces == 0 {
            return Ok(0.0);
        }
        let partial = self.gpu.alloc::<f64>(pieces)?;
        let out = self.gpu.alloc::<f64>(1)?;
        let table = self.gpu.upload(&entries)?;
        let count = int(entries.len());
        let args = [partial.address().into(), table.address().into(), count.into()];
        self.launch_pieces("sum_squares", pieces, &args)?;
        let args = [out.address().into(), partial.address().into(), int(pieces).into()];
        self.launch_pieces("sum_f64", 1, &args)?;
        Ok(self.gpu.download(&out)?.first().copied().unwrap_or(0.0))
    }

    fn launch_pieces(
        &self,
        entry: &'static str,
        pieces: usize,
        args: &[crate::launch::Arg],
    ) -> Result<()> {
        if pieces == 0 {
            return Ok(());
        }
        let op = Op {
            source: Source::UPDATE,
            entry,
            variant: Variant::plain(DType::F32, 1),
            grid: [pieces, 1],
            block: THREADS,
            shared: 0,
            args,
        };
        // SAFETY: parameters as declared in update.cu; the tables' tensors have the lengths they say.
        unsafe { self.launch(&op) }
    }
}
