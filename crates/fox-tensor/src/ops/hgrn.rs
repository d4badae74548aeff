//! Gates of HGRN2 and their lower bounds.

use crate::cases::{Case, Output, Rng, round};
use crate::check::Operands;
use crate::naive::{Act, Matrix, Naive, log_sigmoid, matrix, maybe_real, real, sigmoid};
use crate::tape::{Tape, Var, slot_of, value_of, wants};
use crate::{Activation, Backend, DType, Result, Tensor};

/// Operands of HGRN2's gates: `f = lower + (1 - lower) sigmoid(z)`.
#[derive(Clone, Debug)]
pub struct HgrnInputs<'a> {
    /// Raw queries `[R, C]`.
    pub q: &'a Tensor,
    /// Logits of the forget gates `[R, C]`.
    pub z: &'a Tensor,
    /// Lower bounds of the gates `[C]`, from 0 up to, but not including, 1; 0 when absent.
    pub lower: Option<&'a Tensor>,
}

/// Outputs of HGRN2's gates, or their gradients; all `[R, C]`.
#[derive(Clone, Debug)]
pub struct HgrnGates {
    /// `silu(q)`.
    pub q: Tensor,
    /// `1 - f`.
    pub k: Tensor,
    /// `ln f`.
    pub log_f: Tensor,
}

/// Gradients of HGRN2's gates.
#[derive(Clone, Debug)]
pub struct HgrnGrads {
    /// `[R, C]`.
    pub dq: Tensor,
    /// `[R, C]`.
    pub dz: Tensor,
    /// `[C]`; present when there are lower bounds.
    pub dlower: Option<Tensor>,
}

/// Gates of HGRN2 on a device.
pub trait HgrnOps {
    /// Queries, keys and log decays of HGRN2.
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates>;
    /// Gradients of `hgrn_gates_fwd` from those of its outputs.
    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads>;

    /// The lower bounds `[C]` of layer `layer`: `sum_{1 <= m <= layer} softmax_m(table[L, C])`.
    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor>;
    /// `dtable[L, C]`.
    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor>;
}

/// Validates the operands of [`HgrnOps::hgrn_gates_fwd`].
pub fn check_hgrn_gates_fwd(backend: &dyn Backend, inputs: &HgrnInputs<'_>) -> Result<()> {
    let operands = Operands::new("hgrn_gates", backend);
    let (_, width) = operands.matrix("q", inputs.q)?;
    operands.require(width > 0, || "q has no columns".into())?;
    operands.real("z", inputs.z, inputs.q.dims())?;
    operands.maybe("lower", inputs.lower, &[width])
}

/// Validates the operands of [`HgrnOps::hgrn_gates_bwd`].
pub fn check_hgrn_gates_bwd(
    backend: &dyn Backend,
    d_out: &HgrnGates,
    inputs: &HgrnInputs<'_>,
) -> Result<()> {
    check_hgrn_gates_fwd(backend, inputs)?;
    let operands = Operands::new("hgrn_gates_bwd", backend);
    for (what, grad) in [("dq", &d_out.q), ("dk", &d_out.k), ("dlog_f", &d_out.log_f)] {
        operands.real(what, grad, inputs.q.dims())?;
    }
    Ok(())
}

/// Validates the operands of [`HgrnOps::lower_bound_fwd`].
pub fn check_lower_bound_fwd(backend: &dyn Backend, table: &Tensor, layer: usize) -> Result<()> {
    let operands = Operands::new("lower_bound", backend);
    let (layers, width) = operands.matrix("table", table)?;
    operands.require(layer < layers && width > 0, || {
        format!("layer {layer} of a table for {layers} layers and {width} channels")
    })
}

/// Validates the operands of [`HgrnOps::lower_bound_bwd`].
pub fn check_lower_bound_bwd(
    backend: &dyn Backend,
    dy: &Tensor,
    table: &Tensor,
    layer: usize,
) -> Result<()> {
    check_lower_bound_fwd(backend, table, layer)?;
    Operands::new("lower_bound_bwd", backend).real("dy", dy, &[table.cols()])
}

impl Tape<'_> {
    /// HGRN2's `(silu(q), 1 - f, ln f)` for `f = lower + (1 - lower) sigmoid(z)`; all `[R, C]`,
    /// `lower: [C]`.
    pub fn hgrn_gates(&mut self, q: &Var, z: &Var, lower: Option<&Var>) -> Result<(Var, Var, Var)> {
        let inputs = HgrnInputs { q: q.value(), z: z.value(), lower: lower.map(Var::value) };
        let gates = self.device.backend().hgrn_gates_fwd(&inputs)?;
        let needs_grad = q.needs_grad() || z.needs_grad() || wants(lower);
        let outs = (
            self.output(gates.q, needs_grad),
            self.output(gates.k, needs_grad),
            self.output(gates.log_f, needs_grad),
        );
        let slots = (q.slot, z.slot, slot_of(lower));
        let out_slots = (outs.0.slot, outs.1.slot, outs.2.slot);
        let (device, q, z, lower) =
            (self.device.clone(), q.value.clone(), z.value.clone(), value_of(lower));
        self.push(move |flow| {
            let taken = [flow.take(out_slots.0), flow.take(out_slots.1), flow.take(out_slots.2)];
            if taken.iter().all(Option::is_none) {
                return Ok(());
            }
            let or_zeros = |grad: Option<Tensor>| match grad {
                Some(grad) => Ok(grad),
                None => device.zeros(q.shape(), DType::F32),
            };
            let [dq, dk, dlog_f] = taken;
            let d_out = HgrnGates { q: or_zeros(dq)?, k: or_zeros(dk)?, log_f: or_zeros(dlog_f)? };
            let inputs = HgrnInputs { q: &q, z: &z, lower: lower.as_ref() };
            let grads = device.backend().hgrn_gates_bwd(&d_out, &inputs)?;
            flow.add(slots.0, grads.dq)?;
            flow.add(slots.1, grads.dz)?;
            flow.add_some(slots.2, grads.dlower)
        });
        Ok(outs)
    }

    /// Lower bounds `[C]` of the forget gates of a layer, from the table `[L, C]` of all layers:
    /// they rise from layer to layer, from 0 towards 1.
    pub fn lower_bound(&mut self, table: &Var, layer: usize) -> Result<Var> {
        let y = self.device.backend().lower_bound_fwd(table.value(), layer)?;
        let out = self.output(y, table.needs_grad());
        let (slot, out_slot) = (table.slot, out.slot);
        let (device, table) = (self.device.clone(), table.value.clone());
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            flow.add(slot, device.backend().lower_bound_bwd(&dy, &table, layer)?)
        });
        Ok(out)
    }
}

impl HgrnOps for Naive {
    fn hgrn_gates_fwd(&self, inputs: &HgrnInputs<'_>) -> Result<HgrnGates> {
        check_hgrn_gates_fwd(self, inputs)?;
        let (q, k, log_f) = hgrn(inputs)?.forward();
        let like = |values| self.like(inputs.q, values);
        Ok(HgrnGates { q: like(q), k: like(k), log_f: like(log_f) })
    }

    fn hgrn_gates_bwd(&self, d_out: &HgrnGates, inputs: &HgrnInputs<'_>) -> Result<HgrnGrads> {
        check_hgrn_gates_bwd(self, d_out, inputs)?;
        let (dk, dlog_f) = (real(&d_out.k)?, real(&d_out.log_f)?);
        let (dq, dz, dlower) = hgrn(inputs)?.backward(real(&d_out.q)?, dk, dlog_f);
        Ok(HgrnGrads {
            dq: self.like(inputs.q, dq),
            dz: self.like(inputs.z, dz),
            dlower: inputs.lower.map(|lower| self.like(lower, dlower)),
        })
    }

    fn lower_bound_fwd(&self, table: &Tensor, layer: usize) -> Result<Tensor> {
        check_lower_bound_fwd(self, table, layer)?;
        let (bound, _) = lower_bound(matrix(table)?, layer);
        Ok(self.tensor(table.device(), bound, [table.cols()]))
    }

    fn lower_bound_bwd(&self, dy: &Tensor, table: &Tensor, layer: usize) -> Result<Tensor> {
        check_lower_bound_bwd(self, dy, table, layer)?;
        let values = matrix(table)?;
        let (bound, softmax) = lower_bound(values, layer);
        let (dy, width) = (real(dy)?, values.cols);
        let grad = |i: usize| {
            let (m, c) = (i / width, i % width);
            let inside = if (1..=layer).contains(&m) { 1.0 } else { 0.0 };
            softmax[i] * (inside - bound[c]) * dy[c]
        };
        Ok(self.like(table, (0..values.data.len()).map(grad).collect()))
    }
}

fn hgrn<'a>(inputs: &HgrnInputs<'a>) -> Result<Hgrn<'a>> {
    Ok(Hgrn { q: matrix(inputs.q)?, z: matrix(inputs.z)?, lower: maybe_real(inputs.lower)? })
}

/// Operands of HGRN2's gates.
struct Hgrn<'a> {
    q: Matrix<'a>,
    z: Matrix<'a>,
    lower: Option<&'a [f64]>,
}

impl Hgrn<'_> {
    fn bound(&self, i: usize) -> f64 {
        self.lower.map_or(0.0, |lower| lower[i % self.z.cols])
    }

    /// `(q, k, ln f)`.
    fn forward(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let all = 0..self.z.data.len();
        let q = self.q.data.iter().map(|&x| Act(Activation::Silu).value(x)).collect();
        // sigmoid(-z) rather than 1 - sigmoid(z): no cancellation for gates near 1.
        let k = all.clone().map(|i| (1.0 - self.bound(i)) * sigmoid(-self.z.data[i])).collect();
        // f = (1 + lb e^-z) / (1 + e^-z), whatever the sign of z.
        let log_f = |i: usize| match self.bound(i) {
            0.0 => log_sigmoid(self.z.data[i]),
            lb => log_sigmoid(self.z.data[i]) - log_sigmoid(self.z.data[i] - lb.ln()),
        };
        (q, k, all.map(log_f).collect())
    }

    /// `(dq, dz, dlower)`.
    fn backward(&self, dq: &[f64], dk: &[f64], dlog_f: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let mut dlower = vec![0.0; self.lower.map_or(0, <[f64]>::len)];
        let slope = |(&x, d): (&f64, &f64)| Act(Activation::Silu).slope(x) * d;
        let dq = self.q.data.iter().zip(dq).map(slope).collect();
        let grad = |i: usize| {
            let (z, lb) = (self.z.data[i], self.bound(i));
            let (open, shut) = (sigmoid(z), sigmoid(-z));
            if !dlower.is_empty() {
                // df / dlb = 1 - sigmoid(z).
                let df = dlog_f[i] / (lb + (1.0 - lb) * open) - dk[i];
                dlower[i % self.z.cols] += df * shut;
            }
            // d ln f / dz = shut * (1 - lb) open / f; the ratio is 1 without a bound.
            let ratio = if lb == 0.0 { 1.0 } else { (1.0 - lb) * open / (lb + (1.0 - lb) * open) };
            dlog_f[i] * ratio * shut - dk[i] * (1.0 - lb) * open * shut
        };
        let dz = (0..self.z.data.len()).map(grad).collect();
        (dq, dz, dlower)
    }
}

/// `(lb[C], softmax over layers [L * C])`.
fn lower_bound(table: Matrix<'_>, layer: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut bound, mut softmax) = (vec![0.0; table.cols], vec![0.0; table.data.len()]);
    for c in 0..table.cols {
        let column = || (0..table.rows).map(|m| table.row(m)[c]);
        let max = column().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = column().map(|x| (x - max).exp()).sum();
        for (m, x) in column().enumerate() {
            softmax[m * table.cols + c] = (x - max).exp() / sum;
        }
        bound[c] = (1..=layer).map(|m| softmax[m * table.cols + c]).sum();
    }
    (bound, softmax)
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, width) in [(1, 1), (113, 20), (65, 64), (7, 301)] {
        cases.extend([gates_case(rows, width, false), gates_case(rows, width, true)]);
    }
    cases.extend((0..3).map(lower_bound_case));
    cases
}

/// Gates near 0 and near 1 among others.
fn gates_case(rows: usize, width: usize, bounded: bool) -> Case {
    let mark = if bounded { "bounded" } else { "free" };
    let case = Case::new(format!("hgrn_gates/{mark}/{rows}x{width}"), |tape, args| {
        let (q, k, log_f) = tape.hgrn_gates(args.var("q")?, args.var("z")?, args.get("lower"))?;
        Ok(vec![Output::Var("q", q), Output::Var("k", k), Output::Var("log_f", log_f)])
    });
    let mut rng = Rng::new(case.seed);
    let spread = |rng: &mut Rng| if rng.chance(0.1) { 20.0 } else { 2.0 };
    let z = (0..rows * width).map(|_| round(spread(&mut rng) * rng.normal())).collect();
    let case = case.normal("q", &[rows, width]).real("z", &[rows, width], z);
    if !bounded {
        return case;
    }
    let lower = (0..width).map(|_| round(0.05 + 0.9 * rng.uniform())).collect();
    case.real("lower", &[width], lower)
}

fn lower_bound_case(layer: usize) -> Case {
    Case::new(format!("lower_bound/layer {layer}/3x20"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.lower_bound(args.var("table")?, layer)?)])
    })
    .normal("table", &[3, 20])
}
