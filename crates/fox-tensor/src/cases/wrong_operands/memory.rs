//! Wrong operands of copies, sums and transfers.

use super::{Calls, Content, Operand, real};
use crate::{Blend, DType, IdRange, MatrixStack, Result, StackedMatrix, Tensor};

const ANY: Operand = Operand { fixed_rank: false, ..real("input", &[3, 4], &[]) };
const INTS: Operand =
    Operand { fixed_rank: false, content: Content::Ids(9), ..real("input", &[3], &[]) };

pub(super) fn calls(calls: &mut Calls<'_>) -> Result<()> {
    // Packed weights are read by downloads.
    let any = Operand { content: Content::Packable, ..ANY };
    calls.op("download", &[any], |b, t| b.download(&t[0], &mut [0.0; 12]))?;
    calls.op("download_f64", &[any], |b, t| b.download_f64(&t[0]))?;
    let add = [real("acc", &[3, 4], &[0, 1]), real("x", &[3, 4], &[0, 1])];
    calls.op("add", &add, |b, t| b.add(t[0].clone(), &t[1]))?;
    calls.op("sum_squares", &[ANY], |b, t| b.sum_squares(&[&t[0]]))?;
    calls.op("sum_squares_each", &[ANY], |b, t| b.sum_squares_each(&[&t[0]]))?;
    let rows = [real("src", &[5, 4], &[1]), real("dst", &[3, 4], &[1])];
    let rows = rows.map(|operand| Operand { fixed_rank: false, ..operand });
    calls.op("copy_rows", &rows, |b, t| b.copy_rows(&t[0], 1, &mut t[1].clone(), 0, 3))?;
    let columns = [real("src", &[5, 8], &[]), real("dst", &[3, 4], &[])];
    let columns = columns.map(|operand| Operand { fixed_rank: false, ..operand });
    calls.op("copy_columns", &columns, |b, t| {
        b.copy_columns(&t[0], (1, 4), &mut t[1].clone(), 0, 3)
    })?;
    let optimizer = [
        real("param", &[3, 4], &[0, 1]),
        real("grad", &[3, 4], &[0, 1]),
        real("m", &[3, 4], &[0, 1]),
        real("v", &[3, 4], &[0, 1]),
    ];
    let step = crate::AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.9,
        eps: 1e-8,
        weight_decay: 0.0,
        step: 1,
        grad_scale: 1.0,
    };
    calls.op("adamw", &optimizer, |b, t| {
        let [mut param, mut m, mut v] = [0, 2, 3].map(|i| t[i].clone());
        b.adamw(&mut param, &t[1], &mut m, &mut v, &step)
    })?;
    calls.op("adamw_all", &optimizer, |b, t| {
        let [mut param, mut m, mut v] = [0, 2, 3].map(|i| t[i].clone());
        let (param, m, v) = (&mut param, &mut m, &mut v);
        b.adamw_all(&mut [crate::ParamUpdate { param, grad: &t[1], m, v, step }])
    })?;
    let pair = [real("y", &[3, 4], &[0, 1]), real("x", &[3, 4], &[0, 1])];
    calls.op("blend", &pair, |b, t| {
        let mut y = t[0].clone();
        b.blend(&mut [Blend::new(&mut y, &t[1], 0.5, 0.5)?])
    })?;
    let matrices =
        vec![StackedMatrix { rows: 1, factor: 1.0 }, StackedMatrix { rows: 2, factor: 1.0 }];
    calls.op("orthogonalize", &[real("x", &[3, 4], &[0])], |b, t| {
        let mut x = t[0].clone();
        b.orthogonalize(&mut [MatrixStack::new(&mut x, matrices.clone())?], 2)
    })?;
    arguments(calls)
}

/// Lengths, rows, columns and tensors that were exchanged after their pair was made.
fn arguments(calls: &mut Calls<'_>) -> Result<()> {
    let b = calls.device.backend();
    let (x, narrow) = (calls.tensor(&[5, 8])?, calls.tensor(&[3, 4])?);
    let ints = INTS.on(calls.device, INTS.dims)?;
    calls.must_fail(|| "download to a short slice".into(), b.download(&x, &mut [0.0; 39]));
    calls.must_fail(|| "download to a long slice".into(), b.download(&x, &mut [0.0; 41]));
    calls.must_fail(|| "download of integers".into(), b.download(&ints, &mut [0.0; 3]));
    calls.must_fail(|| "download_i32 of reals".into(), b.download_i32(&x));
    let range = IdRange { vocab: 9, ignore: None };
    calls.must_fail(|| "id_out_of_range of reals".into(), b.id_out_of_range(&x, range));
    for other in calls.others {
        let (mut there, ids) = (other.full([3, 4], 0.0)?, INTS.on(other, INTS.dims)?);
        calls.must_fail(|| format!("fill on {other}"), b.fill(&mut there, 1.0));
        calls.must_fail(|| format!("download_i32 on {other}"), b.download_i32(&ids));
        calls.must_fail(|| format!("id_out_of_range on {other}"), b.id_out_of_range(&ids, range));
    }
    for (src_row, dst_row, count) in
        [(4, 0, 2), (0, 2, 2), (6, 0, 0), (usize::MAX, 0, 2), (0, 0, usize::MAX)]
    {
        let name = || format!("copy_rows from {src_row} to {dst_row}, {count} rows");
        let mut dst = calls.tensor(&[3, 8])?;
        calls.must_fail(name, b.copy_rows(&x, src_row, &mut dst, dst_row, count));
    }
    let bad = [
        (0, 8, 0, 1),
        (0, 2, 0, 1),
        (4, 0, 0, 2),
        (0, 0, 3, 1),
        (0, usize::MAX - 3, 0, 1),
        (usize::MAX, 0, 0, 1),
    ];
    for (row, column, dst_row, count) in bad {
        let name = || format!("copy_columns from {row}, {column} to {dst_row}, {count} rows");
        let mut dst = narrow.clone();
        calls.must_fail(name, b.copy_columns(&x, (row, column), &mut dst, dst_row, count));
    }
    let mut empty = calls.device.uninit([3, 0], DType::F32)?;
    calls.must_fail(
        || "copy_columns to no columns".into(),
        b.copy_columns(&x, (0, 0), &mut empty, 0, 1),
    );
    // The tensors of a pair are behind `&mut`, so they can be exchanged after its validation.
    let exchange = |target: &mut Tensor| std::mem::replace(target, x.clone());
    let mut y = narrow.clone();
    let mut blend = Blend::new(&mut y, &narrow, 0.5, 0.5)?;
    exchange(blend.pair().1);
    calls.must_fail(|| "blend of an exchanged tensor".into(), b.blend(&mut [blend]));
    let mut y = narrow.clone();
    let mut stack = MatrixStack::new(&mut y, vec![StackedMatrix { rows: 3, factor: 1.0 }])?;
    exchange(stack.x());
    calls.must_fail(
        || "orthogonalize of an exchanged tensor".into(),
        b.orthogonalize(&mut [stack], 1),
    );
    Ok(())
}
