//! Addition to the residual stream, `h' = h + delta`, and its RMS norm.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Matrix, Naive, matrix, maybe_matrix, real, rms_backward, rstd};
use crate::tape::{Saved, Tape, Var, slot_of, wants};
use crate::{Backend, Result, Tensor};

/// Operands of `add_rms_norm`: `h' = h + delta`, `y = h' / sqrt(mean(h'^2) + eps) * w`.
#[derive(Clone, Copy, Debug)]
pub struct NormInputs<'a> {
    /// The residual stream `[R, C]`.
    pub h: &'a Tensor,
    /// Added to the residual stream before the norm `[R, C]`.
    pub delta: Option<&'a Tensor>,
    /// Weights `[C]`.
    pub w: &'a Tensor,
    /// Epsilon inside the square root.
    pub eps: f32,
}

/// Result of `add_rms_norm`.
#[derive(Clone, Debug)]
pub struct NormOut {
    /// `h'` `[R, C]`; without `delta`, `h` itself.
    pub sum: Tensor,
    /// `y` `[R, C]`.
    pub y: Tensor,
    /// `1 / sqrt(mean(h'^2) + eps)` of every row `[R]`.
    pub rstd: Tensor,
}

/// Saved tensors of `add_rms_norm` that its backward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct NormSaved<'a> {
    /// [`NormOut::sum`] `[R, C]`.
    pub sum: &'a Tensor,
    /// [`NormOut::rstd`] `[R]`.
    pub rstd: &'a Tensor,
    /// Weights `[C]`.
    pub w: &'a Tensor,
    /// Epsilon inside the square root.
    pub eps: f32,
}

/// Gradients of `add_rms_norm`.
#[derive(Clone, Debug)]
pub struct NormGrads {
    /// Of `h` and of `delta` alike `[R, C]`: `dy` through the norm plus the gradient of `h'`.
    pub dh: Tensor,
    /// `[C]`.
    pub dw: Tensor,
}

/// RMS norm of the residual stream on a device.
pub trait NormOps {
    /// The sum and its norm; see [`NormInputs`].
    fn add_rms_norm_fwd(&self, inputs: &NormInputs<'_>) -> Result<NormOut>;
    /// Gradients from those of `y` and, if there is one, of `h'`; `dw` is added to `dw_acc`.
    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> Result<NormGrads>;
}

/// Validates the operands of [`NormOps::add_rms_norm_fwd`].
pub fn check_add_rms_norm_fwd(backend: &dyn Backend, inputs: &NormInputs<'_>) -> Result<()> {
    let operands = Operands::new("add_rms_norm", backend);
    let (_, width) = operands.matrix("h", inputs.h)?;
    operands.require(width > 0, || "h has no columns".into())?;
    operands.real("weight", inputs.w, &[width])?;
    operands.maybe("delta", inputs.delta, inputs.h.dims())
}

/// Validates the operands of [`NormOps::add_rms_norm_bwd`].
pub fn check_add_rms_norm_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    dsum: Option<&Tensor>,
    saved: &NormSaved<'_>,
    dw_acc: Option<&Tensor>,
) -> Result<()> {
    let operands = Operands::new("add_rms_norm_bwd", backend);
    let (rows, width) = operands.matrix("sum", saved.sum)?;
    operands.require(width > 0, || "sum has no columns".into())?;
    operands.real("dy", dy, saved.sum.dims())?;
    operands.maybe("dsum", dsum, saved.sum.dims())?;
    operands.real("rstd", saved.rstd, &[rows])?;
    operands.real("weight", saved.w, &[width])?;
    operands.maybe("dw_acc", dw_acc, &[width])
}

impl Tape<'_> {
    /// `h' = h + delta` and its RMS norm: `(h', y)`, both `[R, C]`, for weights `w[C]`.
    pub fn add_rms_norm(
        &mut self,
        h: &Var,
        delta: Option<&Var>,
        w: &Var,
        eps: f32,
    ) -> Result<(Var, Var)> {
        let inputs = NormInputs { h: h.value(), delta: delta.map(Var::value), w: w.value(), eps };
        let result = self.device.backend().add_rms_norm_fwd(&inputs)?;
        let needs_grad = h.needs_grad() || w.needs_grad() || wants(delta);
        let again = (result.sum.clone(), w.value.clone());
        let sum = self.output(result.sum, needs_grad);
        let y = self.cheap_output(result.y, needs_grad, true, move |device| {
            let inputs = NormInputs { h: &again.0, delta: None, w: &again.1, eps };
            Ok(device.backend().add_rms_norm_fwd(&inputs)?.y)
        });
        let (h_slot, d_slot, w_slot) = (h.slot, slot_of(delta), w.slot);
        let (sum_slot, y_slot, own) = (sum.slot, y.slot, y.again.clone());
        let (device, h, w) = (self.device.clone(), sum.value.clone(), w.value.clone());
        self.push(move |flow| {
            let deferred = own.map_or_else(Vec::new, Saved::take_deferred);
            let dsum = flow.take(sum_slot);
            let Some(dy) = flow.take(y_slot) else {
                let Some(dh) = dsum else { return Ok(()) };
                flow.add(d_slot, dh.clone())?;
                return flow.add(h_slot, dh);
            };
            let (acc, saved) =
                (flow.take(w_slot), NormSaved { sum: &h, rstd: &result.rstd, w: &w, eps });
            let grads = if deferred.is_empty() {
                device.backend().add_rms_norm_bwd(&dy, dsum, &saved, acc)?
            } else {
                let again = device.recompute_ops()?;
                let (grads, y) = again.add_rms_norm_bwd_with_output(&dy, dsum, &saved, acc)?;
                flow.run_deferred(deferred, &y)?;
                grads
            };
            flow.put(w_slot, grads.dw);
            flow.add(d_slot, grads.dh.clone())?;
            flow.add(h_slot, grads.dh)
        });
        Ok((sum, y))
    }
}

impl NormOps for Naive {
    fn add_rms_norm_fwd(&self, inputs: &NormInputs<'_>) -> Result<NormOut> {
        check_add_rms_norm_fwd(self, inputs)?;
        let NormInputs { h, delta, w, eps } = *inputs;
        let (sum, y, rstd) = forward(matrix(h)?, maybe_matrix(delta)?, real(w)?, f64::from(eps));
        Ok(NormOut {
            sum: if delta.is_some() { self.like(h, sum) } else { h.clone() },
            y: self.like(h, y),
            rstd: self.tensor(h.device(), rstd, [h.rows()]),
        })
    }

    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dsum: Option<Tensor>,
        saved: &NormSaved<'_>,
        dw_acc: Option<Tensor>,
    ) -> Result<NormGrads> {
        check_add_rms_norm_bwd(self, dy, dsum.as_ref(), saved, dw_acc.as_ref())?;
        let NormSaved { sum, rstd, w, .. } = *saved;
        let dsum = maybe_matrix(dsum.as_ref())?;
        let (dh, dw) = backward(matrix(dy)?, dsum, matrix(sum)?, real(w)?, real(rstd)?);
        Ok(NormGrads { dh: self.like(sum, dh), dw: self.plus(dw_acc, self.like(w, dw))? })
    }
}

/// `(h', y, rstd)`: `h' = h + delta`, `y = h' rstd(h') w`.
fn forward(
    h: Matrix<'_>,
    delta: Option<Matrix<'_>>,
    w: &[f64],
    eps: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let sum: Vec<f64> = match delta {
        Some(delta) => h.data.iter().zip(delta.data).map(|(a, b)| a + b).collect(),
        None => h.data.to_vec(),
    };
    let (mut y, mut rstds) = (Vec::with_capacity(sum.len()), Vec::with_capacity(h.rows));
    for r in 0..h.rows {
        let row = &sum[r * h.cols..][..h.cols];
        let scale = rstd(row, eps);
        y.extend(row.iter().zip(w).map(|(x, w)| x * scale * w));
        rstds.push(scale);
    }
    (sum, y, rstds)
}

/// `(dh, dw)`; `h` is the sum that was normalised, `dsum` what comes down the residual stream.
fn backward(
    dy: Matrix<'_>,
    dsum: Option<Matrix<'_>>,
    h: Matrix<'_>,
    w: &[f64],
    rstd: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dh, mut dw) = (Vec::with_capacity(h.data.len()), vec![0.0; h.cols]);
    for r in 0..h.rows {
        let g: Vec<f64> = dy.row(r).iter().zip(w).map(|(dy, w)| dy * w).collect();
        let dx = rms_backward(h.row(r), rstd[r], &g);
        for c in 0..h.cols {
            dh.push(dx[c] + dsum.map_or(0.0, |d| d.row(r)[c]));
            dw[c] += dy.row(r)[c] * h.row(r)[c] * rstd[r];
        }
    }
    (dh, dw)
}

/// Rows and width.
const SHAPES: [(usize, usize); 6] = [(1, 1), (1, 40), (113, 203), (799, 3), (64, 64), (65, 256)];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.extend([add_rms_norm(shape, false, 1e-6), add_rms_norm(shape, true, 1e-5)]);
    }
    cases.extend([norm_only(), residual_only()]);
    cases
}

fn add_rms_norm((rows, width): (usize, usize), delta: bool, eps: f32) -> Case {
    let kind = if delta { "delta" } else { "plain" };
    let case = Case::new(format!("add_rms_norm/{kind}/{rows}x{width}"), move |tape, args| {
        let (h, w) = (args.var("h")?, args.var("w")?);
        let (sum, y) = tape.add_rms_norm(h, args.get("delta"), w, eps)?;
        Ok(vec![Output::Var("sum", sum), Output::Var("y", y)])
    });
    let case = case.normal("h", &[rows, width]).normal("w", &[width]);
    if delta { case.normal("delta", &[rows, width]) } else { case }
}

/// No gradient down the residual stream, and weights that serve twice.
fn norm_only() -> Case {
    Case::new("add_rms_norm/norm only, twice/113x40", |tape, args| {
        let (h, w) = (args.var("h")?, args.var("w")?);
        let (_, first) = tape.add_rms_norm(h, None, w, 1e-6)?;
        let (_, second) = tape.add_rms_norm(&first, Some(h), w, 1e-6)?;
        Ok(vec![Output::Var("second", second)])
    })
    .normal("h", &[113, 40])
    .normal("w", &[40])
}

/// No gradient through the norm.
fn residual_only() -> Case {
    Case::new("add_rms_norm/residual only/113x40", |tape, args| {
        let (h, delta, w) = (args.var("h")?, args.var("delta")?, args.var("w")?);
        Ok(vec![Output::Var("sum", tape.add_rms_norm(h, Some(delta), w, 1e-6)?.0)])
    })
    .normal("h", &[113, 40])
    .normal("delta", &[113, 40])
    .normal("w", &[40])
}
