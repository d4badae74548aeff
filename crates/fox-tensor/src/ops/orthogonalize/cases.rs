use super::{MatrixStack, StackedMatrix, newton_schulz};
use crate::cases::{Args, Case, Output, round};
use crate::{DType, Result, Tape, Tensor};

/// Steps that everybody takes.
const STEPS: usize = 5;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("square", &[&[48]], 48),
        case("wide", &[&[24]], 113),
        case("tall", &[&[113]], 29),
        case("row", &[&[1]], 203),
        case("stacked", &[&[40, 40, 3, 17]], 56),
        // Equal shapes, which a device may take together, and one of another.
        case("several", &[&[32, 32], &[16], &[32], &[48, 16]], 40),
        case("large", &[&[160]], 136),
    ]
}

/// Matrices of one width: for every tensor the rows of its parts. The factors differ.
fn case(kind: &str, tensors: &'static [&'static [usize]], cols: usize) -> Case {
    let rows: usize = tensors.iter().flat_map(|parts| parts.iter()).sum();
    let case = Case::new(format!("orthogonalize/{kind}/{rows}x{cols}"), move |tape, args| {
        run(tape, args, tensors)
    });
    // Scales that differ by far: the result depends on the direction alone.
    let mut data = case.stream("m").normals(rows * cols);
    let parts = tensors.iter().flat_map(|parts| parts.iter());
    let mut rest = &mut data[..];
    for (i, part) in parts.enumerate() {
        let (own, after) = rest.split_at_mut(part * cols);
        let scale = [1.0, 1e-12, 1e9][i % 3];
        own.iter_mut().for_each(|x| *x = round(*x * scale));
        rest = after;
    }
    case.constant("m", &[rows, cols], data)
}

fn run(tape: &mut Tape<'static>, args: &Args<'_>, tensors: &[&[usize]]) -> Result<Vec<Output>> {
    let (backend, m) = (tape.device().backend(), args.tensor("m")?);
    if let Some(rounding) = args.rounding() {
        return rounded(m, tensors, rounding);
    }
    let mut first = 0;
    let mut own = Vec::new();
    for parts in tensors {
        let rows = parts.iter().sum();
        own.push(m.slice_rows(first, rows)?);
        first += rows;
    }
    let before = own[0].clone();
    let stacks = own.iter_mut().zip(tensors);
    let stacks: Result<Vec<_>> = stacks.map(|(x, rows)| MatrixStack::new(x, parts(rows))).collect();
    backend.orthogonalize(&mut stacks?, STEPS)?;
    let mut zeros = tape.device().zeros([9, 5], DType::F32)?;
    let whole = vec![StackedMatrix { rows: 9, factor: 1.0 }];
    backend.orthogonalize(&mut [MatrixStack::new(&mut zeros, whole)?], STEPS)?;
    let mut result = Vec::new();
    for x in &own {
        result.extend(x.to_f64()?);
    }
    Ok(vec![
        Output::Plain("result", result),
        // Shared with a stack, which must have got storage of its own.
        Output::Plain("before", before.to_f64()?),
        Output::Plain("zeros", zeros.to_f64()?),
    ])
}

/// The parts of a tensor, each with another factor.
fn parts(rows: &[usize]) -> Vec<StackedMatrix> {
    let part = |(i, &rows): (usize, &usize)| StackedMatrix { rows, factor: 0.5 + i as f32 };
    rows.iter().enumerate().map(part).collect()
}

/// The result where products are rounded between the steps, not only their operands: five steps make more
/// of that than one op usually does.
fn rounded(m: &Tensor, tensors: &[&[usize]], rounding: fn(f64) -> f64) -> Result<Vec<Output>> {
    let (cols, mut result) = (m.cols(), m.to_f64()?);
    let before = result[..tensors[0].iter().sum::<usize>() * cols].to_vec();
    let mut rest = &mut result[..];
    for part in tensors.iter().flat_map(|rows| parts(rows)) {
        let (x, after) = rest.split_at_mut(part.rows * cols);
        newton_schulz(x, part.rows, cols, STEPS, rounding);
        x.iter_mut().for_each(|x| *x *= f64::from(part.factor));
        rest = after;
    }
    let outputs = [("result", result), ("before", before), ("zeros", vec![0.0; 45])];
    Ok(outputs.map(|(name, values)| Output::Plain(name, values)).into())
}
