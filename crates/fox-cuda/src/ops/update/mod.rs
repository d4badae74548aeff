//! Optimizer ops: AdamW, blends and sums of squares, each one multi-tensor launch.

use fox_tensor::{AdamW, Blend, DType, ParamUpdate, Tensor, UpdateOps};
use half::bf16;

use crate::backend::launcher::{Op, Variant};
use crate::backend::storage::{Data, expect_f32, memory};
use crate::backend::{Cuda, Operand};
use crate::ops::packed::Packed;
use crate::params::{self, ConstPtr, KernelParams, Ptr, kernel_params};
use crate::source::source;
use crate::{Result, Source};

const UPDATE: Source = source!(
    "update",
    [],
    [AdamParams, AdamEntry, BlendEntry, SquaresEntry, AdamWAll, BlendAll, SumSquares, SumDoubles]
);

kernel_params! {
    /// A step of AdamW.
    table struct AdamParams {
        lr: f32,
        beta1: f32,
        beta2: f32,
        eps: f32,
        decay: f32,
        scale: f32,
        /// `1 / (1 - beta^step)`.
        correct1: f32,
        correct2: f32,
    }

    /// A parameter, its moments and its gradient.
    table struct AdamEntry {
        param: Ptr<f32>,
        m: Ptr<f32>,
        v: Ptr<f32>,
        /// In bf16, or null.
        copy: Ptr<bf16>,
        grad: ConstPtr<f32>,
        count: u64,
        /// Number of its first chunk.
        first: usize,
        /// Whether the parameter is stored as two halves; see [`Data::Halves`].
        halves: bool,
        step: AdamParams,
    }

    /// `param = keep * param + add * x`.
    table struct BlendEntry {
        param: Ptr<f32>,
        /// In bf16, or null.
        copy: Ptr<bf16>,
        x: ConstPtr<f32>,
        count: u64,
        /// Number of its first chunk.
        first: usize,
        /// Whether the parameter, and whether `x`, is stored as two halves.
        halves: bool,
        x_halves: bool,
        keep: f32,
        add: f32,
        unused: i32,
    }

    /// A tensor whose squares are summed.
    table struct SquaresEntry {
        x: ConstPtr<()>,
        count: u64,
        /// Number of its first chunk.
        first: usize,
        /// f32, bf16 or two halves.
        kind: i32,
    }

    list struct AdamWAll {
        entries: ConstPtr<AdamEntry>,
        count: usize,
    }

    list struct BlendAll {
        entries: ConstPtr<BlendEntry>,
        count: usize,
    }

    list struct SumSquares {
        /// `[chunks]`.
        partial: Ptr<f64>,
        entries: ConstPtr<SquaresEntry>,
        count: usize,
    }

    list struct SumDoubles {
        /// `[1]`.
        out: Ptr<f64>,
        /// `[count]`.
        x: ConstPtr<f64>,
        count: usize,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    vec![(UPDATE, Variant::plain(DType::F32, 1).defines())]
}

/// Threads of a block of these kernels.
const THREADS: usize = 256;
/// Elements per thread block.
const CHUNK: usize = 16 * 1024;

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
    /// Sum of squares of each group of tensors. Synchronizes, because the host reads the result.
    pub(crate) fn squares(&self, groups: &[&[&Tensor]]) -> Result<Vec<f64>> {
        let (mut entries, mut chunks) = (Vec::new(), 0);
        let mut ends = Vec::with_capacity(groups.len());
        for group in groups {
            self.square_entries(group, &mut entries, &mut chunks)?;
            ends.push(chunks);
        }
        if chunks == 0 {
            return Ok(vec![0.0; groups.len()]);
        }
        let partial = self.gpu.alloc::<f64>(chunks)?;
        let out = self.gpu.alloc::<f64>(groups.len())?;
        let table = self.gpu.upload(&params::rows("sum_squares", &entries)?)?;
        let (partial_at, count) = (partial.address(), entries.len());
        let params =
            SumSquares { partial: partial_at.into(), entries: table.address().into(), count };
        // SAFETY: the tables name the tensors of this call with their lengths.
        unsafe { self.launch_chunks("sum_squares", chunks, params)? };
        let mut first = 0;
        for (i, end) in ends.into_iter().enumerate() {
            let at = |base: u64, index: usize| base + (index * size_of::<f64>()) as u64;
            let (out, x) = (at(out.address(), i).into(), at(partial_at, first).into());
            let params = SumDoubles { out, x, count: end - first };
            // SAFETY: the sums of these chunks lie inside `x`, and `out` has one value per group.
            unsafe { self.launch_chunks("sum_f64", 1, params)? };
            first = end;
        }
        self.gpu.download(&out)
    }

    fn square_entries(
        &self,
        tensors: &[&Tensor],
        entries: &mut Vec<SquaresEntry>,
        chunks: &mut usize,
    ) -> Result<()> {
        for x in tensors {
            let data = &memory(x)?.data;
            if let Data::Packed(_) = data {
                return Err(Packed::refusal());
            }
            entries.push(SquaresEntry {
                x: data.address().into(),
                count: x.len() as u64,
                first: *chunks,
                kind: match data {
                    Data::Bf16(_) => 1,
                    Data::Halves(_) => 2,
                    _ => 0,
                },
            });
            *chunks += x.len().div_ceil(CHUNK);
        }
        Ok(())
    }

    /// # Safety
    /// The addresses in `params` and in its tables must be those of live tensors of the lengths they name.
    unsafe fn launch_chunks<P: KernelParams>(
        &self,
        entry: &'static str,
        chunks: usize,
        params: P,
    ) -> Result<()> {
        let op = Op::new(UPDATE, entry, Variant::plain(DType::F32, 1), [chunks, 1], THREADS);
        // SAFETY: the caller's promise.
        unsafe { self.launch(&op, params) }
    }
}

impl UpdateOps for Cuda {
    fn sum_squares(&self, tensors: &[&Tensor]) -> fox_tensor::Result<f64> {
        fox_tensor::check_sum_squares(self, tensors)?;
        let sums = self.timed("sum_squares", || self.squares(&[tensors]))?;
        Ok(sums.first().copied().unwrap_or(0.0))
    }

    fn sum_squares_each(&self, tensors: &[&Tensor]) -> fox_tensor::Result<Vec<f64>> {
        fox_tensor::check_sum_squares(self, tensors)?;
        let each: Vec<&[&Tensor]> = tensors.iter().map(std::slice::from_ref).collect();
        Ok(self.timed("sum_squares", || self.squares(&each))?)
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> fox_tensor::Result<()> {
        fox_tensor::check_adamw(self, param, grad, m, v)?;
        self.adamw_all(&mut [ParamUpdate { param, grad, m, v, step: *step }])
    }

    fn adamw_all(&self, updates: &mut [ParamUpdate<'_>]) -> fox_tensor::Result<()> {
        fox_tensor::check_adamw_all(self, updates)?;
        for ParamUpdate { param, m, v, .. } in updates.iter() {
            for (what, x) in [("param", param), ("m", m), ("v", v)] {
                expect_f32("adamw", what, x)?;
            }
        }
        let _span = self.span("adamw")?;
        let (mut entries, mut grads) = (Vec::with_capacity(updates.len()), Vec::new());
        let mut chunks = 0;
        for u in updates.iter_mut() {
            let count = u.param.len();
            let held = self.unshared(u.param)?;
            // The kernel updates the bf16 copy along with the parameter.
            let copy = held.narrow_copy();
            let grad = self.real(u.grad)?;
            entries.push(AdamEntry {
                param: held.data.address().into(),
                m: self.writable(u.m)?.write().address().into(),
                v: self.writable(u.v)?.write().address().into(),
                copy: copy.map_or(0, |copy| copy.address()).into(),
                grad: grad.address().into(),
                count: count as u64,
                first: chunks,
                halves: matches!(held.data, Data::Halves(_)),
                step: AdamParams::new(&u.step),
            });
            grads.push(grad);
            chunks += count.div_ceil(CHUNK);
        }
        let table = self.gpu.upload(&params::rows("adamw", &entries)?)?;
        let params = AdamWAll { entries: table.address().into(), count: entries.len() };
        // SAFETY: the tables name the tensors of this call with their lengths.
        unsafe { self.launch_chunks("adamw", chunks, params)? };
        Ok(())
    }

    fn blend(&self, blends: &mut [Blend<'_>]) -> fox_tensor::Result<()> {
        fox_tensor::check_blend(self, blends)?;
        let _span = self.span("blend")?;
        let (mut entries, mut added) = (Vec::with_capacity(blends.len()), Vec::new());
        let mut chunks = 0;
        for blend in blends.iter_mut() {
            let (keep, add) = blend.factors();
            let (x, y) = blend.pair();
            let count = y.len();
            let x_halves = matches!(memory(x)?.data, Data::Halves(_));
            // The kernel reads two halves directly.
            let x = if x_halves { Operand::Own(&memory(x)?.data) } else { self.real(x)? };
            let held = self.unshared(y)?;
            if held.data.dtype() != DType::F32 {
                return Err(fox_tensor::Error::argument("blend", "the parameter must be f32"));
            }
            entries.push(BlendEntry {
                param: held.data.address().into(),
                // Updated along with the parameter, as by AdamW.
                copy: held.narrow_copy().map_or(0, |copy| copy.address()).into(),
                x: x.address().into(),
                count: count as u64,
                first: chunks,
                halves: matches!(held.data, Data::Halves(_)),
                x_halves,
                keep,
                add,
                unused: 0,
            });
            added.push(x);
            chunks += count.div_ceil(CHUNK);
        }
        if chunks == 0 {
            return Ok(());
        }
        let table = self.gpu.upload(&params::rows("blend", &entries)?)?;
        let params = BlendAll { entries: table.address().into(), count: entries.len() };
        // SAFETY: the tables name the tensors of this call with their lengths.
        unsafe { self.launch_chunks("blend", chunks, params)? };
        Ok(())
    }
}
