//! Parameter updates of optimizers.

use crate::cases::{Args, Case, Output, round};
use crate::check::Operands;
use crate::naive::{Naive, Values, dot, real, values_mut};
use crate::{Backend, DType, Result, Tape, Tensor, WeightFormat};

/// One decoupled AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay; 0 for parameters without decay.
    pub weight_decay: f32,
    /// Number of this update, counted from 1, for bias correction.
    pub step: u64,
    /// Factor applied to the gradient first (clipping).
    pub grad_scale: f32,
}

/// A parameter, its gradient and its moments, all of one shape, and the update to make.
#[derive(Debug)]
pub struct ParamUpdate<'a> {
    /// The parameter.
    pub param: &'a mut Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Running mean of the gradient.
    pub m: &'a mut Tensor,
    /// Running mean of its square.
    pub v: &'a mut Tensor,
    /// Hyperparameters of this update.
    pub step: AdamW,
}

/// `y = keep * y + add * x`, element by element: momentum, moving averages, steps along a direction.
#[derive(Debug)]
pub struct Blend<'a> {
    y: &'a mut Tensor,
    x: &'a Tensor,
    keep: f32,
    add: f32,
}

impl<'a> Blend<'a> {
    /// # Errors
    /// Shapes that differ, integers, tensors of two devices.
    pub fn new(y: &'a mut Tensor, x: &'a Tensor, keep: f32, add: f32) -> Result<Self> {
        const OP: &str = "blend";
        y.expect_real(OP, "y")?;
        x.expect_real(OP, "x")?;
        x.expect_shape(OP, "x", y.dims())?;
        x.expect_device(OP, "x", y.device())?;
        Ok(Blend { y, x, keep, add })
    }

    /// `x`, which is added, and `y`, which is updated.
    pub fn pair(&mut self) -> (&Tensor, &mut Tensor) {
        (self.x, self.y)
    }

    /// `keep` and `add`.
    pub fn factors(&self) -> (f32, f32) {
        (self.keep, self.add)
    }
}

/// Parameter updates on a device.
pub trait UpdateOps {
    /// Sum of squares over all tensors, in f64 and in fixed order.
    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64>;
    /// The sum of squares of each tensor, with the bits of [`UpdateOps::sum_squares`] of that one alone.
    fn sum_squares_each(&self, tensors: &[&Tensor]) -> Result<Vec<f64>> {
        tensors.iter().map(|tensor| self.sum_squares(&[tensor])).collect()
    }
    /// One AdamW update of `param` and its moments.
    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()>;

    /// `adamw` of many parameters, in one kernel launch where the device has kernels.
    fn adamw_all(&self, updates: &mut [ParamUpdate<'_>]) -> Result<()> {
        for u in updates {
            self.adamw(u.param, u.grad, u.m, u.v, &u.step)?;
        }
        Ok(())
    }

    /// Runs all `blends`, in one kernel launch where the device has kernels. No tensor is written by one of them and
    /// read by another. A shared `y` is copied first.
    fn blend(&self, blends: &mut [Blend<'_>]) -> Result<()>;
}

/// Validates the operands of [`UpdateOps::sum_squares`].
pub fn check_sum_squares(backend: &dyn Backend, tensors: &[&Tensor]) -> Result<()> {
    let operands = Operands::new("sum_squares", backend);
    tensors.iter().try_for_each(|x| operands.plain("input", x))
}

/// Validates the operands of [`UpdateOps::adamw`].
pub fn check_adamw(
    backend: &dyn Backend,
    param: &Tensor,
    grad: &Tensor,
    m: &Tensor,
    v: &Tensor,
) -> Result<()> {
    let operands = Operands::new("adamw", backend);
    operands.plain("param", param)?;
    for (what, x) in [("grad", grad), ("m", m), ("v", v)] {
        operands.real(what, x, param.dims())?;
    }
    Ok(())
}

/// Validates the operands of [`UpdateOps::adamw_all`].
pub fn check_adamw_all(backend: &dyn Backend, updates: &[ParamUpdate<'_>]) -> Result<()> {
    updates.iter().try_for_each(|u| check_adamw(backend, u.param, u.grad, u.m, u.v))
}

/// Validates the operands of [`UpdateOps::blend`].
pub fn check_blend(backend: &dyn Backend, blends: &[Blend<'_>]) -> Result<()> {
    let operands = Operands::new("blend", backend);
    for blend in blends {
        operands.plain("y", blend.y)?;
        operands.real("x", blend.x, blend.y.dims())?;
    }
    Ok(())
}

impl UpdateOps for Naive {
    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        check_sum_squares(self, tensors)?;
        tensors.iter().map(|x| real(x).map(|x| dot(x, x))).sum()
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        check_adamw(self, param, grad, m, v)?;
        for x in [&mut *param, &mut *m, &mut *v] {
            self.unshare(x)?;
        }
        if let (Values::Real(p), Values::Real(m), Values::Real(v)) =
            (values_mut(param)?, values_mut(m)?, values_mut(v)?)
        {
            adamw_step(p, real(grad)?, m, v, step);
        }
        Ok(())
    }

    fn blend(&self, blends: &mut [Blend<'_>]) -> Result<()> {
        check_blend(self, blends)?;
        for blend in blends {
            let (keep, add) = blend.factors();
            let (x, y) = blend.pair();
            self.unshare(y)?;
            if let Values::Real(y) = values_mut(y)? {
                for (y, x) in y.iter_mut().zip(real(x)?) {
                    *y = f64::from(keep) * *y + f64::from(add) * x;
                }
            }
        }
        Ok(())
    }
}

/// One update of parameters, first and second moments.
fn adamw_step(p: &mut [f64], grad: &[f64], m: &mut [f64], v: &mut [f64], step: &AdamW) {
    let [lr, beta1, beta2, eps, decay, scale] =
        [step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_scale]
            .map(f64::from);
    let (correct1, correct2) =
        (1.0 - beta1.powf(step.step as f64), 1.0 - beta2.powf(step.step as f64));
    for i in 0..p.len() {
        let g = scale * grad[i];
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        let direction = (m[i] / correct1) / ((v[i] / correct2).sqrt() + eps);
        p[i] -= lr * (direction + decay * p[i]);
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(1, 1), (113, 7), (799, 3)] {
        cases.extend([
            adamw_case(rows, cols, 0.0, 1.0, false),
            adamw_case(rows, cols, 0.1, 0.37, false),
        ]);
    }
    cases.push(adamw_case(72, 40, 0.1, 1.0, true));
    cases.push(
        Case::new("sum_squares/several", run_sum_squares)
            .constant("a", &[1], vec![3.0])
            .constant("b", &[799, 3], (0..2397).map(|i| round(f64::from(i).sin())).collect())
            .constant("c", &[113, 203], (0..22939).map(|i| round(f64::from(i).cos())).collect()),
    );
    cases.extend([(1, 1), (113, 7), (72, 40)].map(|(rows, cols)| blends(rows, cols)));
    cases
}

/// Several tensors at once; weights, as changed and as added, in the format that the device trains in.
fn blends(rows: usize, cols: usize) -> Case {
    let case = Case::new(format!("blend/several/{rows}x{cols}"), |tape, args| {
        let backend = tape.device().backend();
        let (x, z) = (args.tensor("x")?, args.tensor("z")?);
        // Shared with the input, which must not move.
        let mut average = x.clone();
        let mut weight = x.packed(WeightFormat::F32)?;
        let mut plain = z.clone();
        for step in 1..=3 {
            let step = step as f32;
            let added = weight.clone();
            backend.blend(&mut [
                Blend::new(&mut average, &added, 0.9, 0.1)?,
                Blend::new(&mut weight, z, 1.0 - 0.01 * step, -0.3 * step)?,
                Blend::new(&mut plain, x, 0.0, 1.0)?,
            ])?;
        }
        backend.blend(&mut [])?;
        let squares = backend.sum_squares(&[&weight])?;
        Ok(vec![
            Output::Plain("average", average.to_f64()?),
            Output::Plain("weight", weight.to_f64()?),
            Output::Plain("plain", plain.to_f64()?),
            Output::Plain("x", x.to_f64()?),
            Output::Plain("squares", vec![squares]),
        ])
    });
    let [x, z] = ["x", "z"].map(|name| case.rng(name).normals(rows * cols));
    case.constant("x", &[rows, cols], x).constant("z", &[rows, cols], z)
}

/// With `packed`, the parameter is kept as the device likes weights best.
fn adamw_case(rows: usize, cols: usize, weight_decay: f32, grad_scale: f32, packed: bool) -> Case {
    let kind = if packed { "packed" } else { "plain" };
    let name = format!("adamw/{kind}/decay {weight_decay}/{rows}x{cols}");
    let case = Case::new(name, move |tape, args| {
        let backend = tape.device().backend();
        let mut p = args.tensor("p")?.clone();
        if packed {
            p = p.packed(WeightFormat::F32)?;
        }
        let before = p.clone();
        let mut m = tape.device().zeros(p.shape(), DType::F32)?;
        let mut v = tape.device().zeros(p.shape(), DType::F32)?;
        for step in 1..=5 {
            let grads = args.tensor("grads")?;
            let grad = grads.slice_rows((step - 1) * rows, rows)?;
            let update = AdamW {
                lr: 0.01 * step as f32,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay,
                step: step as u64,
                grad_scale,
            };
            backend.adamw(&mut p, &grad, &mut m, &mut v, &update)?;
        }
        Ok(vec![
            Output::Plain("p", p.to_f64()?),
            Output::Plain("m", m.to_f64()?),
            Output::Plain("v", v.to_f64()?),
            // The parameter was shared with the input, which must not have moved.
            Output::Plain("p before", before.to_f64()?),
            Output::Plain("p's squares", vec![backend.sum_squares(&[&p])?]),
            Output::Plain("p's last row", p.slice_rows(rows - 1, 1)?.to_f64()?),
        ])
    });
    let grads = case.rng("grads").normals(5 * rows * cols);
    let p = case.rng("p").normals(rows * cols);
    case.constant("p", &[rows, cols], p).constant("grads", &[5 * rows, cols], grads)
}

fn run_sum_squares(tape: &mut Tape<'static>, args: &Args<'_>) -> Result<Vec<Output>> {
    let backend = tape.device().backend();
    let (a, b, c) = (args.tensor("a")?, args.tensor("b")?, args.tensor("c")?);
    Ok(vec![
        Output::Plain("none", vec![backend.sum_squares(&[])?]),
        Output::Plain("one", vec![backend.sum_squares(&[a])?]),
        Output::Plain("all", vec![backend.sum_squares(&[a, b, c])?]),
    ])
}
