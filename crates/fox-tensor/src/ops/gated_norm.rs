//! Output of a mixer: `rms_groups(x; norm) * act(gate)`, or `rms_groups(x * act(gate); norm)`, norm and gate optional.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Act, Matrix, Naive, matrix, maybe_matrix, maybe_real, rms_backward, rstd};
use crate::tape::{Saved, Tape, Var, slot_of, value_of, wants};
use crate::{Activation, Backend, Result, Tensor};

/// Operands of `gated_norm`: `y = rms_groups(x; norm) * act(gate)`, or with `gate_first` `rms_groups(x * act(gate);
/// norm)`; norm and gate are optional.
#[derive(Clone, Debug)]
pub struct GatedNormInputs<'a> {
    /// Input `[R, C]`.
    pub x: &'a Tensor,
    /// Norm weights `[C]`, or those of one group `[C / groups]`, shared by all.
    pub norm: Option<&'a Tensor>,
    /// Gate logits `[R, C]`.
    pub gate: Option<&'a Tensor>,
    /// Groups of channels that are normalized separately (the heads).
    pub groups: usize,
    /// Epsilon inside the norm's square root.
    pub eps: f32,
    /// Nonlinearity of the gate.
    pub act: Activation,
    /// Whether the norm comes after the gate.
    pub gate_first: bool,
}

impl GatedNormInputs<'_> {
    /// Whether both operands are there, the gate first.
    pub fn normalizes_gated(&self) -> bool {
        self.gate_first && self.norm.is_some() && self.gate.is_some()
    }

    /// The gate alone, and the norm alone of its result `gated`.
    fn steps<'a>(&'a self, gated: Option<&'a Tensor>) -> GatedNormInputs<'a> {
        match gated {
            None => GatedNormInputs { norm: None, groups: 1, gate_first: false, ..self.clone() },
            Some(x) => GatedNormInputs { x, gate: None, gate_first: false, ..self.clone() },
        }
    }
}

/// [`GatedNormOps::gated_norm_fwd`] of inputs with the gate first, as two ops.
pub fn gate_then_norm_fwd<B: GatedNormOps + ?Sized>(
    backend: &B,
    inputs: &GatedNormInputs<'_>,
) -> Result<Tensor> {
    let gated = backend.gated_norm_fwd(&inputs.steps(None))?;
    backend.gated_norm_fwd(&inputs.steps(Some(&gated)))
}

/// [`GatedNormOps::gated_norm_bwd`] of inputs with the gate first, as two ops.
pub fn gate_then_norm_bwd<B: GatedNormOps + ?Sized>(
    backend: &B,
    dy: &Tensor,
    inputs: &GatedNormInputs<'_>,
) -> Result<GatedNormGrads> {
    let gate = inputs.steps(None);
    let gated = backend.gated_norm_fwd(&gate)?;
    let norm = backend.gated_norm_bwd(dy, &inputs.steps(Some(&gated)))?;
    Ok(GatedNormGrads { dnorm: norm.dnorm, ..backend.gated_norm_bwd(&norm.dx, &gate)? })
}

/// Gradients of the gated norm.
#[derive(Clone, Debug)]
pub struct GatedNormGrads {
    /// `[R, C]`.
    pub dx: Tensor,
    /// Gradient of the gate logits `[R, C]`; present when there is a gate.
    pub dgate: Option<Tensor>,
    /// Gradient of the norm weights, shaped like them; present when there are some.
    pub dnorm: Option<Tensor>,
}

/// The gated norm on a device.
pub trait GatedNormOps {
    /// `rms_groups(x; norm) * act(gate)`, or in the other order; norm and gate are optional.
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor>;
    /// Gradients of `gated_norm_fwd`.
    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<GatedNormGrads>;
}

/// Validates the operands of [`GatedNormOps::gated_norm_fwd`].
pub fn check_gated_norm_fwd(backend: &dyn Backend, inputs: &GatedNormInputs<'_>) -> Result<()> {
    let operands = Operands::new("gated_norm", backend);
    let ((_, width), groups) = (operands.matrix("x", inputs.x)?, inputs.groups);
    operands.require(width > 0 && groups > 0 && width.is_multiple_of(groups), || {
        format!("{groups} groups do not divide width {width}")
    })?;
    if let Some(norm) = inputs.norm {
        operands.head_weights("norm", norm, width / groups, width)?;
    }
    operands.maybe("gate", inputs.gate, inputs.x.dims())
}

/// Validates the operands of [`GatedNormOps::gated_norm_bwd`].
pub fn check_gated_norm_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    inputs: &GatedNormInputs<'_>,
) -> Result<()> {
    check_gated_norm_fwd(backend, inputs)?;
    Operands::new("gated_norm_bwd", backend).real("dy", dy, inputs.x.dims())
}

impl Tape<'_> {
    /// `rms_groups(x[R, C]; norm) * act(gate[R, C])`, norm and gate are optional. The norm has weights `[C]`, or `[C /
    /// groups]` that the groups share.
    pub fn gated_norm(
        &mut self,
        x: &Var,
        norm: Option<&Var>,
        gate: Option<&Var>,
        groups: usize,
        eps: f32,
        act: Activation,
    ) -> Result<Var> {
        self.gated_norm_in_order(x, norm, gate, groups, eps, act, false)
    }

    /// `rms_groups(x[R, C] * act(gate[R, C]); norm[C])`.
    pub fn gate_then_norm(
        &mut self,
        x: &Var,
        norm: &Var,
        gate: &Var,
        groups: usize,
        eps: f32,
        act: Activation,
    ) -> Result<Var> {
        self.gated_norm_in_order(x, Some(norm), Some(gate), groups, eps, act, true)
    }

    #[allow(clippy::too_many_arguments)] // those of the two above
    fn gated_norm_in_order(
        &mut self,
        x: &Var,
        norm: Option<&Var>,
        gate: Option<&Var>,
        groups: usize,
        eps: f32,
        act: Activation,
        gate_first: bool,
    ) -> Result<Var> {
        let inputs = GatedNormInputs {
            x: x.value(),
            norm: norm.map(Var::value),
            gate: gate.map(Var::value),
            groups,
            eps,
            act,
            gate_first,
        };
        let y = self.device.backend().gated_norm_fwd(&inputs)?;
        let needs_grad = x.needs_grad() || wants(norm) || wants(gate);
        let again = (x.value.clone(), value_of(norm), value_of(gate));
        let out = self.cheap_output(y, needs_grad, true, move |device| {
            let (norm, gate) = (again.1.as_ref(), again.2.as_ref());
            let inputs = GatedNormInputs { x: &again.0, norm, gate, groups, eps, act, gate_first };
            device.backend().gated_norm_fwd(&inputs)
        });
        let (x_slot, n_slot, g_slot, out_slot) = (x.slot, slot_of(norm), slot_of(gate), out.slot);
        let (device, x, norm, gate, own) = (
            self.device.clone(),
            x.value.clone(),
            value_of(norm),
            value_of(gate),
            out.again.clone(),
        );
        self.push(move |flow| {
            let deferred = own.map_or_else(Vec::new, Saved::take_deferred);
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            let (norm, gate) = (norm.as_ref(), gate.as_ref());
            let inputs = GatedNormInputs { x: &x, norm, gate, groups, eps, act, gate_first };
            let grads = if deferred.is_empty() {
                device.backend().gated_norm_bwd(&dy, &inputs)?
            } else {
                let (grads, y) = device.recompute_ops()?.gated_norm_bwd_with_output(dy, &inputs)?;
                flow.run_deferred(deferred, &y)?;
                grads
            };
            flow.add(x_slot, grads.dx)?;
            flow.add_some(g_slot, grads.dgate)?;
            flow.add_some(n_slot, grads.dnorm)
        });
        Ok(out)
    }
}

impl GatedNormOps for Naive {
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        check_gated_norm_fwd(self, inputs)?;
        if inputs.normalizes_gated() {
            return gate_then_norm_fwd(self, inputs);
        }
        Ok(self.like(inputs.x, gated(inputs)?.forward()))
    }

    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<GatedNormGrads> {
        check_gated_norm_bwd(self, dy, inputs)?;
        if inputs.normalizes_gated() {
            return gate_then_norm_bwd(self, dy, inputs);
        }
        let (dx, dgate, dnorm) = gated(inputs)?.backward(matrix(dy)?);
        Ok(GatedNormGrads {
            dx: self.like(inputs.x, dx),
            dgate: inputs.gate.map(|z| self.like(z, dgate)),
            dnorm: inputs.norm.map(|w| self.like(w, dnorm)),
        })
    }
}

fn gated<'a>(inputs: &GatedNormInputs<'a>) -> Result<Gated<'a>> {
    Ok(Gated {
        x: matrix(inputs.x)?,
        norm: maybe_real(inputs.norm)?,
        gate: maybe_matrix(inputs.gate)?,
        groups: inputs.groups,
        eps: f64::from(inputs.eps),
        act: Act(inputs.act),
    })
}

/// Operands of the gated norm: `y = rms_groups(x; norm) * act(gate)`.
struct Gated<'a> {
    x: Matrix<'a>,
    norm: Option<&'a [f64]>,
    gate: Option<Matrix<'a>>,
    groups: usize,
    eps: f64,
    act: Act,
}

impl Gated<'_> {
    /// `x` normalised (if it is), before the gate, and the scale of every channel of row `r`.
    fn normed(&self, r: usize) -> (Vec<f64>, Vec<f64>) {
        let (x, Some(w)) = (self.x.row(r), self.norm) else {
            return (self.x.row(r).to_vec(), vec![1.0; self.x.cols]);
        };
        let width = self.x.cols / self.groups;
        let scale: Vec<f64> =
            (0..self.x.cols).map(|c| rstd(&x[c / width * width..][..width], self.eps)).collect();
        ((0..x.len()).map(|c| x[c] * scale[c] * w[c % w.len()]).collect(), scale)
    }

    /// `act(gate)` of one element; 1 without a gate.
    fn gate(&self, r: usize, c: usize) -> f64 {
        self.gate.map_or(1.0, |z| self.act.value(z.row(r)[c]))
    }

    fn forward(&self) -> Vec<f64> {
        let mut y = Vec::with_capacity(self.x.data.len());
        for r in 0..self.x.rows {
            let (n, _) = self.normed(r);
            y.extend((0..self.x.cols).map(|c| n[c] * self.gate(r, c)));
        }
        y
    }

    /// `(dx, dgate, dnorm)`; the last two only where the operand exists.
    fn backward(&self, dy: Matrix<'_>) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let (mut dx, mut dgate, mut dnorm) =
            (Vec::new(), Vec::new(), vec![0.0; self.norm.map_or(0, <[f64]>::len)]);
        for r in 0..self.x.rows {
            let (x, (n, scale)) = (self.x.row(r), self.normed(r));
            let dn: Vec<f64> = (0..x.len()).map(|c| dy.row(r)[c] * self.gate(r, c)).collect();
            if let Some(z) = self.gate {
                dgate.extend(
                    (0..x.len()).map(|c| dy.row(r)[c] * n[c] * self.act.slope(z.row(r)[c])),
                );
            }
            let Some(w) = self.norm else {
                dx.extend(dn);
                continue;
            };
            for c in 0..x.len() {
                dnorm[c % w.len()] += dn[c] * x[c] * scale[c];
            }
            let g: Vec<f64> = dn.iter().zip(w.iter().cycle()).map(|(d, w)| d * w).collect();
            let width = x.len() / self.groups;
            for c in (0..x.len()).step_by(width) {
                dx.extend(rms_backward(&x[c..][..width], scale[c], &g[c..][..width]));
            }
        }
        (dx, dgate, dnorm)
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (norm, gate) in [(false, false), (true, false), (false, true), (true, true)] {
        for act in [Activation::Sigmoid, Activation::Silu] {
            for (rows, width, groups) in [(1, 8, 1), (113, 120, 5), (65, 203, 7), (799, 6, 2)] {
                cases.push(gated_norm(norm, gate, act, (rows, width, groups)));
            }
        }
    }
    for (rows, width, groups) in
        [(1, 8, 1), (65, 203, 7), (113, 768, 1), (37, 1536, 1), (799, 7, 1)]
    {
        cases.push(gate_then_norm((rows, width, groups)));
    }
    for (rows, width, groups) in [(1, 8, 2), (65, 203, 7), (113, 768, 6)] {
        cases.push(shared_norm((rows, width, groups)));
    }
    cases
}

/// Groups that share the weights of one.
fn shared_norm((rows, width, groups): (usize, usize, usize)) -> Case {
    let name = format!("gated_norm/shared/Silu/{rows}x{width}/g{groups}");
    Case::new(name, move |tape, args| {
        let (x, norm, gate) = (args.var("x")?, args.get("norm"), args.get("gate"));
        let y = tape.gated_norm(x, norm, gate, groups, 1e-6, Activation::Silu)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("x", &[rows, width])
    .normal("norm", &[width / groups])
    .normal("gate", &[rows, width])
}

fn gate_then_norm((rows, width, groups): (usize, usize, usize)) -> Case {
    let name = format!("gated_norm/gate first/Silu/{rows}x{width}/g{groups}");
    Case::new(name, move |tape, args| {
        let (x, norm, gate) = (args.var("x")?, args.var("norm")?, args.var("gate")?);
        let y = tape.gate_then_norm(x, norm, gate, groups, 1e-6, Activation::Silu)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("x", &[rows, width])
    .normal("norm", &[width])
    .normal("gate", &[rows, width])
}

fn gated_norm(
    norm: bool,
    gate: bool,
    act: Activation,
    (rows, width, groups): (usize, usize, usize),
) -> Case {
    let kind = match (norm, gate) {
        (false, false) => "identity",
        (true, false) => "norm",
        (false, true) => "gate",
        (true, true) => "norm+gate",
    };
    let name = format!("gated_norm/{kind}/{act:?}/{rows}x{width}/g{groups}");
    let mut case = Case::new(name, move |tape, args| {
        let (norm, gate) = (args.get("norm"), args.get("gate"));
        let y = tape.gated_norm(args.var("x")?, norm, gate, groups, 1e-6, act)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("x", &[rows, width]);
    if norm {
        case = case.normal("norm", &[width]);
    }
    if gate {
        case = case.normal("gate", &[rows, width]);
    }
    case
}
