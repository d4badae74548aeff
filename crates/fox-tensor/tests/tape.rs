//! The tape: accumulation, recomputation, inference, and who gets a gradient.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::cases::{self, Case, Rng};
use fox_tensor::{Activation, Device, Gradients, ParamId, Result, Tape, Tensor, Var};

fn normal(device: &Device, seed: u64, dims: &[usize]) -> Tensor {
    let data = Rng::new(seed).normals(dims.iter().product());
    device.from_f64(&data, dims).unwrap()
}

fn values(x: Option<&Tensor>) -> Vec<f64> {
    x.unwrap().to_f64().unwrap()
}

#[test]
fn gradients_accumulate_over_uses_and_passes() {
    let device = Device::naive();
    let (x, w) = (normal(&device, 1, &[5, 4]), normal(&device, 2, &[4, 4]));
    let (id, dy) = (ParamId(3), normal(&device, 3, &[5, 4]));
    let pass = |uses: usize, gradients: &mut Gradients| {
        let mut tape = Tape::recording(&device);
        let (w, x) = (Var::param(id, w.clone()), tape.leaf(x.clone()));
        let seeds: Vec<_> =
            (0..uses).map(|_| (tape.linear(&x, &w, None).unwrap(), dy.clone())).collect();
        values(tape.backward_from(&seeds, &[x], gradients).unwrap()[0].as_ref())
    };
    let (mut once, mut three, mut passes) = Default::default();
    let dx = pass(1, &mut once);
    let dx3 = pass(3, &mut three);
    (0..3).for_each(|_| drop(pass(1, &mut passes)));
    let triple = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| 3.0 * x).collect() };
    assert!(cases::relative_error(&dx3, &triple(&dx)) < 1e-14);
    let want = triple(&values(once.get(id)));
    assert!(cases::relative_error(&values(three.get(id)), &want) < 1e-14);
    assert!(cases::relative_error(&values(passes.get(id)), &want) < 1e-14);
    assert_eq!(passes.iter().map(|(id, _)| id).collect::<Vec<_>>(), [id]);
    passes.clear();
    assert!(passes.get(id).is_none());
}

#[test]
fn seeds_of_one_variable_are_summed() {
    let device = Device::naive();
    let (x, w, dy) =
        (normal(&device, 1, &[5, 4]), normal(&device, 2, &[4, 4]), normal(&device, 3, &[5, 4]));
    let pass = |count: usize| {
        let mut tape = Tape::recording(&device);
        let (w, x) = (Var::constant(w.clone()), tape.leaf(x.clone()));
        let y = tape.linear(&x, &w, None).unwrap();
        let seeds = vec![(y, dy.clone()); count];
        let grads = tape.backward_from(&seeds, &[x], &mut Gradients::default()).unwrap();
        values(grads[0].as_ref())
    };
    let twice: Vec<f64> = pass(1).iter().map(|x| 2.0 * x).collect();
    assert!(cases::relative_error(&pass(2), &twice) < 1e-14);
}

#[test]
fn accumulation_copies_a_shared_gradient() {
    // h and delta get the same tensor as gradient; adding to one must not move the other.
    let device = Device::naive();
    let mut tape = Tape::recording(&device);
    let h = tape.leaf(normal(&device, 1, &[3, 4]));
    let delta = tape.leaf(normal(&device, 2, &[3, 4]));
    let w = Var::constant(normal(&device, 3, &[4]));
    let (sum, y) = tape.add_rms_norm(&h, Some(&delta), &w, 1e-6).unwrap();
    let again = tape.gated_norm(&h, None, None, 1, 1e-6, Activation::Silu).unwrap();
    let ones = device.full([3, 4], 1.0).unwrap();
    let seeds = [(sum, ones.clone()), (y, ones.clone()), (again, ones)];
    let grads = tape.backward_from(&seeds, &[h, delta], &mut Gradients::default()).unwrap();
    let (dh, ddelta) = (values(grads[0].as_ref()), values(grads[1].as_ref()));
    for (dh, ddelta) in dh.iter().zip(&ddelta) {
        assert!((dh - ddelta - 1.0).abs() < 1e-14);
    }
}

fn case(name: &str) -> Case {
    cases::all().into_iter().find(|case| case.name.starts_with(name)).unwrap()
}

#[test]
fn checkpointing_is_bit_exact() {
    let device = Device::naive();
    let plain = cases::run(&case("composed/plain"), &device).unwrap();
    let again = cases::run(&case("composed/checkpointed"), &device).unwrap();
    assert_eq!(plain.outputs, again.outputs);
    for (plain, again) in plain.gradients.iter().zip(&again.gradients) {
        let error = cases::relative_error(&again.1, &plain.1);
        assert!(error < 1e-14, "{}: {error:e}", plain.0);
    }
}

/// Three layers, each a parameter of the model.
fn stack(tape: &mut Tape<'static>, params: &[Tensor], x: &Var, recompute: bool) -> Result<Var> {
    let mut x = x.clone();
    for (i, w) in params.iter().enumerate() {
        let w = Var::param(ParamId(i), w.clone());
        let block = move |tape: &mut Tape<'static>, inputs: &[Var]| {
            let up = tape.linear(&inputs[0], &w, None)?;
            Ok(vec![tape.glu(&up, Activation::Silu)?])
        };
        x = if recompute {
            // A checkpoint inside a checkpoint is recomputed twice and still the same.
            let outer = move |tape: &mut Tape<'static>, inputs: &[Var]| {
                tape.checkpoint(inputs, block.clone())
            };
            tape.checkpoint(&[x], outer)?.remove(0)
        } else {
            block(tape, &[x])?.remove(0)
        };
    }
    Ok(x)
}

#[test]
fn checkpointing_saves_memory_and_reaches_parameters() {
    let device = Device::naive();
    let params: Vec<Tensor> = (0..3).map(|i| normal(&device, i, &[32, 16])).collect();
    let (x, dy) = (normal(&device, 9, &[50, 16]), normal(&device, 10, &[50, 16]));
    let run = |recompute: bool| {
        let mut gradients = Gradients::default();
        let mut tape = Tape::recording(&device);
        let leaf = tape.leaf(x.clone());
        let y = stack(&mut tape, &params, &leaf, recompute).unwrap();
        let held = device.memory().in_use;
        let dx = tape.backward_from(&[(y, dy.clone())], &[leaf], &mut gradients).unwrap();
        let grads: Vec<Vec<f64>> = gradients.iter().map(|(_, g)| values(Some(g))).collect();
        (values(dx[0].as_ref()), grads, held)
    };
    let (dx, grads, held) = run(false);
    let (dx_again, grads_again, held_again) = run(true);
    assert_eq!(grads.len(), 3);
    assert_eq!((dx, grads), (dx_again, grads_again));
    // The plain tape keeps `up` of three layers, [50, 32] in f64 each, on top.
    assert_eq!(held - held_again, 3 * 50 * 32 * 8);
}

#[test]
fn checkpoint_adds_gradients_from_inside_and_outside() {
    let device = Device::naive();
    let block = |tape: &mut Tape<'static>, inputs: &[Var]| {
        Ok(vec![tape.glu(&inputs[0], Activation::Silu)?])
    };
    let run = |recompute: bool| {
        let mut tape = Tape::recording(&device);
        let x = tape.leaf(normal(&device, 1, &[3, 8]));
        let before = tape.glu(&x, Activation::Sigmoid).unwrap();
        let inputs = [x.clone()];
        let inside = if recompute {
            tape.checkpoint(&inputs, block).unwrap().remove(0)
        } else {
            block(&mut tape, &inputs).unwrap().remove(0)
        };
        let after = tape.glu(&x, Activation::Sigmoid).unwrap();
        let seeds: Vec<_> = [before, inside, after]
            .into_iter()
            .zip(2..)
            .map(|(y, seed)| (y, normal(&device, seed, &[3, 4])))
            .collect();
        let grads = tape.backward_from(&seeds, &[x], &mut Gradients::default()).unwrap();
        values(grads[0].as_ref())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn inference_saves_no_activations() {
    let device = Device::naive();
    let params: Vec<Tensor> = (0..3).map(|i| normal(&device, i, &[32, 16])).collect();
    let x = normal(&device, 9, &[50, 16]);
    let before = device.memory().in_use;
    let mut tape = Tape::inference(&device);
    assert!(!tape.is_recording());
    let leaf = tape.leaf(x.clone());
    let y = stack(&mut tape, &params, &leaf, false).unwrap();
    assert_eq!(device.memory().in_use - before, y.value().len() * 8);
    let mut gradients = Gradients::default();
    let dy = normal(&device, 10, &[50, 16]);
    let dx = tape.backward_from(&[(y, dy)], &[leaf], &mut gradients).unwrap();
    assert!(dx[0].is_none());
    assert_eq!(gradients.iter().count(), 0);
}

#[test]
fn frees_memory_of_dropped_tensors() {
    let device = Device::naive();
    for case in cases::all().into_iter().step_by(7) {
        cases::run(&case, &device).unwrap();
        assert_eq!(device.memory().in_use, 0, "{}", case.name);
    }
    assert!(device.memory().peak > 0);
}

#[test]
fn inference_matches_training_outputs() {
    let device = Device::naive();
    for case in cases::all().into_iter().step_by(3) {
        let (training, inference) =
            (cases::run(&case, &device).unwrap(), cases::run_forward(&case, &device).unwrap());
        assert_eq!(training.outputs, inference.outputs, "{}", case.name);
        assert!(inference.gradients.is_empty());
    }
}

/// An op whose only trained operand is a minor one (a bias, gates, norm weights) passes gradients.
#[test]
fn gradients_reach_optional_operands_alone() {
    let device = Device::naive();
    for mut full in cases::all() {
        // One size of each kind of case is enough; a chain of ops is none.
        let chosen = ["113x", "26x"].iter().any(|size| full.name.contains(size));
        if !chosen || full.name.starts_with("rows") {
            continue;
        }
        let want = cases::run(&full, &device).unwrap();
        let trained: Vec<&'static str> =
            full.inputs.iter().filter(|input| input.grad).map(|input| input.name).collect();
        for name in trained {
            full.inputs.iter_mut().for_each(|input| input.grad = input.name == name);
            let got = cases::run(&full, &device).unwrap();
            let want = want.gradients.iter().find(|g| g.0 == name).unwrap();
            assert_eq!(&got.gradients[0].1, &want.1, "{}: d {name}", full.name);
        }
    }
}

#[test]
fn unused_values_have_no_gradient() {
    let device = Device::naive();
    let mut tape = Tape::recording(&device);
    let used = tape.leaf(normal(&device, 1, &[3, 4]));
    let unused = tape.leaf(normal(&device, 2, &[3, 4]));
    let y = tape.glu(&used, Activation::Silu).unwrap();
    let _dangling = tape.glu(&unused, Activation::Silu).unwrap();
    let dy = device.full([3, 2], 1.0).unwrap();
    let grads = tape.backward_from(&[(y, dy)], &[used, unused], &mut Gradients::default()).unwrap();
    assert!(grads[0].is_some() && grads[1].is_none());
}

#[test]
fn tape_does_not_keep_fetched_weights() {
    let device = Device::naive();
    let (x, w) = (normal(&device, 1, &[5, 4]), normal(&device, 2, &[4, 4]));
    let (id, dy) = (ParamId(0), normal(&device, 3, &[5, 4]));
    let pass = |w: Var, gradients: &mut Gradients| {
        let mut tape = Tape::recording(&device);
        let x = tape.leaf(x.clone());
        let y = tape.linear(&x, &w, None).unwrap();
        let value = w.value().clone();
        drop(w);
        // The original, this clone, and the tape's if it keeps one.
        let shared = value.is_shared();
        let dx = tape.backward_from(&[(y, dy.clone())], &[x], gradients).unwrap();
        (values(dx[0].as_ref()), shared)
    };
    let (mut stored, mut fetched) = (Gradients::default(), Gradients::default());
    let copy = |w: &Tensor| device.from_f64(&w.to_f64().unwrap(), w.shape()).unwrap();
    let (want, kept) = pass(Var::param(id, copy(&w)), &mut stored);
    let again = w.clone();
    let (found, held) =
        pass(Var::fetched_param(Some(id), copy(&w), move || Ok(again.clone())), &mut fetched);
    assert_eq!((want, kept), (found, true));
    assert!(!held, "the tape keeps a fetched weight");
    assert_eq!(values(stored.get(id)), values(fetched.get(id)));
    let (again, mut none) = (w.clone(), Gradients::default());
    pass(Var::fetched_param(None, copy(&w), move || Ok(again.clone())), &mut none);
    assert_eq!(none.iter().count(), 0, "a frozen weight has no gradient");
}

#[test]
fn counting_gradients_keeps_none() {
    let device = Device::naive();
    let (x, w) = (normal(&device, 1, &[5, 4]), normal(&device, 2, &[4, 4]));
    let mut tape = Tape::recording(&device);
    let (x, w) = (tape.leaf(x), Var::param(ParamId(1), w));
    let seeds: Vec<_> = (0..2)
        .map(|seed| (tape.linear(&x, &w, None).unwrap(), normal(&device, seed, &[5, 4])))
        .collect();
    let mut gradients = Gradients::counting();
    tape.backward_from(&seeds, &[x], &mut gradients).unwrap();
    assert_eq!(gradients.term_counts(), [0, 2]);
    assert_eq!(gradients.iter().count(), 0);
}

#[test]
fn ops_reject_absent_tensors() {
    let device = Device::naive();
    let absent = Tensor::absent([4, 4], &device);
    assert_eq!((absent.dims(), absent.is_absent()), (&[4, 4][..], true));
    let mut tape = Tape::inference(&device);
    let x = Var::constant(normal(&device, 1, &[5, 4]));
    let error = tape.linear(&x, &Var::constant(absent.clone()), None).unwrap_err().to_string();
    assert!(error.contains("is not on this rank"), "{error}");
    assert!(absent.to_f32().is_err() && absent.slice_rows(0, 1).is_err());
}
