//! One list of op cases for every backend.
//!
//! A [`Case`] has inputs and a function that runs an op on the tape. [`run`] returns every output, and the gradient of
//! every differentiable input for fixed random output gradients, as f64 vectors; [`compare`] returns the distance of
//! two results. A backend is correct when `compare(run(case, it), run(case, naive))` is small for [`all`] cases and
//! [`refuse_wrong_operands`] accepts nothing.

mod composed;
mod frozen;
mod layouts;
mod memory;
mod wrong_operands;

pub use crate::ops::attention::cases::{
    AttentionCase, Gates, Pruning, large_attention, random_attention,
};
pub use crate::ops::paged::cases::{CasePages, PagedCase, PagedSequence};
pub use crate::ops::path::cases::{
    large_path_attention, path_attention_case, random_path_attention,
};
pub use crate::ops::scan::cases::{Decay, ScanCase, Strength, random_scan, scan};
pub use crate::ops::stick::cases::random_stick_breaking;
pub use crate::ops::wall::cases::large_wall;
pub use fox_base::random::SplitMix64 as Rng;
pub(crate) use layouts::recurrent_layouts;
pub use wrong_operands::{WrongOperands, refuse_wrong_operands};

use fox_base::difference;

use crate::{Device, Error, Gradients, Result, Tape, Tensor, Var};

/// The nearest f32.
pub fn round(x: f64) -> f64 {
    f64::from(x as f32)
}

/// Values of an input.
#[derive(Clone, Debug)]
pub enum Data {
    /// Real numbers, each exactly an f32.
    Real(Vec<f64>),
    /// Token ids or labels.
    Int(Vec<i32>),
}

/// A named operand of a case.
#[derive(Clone, Debug)]
pub struct Input {
    /// Name of the operand.
    pub name: &'static str,
    /// Extents.
    pub shape: Vec<usize>,
    /// Values, row-major.
    pub data: Data,
    /// Whether [`run`] gives its gradient.
    pub grad: bool,
}

/// Result of a build function.
pub enum Output {
    /// A value of the tape; it gets a random gradient.
    Var(&'static str, Var),
    /// Losses of a `linear_cross_entropy`, whose gradient starts by itself, and their weights.
    Loss(&'static str, Tensor, Tensor),
    /// Values without a gradient.
    Plain(&'static str, Vec<f64>),
}

type Build = Box<dyn Fn(&mut Tape<'static>, &Args<'_>) -> Result<Vec<Output>> + Send + Sync>;

/// One op, or a few, on given inputs.
pub struct Case {
    /// Unique, e.g. `attention/gqa+window/113x203/d40`.
    pub name: String,
    /// Seed of the output gradients.
    pub seed: u64,
    /// The operands. A test may change their values, not their shapes.
    pub inputs: Vec<Input>,
    /// Rounding of the output gradients; the identity by default.
    pub rounding: fn(f64) -> f64,
    build: Build,
}

/// The inputs of a case on the device.
pub struct Args<'a> {
    case: &'a Case,
    vars: Vec<Var>,
}

impl Args<'_> {
    /// The operand of this name, if the case has it.
    pub fn get(&self, name: &str) -> Option<&Var> {
        let index = self.case.inputs.iter().position(|input| input.name == name)?;
        self.vars.get(index)
    }

    /// The operand of this name.
    pub fn var(&self, name: &str) -> Result<&Var> {
        self.get(name)
            .ok_or_else(|| Error::argument("case", format!("{} has no {name}", self.case.name)))
    }

    /// The rounding of a device of lower precision, when the case measures its effect.
    pub fn rounding(&self) -> Option<fn(f64) -> f64> {
        let probe = 1.0 + f64::from(f32::EPSILON);
        ((self.case.rounding)(probe) != probe).then_some(self.case.rounding)
    }

    /// The tensor of the operand of this name.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.var(name).map(Var::value)
    }
}

impl Case {
    /// A case without inputs yet.
    pub fn new(
        name: impl Into<String>,
        build: impl Fn(&mut Tape<'static>, &Args<'_>) -> Result<Vec<Output>> + Send + Sync + 'static,
    ) -> Self {
        let name = name.into();
        // The seed depends on the name alone: adding a case does not change the others.
        let seed = name.bytes().fold(0, |h, b| Rng::new(h ^ u64::from(b)).bits());
        Case { name, seed, inputs: Vec::new(), rounding: |x| x, build: Box::new(build) }
    }

    /// Adds an operand whose gradient is compared too.
    pub fn real(self, name: &'static str, shape: &[usize], data: Vec<f64>) -> Self {
        self.with(name, shape, Data::Real(data), true)
    }

    /// Adds a differentiable operand of standard normal values.
    pub fn normal(self, name: &'static str, shape: &[usize]) -> Self {
        let data = self.rng(name).normals(shape.iter().product());
        self.real(name, shape, data)
    }

    /// Adds a real operand without gradient.
    pub fn constant(self, name: &'static str, shape: &[usize], data: Vec<f64>) -> Self {
        self.with(name, shape, Data::Real(data), false)
    }

    /// Adds an operand of integers.
    pub fn int(self, name: &'static str, shape: &[usize], data: Vec<i32>) -> Self {
        self.with(name, shape, Data::Int(data), false)
    }

    /// Random numbers that depend on the names of the case and of the operand.
    pub(crate) fn rng(&self, name: &str) -> Rng {
        Rng::new(name.bytes().fold(self.seed, |h, b| Rng::new(h ^ u64::from(b)).bits()))
    }

    /// Values of order 1 with some outliers, where a naive sigmoid overflows.
    pub(crate) fn wide(&self, name: &str, len: usize) -> Vec<f64> {
        let mut rng = self.rng(name);
        (0..len)
            .map(|_| {
                let spread = if rng.chance(0.1) { 60.0 } else { 2.0 };
                round(rng.normal() * spread)
            })
            .collect()
    }

    fn with(mut self, name: &'static str, shape: &[usize], data: Data, grad: bool) -> Self {
        self.inputs.push(Input { name, shape: shape.to_vec(), data, grad });
        self
    }
}

/// Outputs and gradients of one case on one device.
#[derive(Clone, Debug, Default)]
pub struct CaseResult {
    /// Outputs by name.
    pub outputs: Vec<(String, Vec<f64>)>,
    /// Gradients of [`CaseResult::objective`] by input; zeros where there is none.
    pub gradients: Vec<(String, Vec<f64>)>,
    /// Sum of all outputs times their gradients: the objective of [`CaseResult::gradients`].
    pub objective: f64,
}

/// Runs a case forward and backward.
pub fn run(case: &Case, device: &Device) -> Result<CaseResult> {
    let mut tape = Tape::recording(device);
    let args = Args { case, vars: upload(case, device, &mut tape)? };
    let (mut result, seeds) = outputs(case, device, &mut tape, &args)?;
    let wanted = || case.inputs.iter().zip(&args.vars).filter(|(input, _)| input.grad);
    let leaves: Vec<Var> = wanted().map(|(_, var)| var.clone()).collect();
    let gradients = tape.backward_from(&seeds, &leaves, &mut Gradients::default())?;
    for ((input, var), gradient) in wanted().zip(gradients) {
        let values = match gradient {
            Some(gradient) => {
                gradient.expect_shape("case", "gradient", var.value().dims())?;
                gradient.to_f64()?
            }
            None => vec![0.0; var.value().len()],
        };
        result.gradients.push((input.name.to_string(), values));
    }
    Ok(result)
}

/// Runs a case forward only, as inference does. There are no gradients.
pub fn run_forward(case: &Case, device: &Device) -> Result<CaseResult> {
    let mut tape = Tape::inference(device);
    let args = Args { case, vars: upload(case, device, &mut tape)? };
    Ok(outputs(case, device, &mut tape, &args)?.0)
}

fn upload(case: &Case, device: &Device, tape: &mut Tape<'static>) -> Result<Vec<Var>> {
    let upload = |input: &Input| {
        let tensor = match &input.data {
            Data::Real(data) => device.from_f64(data, &input.shape[..])?,
            Data::Int(data) => device.from_i32(data, &input.shape[..])?,
        };
        Ok(if input.grad { tape.leaf(tensor) } else { Var::constant(tensor) })
    };
    case.inputs.iter().map(upload).collect()
}

type Seeds = Vec<(Var, Tensor)>;

fn outputs(
    case: &Case,
    device: &Device,
    tape: &mut Tape<'static>,
    args: &Args<'_>,
) -> Result<(CaseResult, Seeds)> {
    let (mut result, mut seeds) = (CaseResult::default(), Vec::new());
    for output in (case.build)(tape, args)? {
        let (name, values) = match output {
            Output::Var(name, var) => {
                let values = var.value().to_f64()?;
                let mut gradient = case.rng(name).normals(values.len());
                gradient.iter_mut().for_each(|x| *x = (case.rounding)(*x));
                result.objective += dot(&values, &gradient);
                seeds.push((var.clone(), device.from_f64(&gradient, var.value().shape())?));
                (name, values)
            }
            Output::Loss(name, loss, weights) => {
                let values = loss.to_f64()?;
                result.objective += dot(&values, &weights.to_f64()?);
                (name, values)
            }
            Output::Plain(name, values) => (name, values),
        };
        result.outputs.push((name.to_string(), values));
    }
    Ok((result, seeds))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Root mean square below which a result is judged as if it were this large. Inputs and output
/// gradients of the cases are of order 1, so a result far smaller is the difference of larger
/// numbers, and its last digits are noise.
pub const FLOOR: f64 = 0.1;

/// Distance of `got` from `want` for every output and, as `d name`, every gradient: the norm of
/// the difference over the norm of `want`, or over that of a vector of [`FLOOR`]s if larger.
/// Infinite where something is missing, not a number, or infinite on one side only.
pub fn compare(got: &CaseResult, want: &CaseResult) -> Vec<(String, f64)> {
    compare_by(relative_error, got, want)
}

/// [`compare`] by another measure of `(got, want)`, such as [`largest_error`].
pub fn compare_by(
    measure: fn(&[f64], &[f64]) -> f64,
    got: &CaseResult,
    want: &CaseResult,
) -> Vec<(String, f64)> {
    let pair = |got: &[(String, Vec<f64>)], (name, want): &(String, Vec<f64>)| {
        let got = got.iter().find(|(other, _)| other == name);
        got.map_or(f64::INFINITY, |(_, got)| measure(got, want))
    };
    let outputs = want.outputs.iter().map(|x| (x.0.clone(), pair(&got.outputs, x)));
    let gradients = want.gradients.iter().map(|x| (format!("d {}", x.0), pair(&got.gradients, x)));
    outputs.chain(gradients).collect()
}

/// The largest of the errors of [`compare`].
pub fn worst(errors: &[(String, f64)]) -> f64 {
    difference::largest(errors.iter().map(|(_, error)| *error))
}

/// Norm of `got - want` over the norm of `want`; see [`compare`].
pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    difference::relative_error(got, want, FLOOR * (want.len() as f64).sqrt())
}

/// The largest `|got - want|` of an element over the largest `|want|`, or over [`FLOOR`] if larger. It finds a
/// single wrong element in a million, which a norm does not.
pub fn largest_error(got: &[f64], want: &[f64]) -> f64 {
    let finite = want.iter().filter(|x| x.is_finite());
    let size = finite.fold(FLOOR, |size, x| size.max(x.abs()));
    difference::largest_error(got, want) / size
}

/// Every case, in a fixed order.
pub fn all() -> Vec<Case> {
    let mut cases = crate::ops::cases();
    cases.extend(composed::cases());
    cases.extend(frozen::cases());
    cases.extend(memory::cases());
    cases
}
