//! An op that this library does not know, defined here and used like any other.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::cases::{self, Case, Data, Output};
use fox_tensor::naive::Naive;
use fox_tensor::{Activation, CustomOp, Device, Gradients, Result, Tape, Tensor, Var};

/// `y = max(x, 0)^2` and, as a second output, `max(-x, 0)^2`, through host values.
struct SquaredRelu;

/// `f` of every pair of elements.
fn zip(a: &Tensor, b: &Tensor, f: impl Fn(f64, f64) -> f64) -> Result<Tensor> {
    let values: Vec<f64> = a.to_f64()?.iter().zip(b.to_f64()?).map(|(a, b)| f(*a, b)).collect();
    a.device().from_f64(&values, a.shape())
}

impl CustomOp for SquaredRelu {
    fn name(&self) -> &'static str {
        "squared_relu"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let x = inputs[0];
        Ok(vec![zip(x, x, |x, _| x.max(0.0).powi(2))?, zip(x, x, |x, _| (-x).max(0.0).powi(2))?])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let up = zip(inputs[0], grads[0], |x, d| 2.0 * x.max(0.0) * d)?;
        let down = zip(inputs[0], grads[1], |x, d| -2.0 * (-x).max(0.0) * d)?;
        zip(&up, &down, |a, b| a + b).map(|dx| vec![Some(dx)])
    }
}

fn squared_relu(tape: &mut Tape<'static>, x: &Var) -> Result<[Var; 2]> {
    let [up, down] = tape.custom(SquaredRelu, &[x])?.try_into().unwrap();
    Ok([up, down])
}

/// Between two linear layers, so that gradients come from one op of the library and go on to another.
fn between(name: &str, checkpoint: bool) -> Case {
    fn block(tape: &mut Tape<'static>, inputs: &[Var]) -> Result<Vec<Var>> {
        let x = tape.linear(&inputs[0], &inputs[1], None)?;
        let [up, down] = squared_relu(tape, &x)?;
        Ok(vec![tape.linear(&up, &inputs[1], None)?, down])
    }
    let mut case = Case::new(name, move |tape, args| {
        let inputs = [args.var("x")?.clone(), args.var("w")?.clone()];
        let outs =
            if checkpoint { tape.checkpoint(&inputs, block)? } else { block(tape, &inputs)? };
        Ok(outs.into_iter().zip(["y", "down"]).map(|(y, name)| Output::Var(name, y)).collect())
    });
    // The two variants draw the same numbers.
    case.seed = 7;
    case.normal("x", &[5, 6]).normal("w", &[6, 6])
}

#[test]
fn gradients_agree_with_finite_differences() {
    let device = Device::naive();
    let mut case = between("custom/plain", false);
    let gradients = cases::run(&case, &device).unwrap().gradients;
    for (input, (name, gradient)) in gradients.iter().enumerate() {
        for i in 0..gradient.len() {
            let mut at = |step: f64| {
                let Data::Real(values) = &mut case.inputs[input].data else { unreachable!() };
                values[i] += step;
                cases::run_forward(&case, &device).unwrap().objective
            };
            let slope = (at(1e-5) - at(-2e-5)) / 2e-5;
            at(1e-5);
            let error = (slope - gradient[i]).abs() / (1.0 + gradient[i].abs());
            assert!(error < 1e-7, "d {name}[{i}]: {slope} against {}", gradient[i]);
        }
    }
}

/// The op runs again where its block is recomputed, and on operands that are computed again.
#[test]
fn checkpointing_is_bit_exact() {
    let want = cases::run(&between("custom/plain", false), &Device::naive()).unwrap();
    let again = cases::run(&between("custom/again", true), &Device::naive()).unwrap();
    assert_eq!(cases::worst(&cases::compare(&again, &want)), 0.0);

    let case = Case::new("custom/behind a cheap op", |tape, args| {
        let x = tape.glu(args.var("x")?, Activation::Silu)?;
        Ok(vec![Output::Var("up", squared_relu(tape, &x)?[0].clone())])
    });
    let case = case.normal("x", &[7, 8]);
    let plain = cases::run(&case, &Device::naive()).unwrap();
    let optional_ops = cases::run(&case, &Device::new(Naive::with_optional_ops())).unwrap();
    assert_eq!(cases::worst(&cases::compare(&optional_ops, &plain)), 0.0);
}

/// An output that nothing depends on passes zeros; one of which none is used is not walked at all.
#[test]
fn unused_outputs_have_zero_gradients() {
    let device = Device::naive();
    let mut tape = Tape::recording(&device);
    let x = tape.leaf(device.from_f64(&[3.0, -2.0], [2]).unwrap());
    let [_, down] = squared_relu(&mut tape, &x).unwrap();
    let ones = device.full([2], 1.0).unwrap();
    let dx = tape.backward_from(&[(down, ones)], &[x], &mut Gradients::default()).unwrap();
    assert_eq!(dx[0].as_ref().unwrap().to_f64().unwrap(), [0.0, -4.0]);

    let mut tape = Tape::recording(&device);
    let x = tape.leaf(device.full([2], 1.0).unwrap());
    tape.custom(Wrong(0), &[&x]).unwrap();
    assert!(tape.backward_from(&[], &[x], &mut Gradients::default()).unwrap()[0].is_none());
}

/// An identity whose backward gives so many gradients, of the wrong shape.
struct Wrong(usize);

impl CustomOp for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        _: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(inputs[0].device().full([3], 1.0)?); self.0])
    }
}

#[test]
fn errors_name_the_op() {
    let device = Device::naive();
    let error = |op: Wrong| {
        let mut tape = Tape::recording(&device);
        let x = tape.leaf(device.full([2], 1.0).unwrap());
        let y = tape.custom(op, &[&x]).unwrap().remove(0);
        let seed = device.full([2], 1.0).unwrap();
        let gradients = &mut Gradients::default();
        tape.backward_from(&[(y, seed)], &[x], gradients).unwrap_err().to_string()
    };
    assert_eq!(error(Wrong(2)), "wrong: 2 gradients for 1 inputs");
    assert_eq!(error(Wrong(1)), "wrong: gradient has shape [3], expected [2]");
    let elsewhere = Var::constant(Device::naive().full([2], 1.0).unwrap());
    let error = Tape::inference(&device).custom(SquaredRelu, &[&elsewhere]).unwrap_err();
    assert!(error.to_string().starts_with("squared_relu: input is on naive"));
}

/// `y = 3 x`, whose backward pass needs neither.
struct Triple;

impl CustomOp for Triple {
    fn name(&self) -> &'static str {
        "triple"
    }

    fn reads_values(&self) -> bool {
        false
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![zip(inputs[0], inputs[0], |x, _| 3.0 * x)?])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        assert!(inputs[0].is_absent() && outputs[0].is_absent());
        assert_eq!((inputs[0].dims(), outputs[0].dims()), (&[2][..], &[2][..]));
        Ok(vec![Some(zip(grads[0], grads[0], |d, _| 3.0 * d)?)])
    }
}

#[test]
fn unread_values_are_not_kept() {
    let device = Device::naive();
    let mut tape = Tape::recording(&device);
    let x = tape.leaf(device.full([2], 2.0).unwrap());
    let y = tape.custom(Triple, &[&x]).unwrap().remove(0);
    assert_eq!(y.value().to_f32().unwrap(), [6.0, 6.0]);
    let seed = device.full([2], 1.0).unwrap();
    let found = tape.backward_from(&[(y, seed)], &[x], &mut Gradients::default()).unwrap();
    assert_eq!(found[0].as_ref().unwrap().to_f32().unwrap(), [3.0, 3.0]);
}
