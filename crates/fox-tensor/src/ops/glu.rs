//! Gated linear units.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Act, Matrix, Naive, matrix};
use crate::tape::{Saved, Tape, Var};
use crate::{Backend, Result, Tensor};

/// Pointwise nonlinearity of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x * sigmoid(x)`, also called swish.
    Silu,
}

/// Gated linear units on a device.
pub trait GluOps {
    /// `act(g) * u` for `x = [g | u]` of shape `[R, 2 I]`.
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor>;
    /// `dx[R, 2 I]`.
    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor>;
}

/// Validates the operands of [`GluOps::glu_fwd`].
pub fn check_glu_fwd(backend: &dyn Backend, x: &Tensor) -> Result<()> {
    let operands = Operands::new("glu", backend);
    let (_, width) = operands.matrix("x", x)?;
    operands.require(width > 0 && width.is_multiple_of(2), || format!("width {width} is odd or 0"))
}

/// Validates the operands of [`GluOps::glu_bwd`].
pub fn check_glu_bwd(backend: &dyn Backend, dy: &Tensor, x: &Tensor) -> Result<()> {
    check_glu_fwd(backend, x)?;
    Operands::new("glu_bwd", backend).real("dy", dy, &[x.rows(), x.cols() / 2])
}

impl Tape<'_> {
    /// Gated linear unit: `act(g) * u` for `x = [g | u]`, `[R, 2 I]` to `[R, I]`.
    pub fn glu(&mut self, x: &Var, act: Activation) -> Result<Var> {
        let y = self.device.backend().glu_fwd(x.value(), act)?;
        let again = x.value.clone();
        let out = self.cheap_output(y, x.needs_grad(), true, move |device| {
            device.backend().glu_fwd(&again, act)
        });
        let (x_slot, out_slot, own) = (x.slot, out.slot, out.again.clone());
        let (device, x) = (self.device.clone(), x.value.clone());
        self.push(move |flow| {
            let deferred = own.map_or_else(Vec::new, Saved::take_deferred);
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            if deferred.is_empty() {
                return flow.add(x_slot, device.backend().glu_bwd(&dy, &x, act)?);
            }
            let (dx, y) = device.recompute_ops()?.glu_bwd_with_output(dy, x, act)?;
            flow.run_deferred(deferred, &y)?;
            flow.add(x_slot, dx)
        });
        Ok(out)
    }
}

impl GluOps for Naive {
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        check_glu_fwd(self, x)?;
        let y = forward(matrix(x)?, Act(act));
        Ok(self.tensor(x.device(), y, [x.rows(), x.cols() / 2]))
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        check_glu_bwd(self, dy, x)?;
        Ok(self.like(x, backward(matrix(dy)?, matrix(x)?, Act(act))))
    }
}

/// `act(g) * u` for rows `[g | u]`.
fn forward(x: Matrix<'_>, act: Act) -> Vec<f64> {
    let half = x.cols / 2;
    let mut y = Vec::with_capacity(x.rows * half);
    for r in 0..x.rows {
        let (g, u) = x.row(r).split_at(half);
        y.extend(g.iter().zip(u).map(|(&g, u)| act.value(g) * u));
    }
    y
}

/// `[dg | du]`.
fn backward(dy: Matrix<'_>, x: Matrix<'_>, act: Act) -> Vec<f64> {
    let half = x.cols / 2;
    let mut dx = Vec::with_capacity(x.data.len());
    for r in 0..x.rows {
        let ((g, u), dy) = (x.row(r).split_at(half), dy.row(r));
        dx.extend((0..half).map(|c| dy[c] * u[c] * act.slope(g[c])));
        dx.extend((0..half).map(|c| dy[c] * act.value(g[c])));
    }
    dx
}

pub(crate) fn cases() -> Vec<Case> {
    let shapes = [(1, 1), (113, 101), (799, 3), (65, 64)].into_iter();
    let both = |(rows, width)| {
        [Activation::Sigmoid, Activation::Silu].map(move |act| glu(rows, width, act))
    };
    shapes.flat_map(both).collect()
}

fn glu(rows: usize, width: usize, act: Activation) -> Case {
    let case = Case::new(format!("glu/{act:?}/{rows}x{width}"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.glu(args.var("x")?, act)?)])
    });
    let x = case.wide("x", rows * 2 * width);
    case.real("x", &[rows, 2 * width], x)
}
