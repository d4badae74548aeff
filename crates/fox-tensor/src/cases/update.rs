//! The optimizer, and moving data about.

use super::{Args, Case, Output, round};
use crate::{AdamW, DType, Result, Tape, WeightFormat};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(1, 1), (113, 7), (799, 3)] {
        cases.extend([adamw(rows, cols, 0.0, 1.0, false), adamw(rows, cols, 0.1, 0.37, false)]);
    }
    cases.push(adamw(72, 40, 0.1, 1.0, true));
    cases.push(
        Case::new("sum_squares/several", sum_squares)
            .constant("a", &[1], vec![3.0])
            .constant("b", &[799, 3], (0..2397).map(|i| round(f64::from(i).sin())).collect())
            .constant("c", &[113, 203], (0..22939).map(|i| round(f64::from(i).cos())).collect()),
    );
    cases.push(
        Case::new("rows/copy+slice+fill", rows).normal("x", &[113, 3]).normal("y", &[65, 3]).int(
            "ids",
            &[17],
            (0..17).map(|i| i * i - 40).collect(),
        ),
    );
    cases
}

/// With `packed`, the parameter is kept as the device likes weights best.
fn adamw(rows: usize, cols: usize, weight_decay: f32, grad_scale: f32, packed: bool) -> Case {
    let kind = if packed { "packed" } else { "plain" };
    let name = format!("adamw/{kind}/decay {weight_decay}/{rows}x{cols}");
    let case = Case::new(name, move |tape, args| {
        let backend = tape.device().backend();
        let mut p = args.tensor("p")?.clone();
        if packed {
            p = backend.pack_weight(&p, WeightFormat::F32)?;
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
    let grads = case.stream("grads").normals(5 * rows * cols);
    let p = case.stream("p").normals(rows * cols);
    case.constant("p", &[rows, cols], p).constant("grads", &[5 * rows, cols], grads)
}

fn sum_squares(tape: &mut Tape<'static>, args: &Args<'_>) -> Result<Vec<Output>> {
    let backend = tape.device().backend();
    let (a, b, c) = (args.tensor("a")?, args.tensor("b")?, args.tensor("c")?);
    Ok(vec![
        Output::Plain("none", vec![backend.sum_squares(&[])?]),
        Output::Plain("one", vec![backend.sum_squares(&[a])?]),
        Output::Plain("all", vec![backend.sum_squares(&[a, b, c])?]),
    ])
}

fn rows(tape: &mut Tape<'static>, args: &Args<'_>) -> Result<Vec<Output>> {
    let device = tape.device();
    let (x, y, ids) = (args.tensor("x")?, args.tensor("y")?, args.tensor("ids")?);
    // The destination is shared with the input and must get storage of its own.
    let mut patched = x.clone();
    device.backend().copy_rows(y, 3, &mut patched, 50, 61)?;
    device.backend().copy_rows(y, 0, &mut patched, 0, 0)?;
    let mut some_ids = ids.slice_rows(4, 9)?;
    device.backend().copy_rows(ids, 16, &mut some_ids, 8, 1)?;
    let ints = |x: Vec<i32>| x.into_iter().map(f64::from).collect();
    Ok(vec![
        Output::Plain("patched", patched.to_f64()?),
        Output::Plain("untouched", x.to_f64()?),
        Output::Plain("slice", x.slice_rows(112, 1)?.to_f64()?),
        Output::Plain("empty slice", x.slice_rows(113, 0)?.to_f64()?),
        Output::Plain("ids", ints(some_ids.to_i32()?)),
        Output::Plain("zeros", device.zeros([7, 9], DType::F32)?.to_f64()?),
        Output::Plain("zero ids", ints(device.zeros([5], DType::I32)?.to_i32()?)),
        Output::Plain("full", device.full([3, 5], -0.75)?.to_f64()?),
    ])
}
