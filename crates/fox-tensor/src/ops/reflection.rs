//! Reflections of PaTH attention.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Matrix, Naive, dot, matrix, sigmoid};
use crate::tape::{Tape, Var};
use crate::{Backend, Result, Tensor};

/// Operands of the reflections `u = sqrt(2 sigmoid(z)) y / sqrt(sum y^2 + eps)` of `H` heads of width `d`, for
/// `I - u u^T`: `z` at minus infinity is the identity, 0 a projection, infinity a reflection.
#[derive(Clone, Copy, Debug)]
pub struct ReflectionInputs<'a> {
    /// Directions `[R, H * d]`, of any length.
    pub y: &'a Tensor,
    /// Strengths `[R, H]`, as logits.
    pub z: &'a Tensor,
    /// Inside the square root of the norm.
    pub eps: f32,
}

/// Reflections on a device.
pub trait ReflectionOps {
    /// `u`, `[R, H * d]` in f32.
    fn reflection_fwd(&self, inputs: &ReflectionInputs<'_>) -> Result<Tensor>;
    /// `(dy[R, H * d], dz[R, H])` from the gradient of `u`.
    fn reflection_bwd(
        &self,
        du: &Tensor,
        inputs: &ReflectionInputs<'_>,
    ) -> Result<(Tensor, Tensor)>;
}

/// Validates the operands of [`ReflectionOps::reflection_fwd`].
pub fn check_reflection_fwd(backend: &dyn Backend, inputs: &ReflectionInputs<'_>) -> Result<()> {
    let operands = Operands::new("reflection", backend);
    let (rows, width) = operands.matrix("y", inputs.y)?;
    let (_, heads) = operands.matrix("z", inputs.z)?;
    operands.real("z", inputs.z, &[rows, heads])?;
    operands.require(heads > 0 && width > 0 && width.is_multiple_of(heads), || {
        format!("{width} channels are not a multiple of {heads} heads")
    })?;
    operands.require(inputs.eps > 0.0, || format!("eps is {}, but must be above 0", inputs.eps))
}

/// Validates the operands of [`ReflectionOps::reflection_bwd`].
pub fn check_reflection_bwd(
    backend: &dyn Backend,
    du: &Tensor,
    inputs: &ReflectionInputs<'_>,
) -> Result<()> {
    check_reflection_fwd(backend, inputs)?;
    Operands::new("reflection_bwd", backend).real("du", du, inputs.y.dims())
}

impl Tape<'_> {
    /// Reflections `[R, H * d]` of directions `y: [R, H * d]` and logits `z: [R, H]`; see [`ReflectionInputs`].
    pub fn reflection(&mut self, y: &Var, z: &Var, eps: f32) -> Result<Var> {
        let inputs = ReflectionInputs { y: y.value(), z: z.value(), eps };
        let u = self.device.backend().reflection_fwd(&inputs)?;
        let out = self.output(u, y.needs_grad() || z.needs_grad());
        let (y_slot, z_slot, out_slot) = (y.slot, z.slot, out.slot);
        let (device, y, z) = (self.device.clone(), y.value.clone(), z.value.clone());
        self.push(move |flow| {
            let Some(du) = flow.take(out_slot) else { return Ok(()) };
            let inputs = ReflectionInputs { y: &y, z: &z, eps };
            let (dy, dz) = device.backend().reflection_bwd(&du, &inputs)?;
            flow.add(y_slot, dy)?;
            flow.add(z_slot, dz)
        });
        Ok(out)
    }
}

impl ReflectionOps for Naive {
    fn reflection_fwd(&self, inputs: &ReflectionInputs<'_>) -> Result<Tensor> {
        check_reflection_fwd(self, inputs)?;
        let (y, z) = (matrix(inputs.y)?, matrix(inputs.z)?);
        let mut u = y.data.to_vec();
        for (u, z) in u.chunks_mut(y.cols / z.cols).zip(z.data) {
            let factor = (2.0 * sigmoid(*z)).sqrt() * inverse_norm(u, inputs.eps);
            u.iter_mut().for_each(|u| *u *= factor);
        }
        Ok(self.tensor(inputs.y.device(), u, inputs.y.shape()))
    }

    fn reflection_bwd(
        &self,
        du: &Tensor,
        inputs: &ReflectionInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        check_reflection_bwd(self, du, inputs)?;
        let (du, y, z): (Matrix<'_>, _, _) = (matrix(du)?, matrix(inputs.y)?, matrix(inputs.z)?);
        let (d, mut dy, mut dz) = (y.cols / z.cols, Vec::new(), Vec::new());
        for ((du, y), z) in du.data.chunks(d).zip(y.data.chunks(d)).zip(z.data) {
            let (r, strength) = (inverse_norm(y, inputs.eps), (2.0 * sigmoid(*z)).sqrt());
            let along = dot(y, du) * r;
            dy.extend(y.iter().zip(du).map(|(y, du)| strength * r * (du - along * r * y)));
            // The slope of sqrt(2 sigmoid(z)) is half of it times 1 - sigmoid(z).
            dz.push(0.5 * sigmoid(-z) * strength * along);
        }
        Ok((self.like(inputs.y, dy), self.like(inputs.z, dz)))
    }
}

fn inverse_norm(y: &[f64], eps: f32) -> f64 {
    1.0 / (dot(y, y) + f64::from(eps)).sqrt()
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads, d) in [(1, 1, 1), (113, 3, 5), (65, 4, 32), (70, 2, 128)] {
        let name = format!("reflection/{rows}x{heads}x{d}");
        let case = Case::new(name, move |tape, args| {
            let u = tape.reflection(args.var("y")?, args.var("z")?, 1e-6)?;
            Ok(vec![Output::Var("u", u)])
        });
        let z = case.wide("z", rows * heads);
        cases.push(case.normal("y", &[rows, heads * d]).real("z", &[rows, heads], z));
    }
    cases
}
