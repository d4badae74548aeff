//! The optimizer's ops.

use fox_tensor::{AdamW, DType, Tensor};

use super::Cuda;
use super::launcher::{Op, Variant};
use super::storage::memory;
use crate::{KernelArg, Result, Source};

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

// SAFETY: mirrors the struct of the same name in update.cu.
unsafe impl KernelArg for AdamParams {}

/// Threads of a block of these kernels.
const THREADS: usize = 256;
/// Partial sums of squares per tensor, at most.
const PARTS: usize = 256;

impl Cuda {
    pub(super) fn adamw_step(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        let count = param.len();
        let held = self.writable(param)?;
        // The copy for products is written along with the parameter, so it stays valid.
        let copy = held.narrow_copy();
        let at = held.data.address();
        let m = self.writable(m)?.write().address();
        let v = self.writable(v)?.write().address();
        let grad = self.real(grad)?;
        let correct = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(step.step as f64))) as f32;
        let params = AdamParams {
            lr: step.lr,
            beta1: step.beta1,
            beta2: step.beta2,
            eps: step.eps,
            decay: step.weight_decay,
            scale: step.grad_scale,
            correct1: correct(step.beta1),
            correct2: correct(step.beta2),
        };
        let args = [
            at.into(),
            m.into(),
            v.into(),
            copy.as_ref().map_or(0, |copy| copy.address()).into(),
            grad.address().into(),
            count.into(),
        ];
        let variant = Variant::wide(DType::F32, count);
        let blocks = count.div_ceil(variant.vec * THREADS).min(self.gpu.processors() as usize * 16);
        let op = Op {
            source: Source::UPDATE,
            entry: "adamw",
            variant,
            grid: [blocks, 1],
            block: THREADS,
            shared: 0,
            args: &args,
        };
        let kernel = self.kernel(&op)?;
        let launch = kernel.launch([blocks as u32, 1, 1], THREADS as u32);
        // SAFETY: parameters as declared in update.cu; all have the parameter's length.
        unsafe { launch.args(&args).arg(&params).run(|| format!("{count} parameters")) }
    }

    /// Waits for the result: the host decides by it.
    pub(super) fn squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        let blocks = |x: &Tensor| x.len().div_ceil(8 * THREADS).clamp(1, PARTS);
        let parts: usize = tensors.iter().map(|x| blocks(x)).sum();
        if parts == 0 {
            return Ok(0.0);
        }
        let partial = self.gpu.alloc::<f64>(parts)?;
        let out = self.gpu.alloc::<f64>(1)?;
        let mut at = partial.address();
        for x in tensors {
            let data = &memory(x)?.data;
            let args = [at.into(), data.address().into(), x.len().into()];
            let variant = Variant::wide(data.dtype(), x.len());
            self.reduce("sum_squares", variant, blocks(x), &args)?;
            at += 8 * blocks(x) as u64;
        }
        let args = [out.address().into(), partial.address().into(), super::int(parts).into()];
        self.reduce("sum_f64", Variant::plain(DType::F32, 1), 1, &args)?;
        Ok(self.gpu.download(&out)?.first().copied().unwrap_or(0.0))
    }

    fn reduce(
        &self,
        entry: &'static str,
        variant: Variant,
        blocks: usize,
        args: &[crate::launch::Arg],
    ) -> Result<()> {
        let op = Op {
            source: Source::UPDATE,
            entry,
            variant,
            grid: [blocks, 1],
            block: THREADS,
            shared: 0,
            args,
        };
        // SAFETY: parameters as declared in update.cu; room for one number per block.
        unsafe { self.launch(&op) }
    }
}
