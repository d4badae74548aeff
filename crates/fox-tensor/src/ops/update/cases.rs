//! The optimizer.

use crate::cases::{Args, Case, Output, round};
use crate::{AdamW, Blend, DType, Result, Tape, WeightFormat};

pub(crate) fn cases() -> Vec<Case> {
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
    let [x, z] = ["x", "z"].map(|name| case.stream(name).normals(rows * cols));
    case.constant("x", &[rows, cols], x).constant("z", &[rows, cols], z)
}

/// With `packed`, the parameter is kept as the device likes weights best.
fn adamw(rows: usize, cols: usize, weight_decay: f32, grad_scale: f32, packed: bool) -> Case {
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
