//! Cases of copies, slices and fills.

use super::{Args, Case, Output};
use crate::{DType, Result, Tape};

pub(super) fn cases() -> Vec<Case> {
    let case = Case::new("rows/copy+slice+fill", rows).normal("x", &[113, 3]).normal("y", &[65, 3]);
    vec![case.int("ids", &[17], (0..17).map(|i| i * i - 40).collect())]
}

fn rows(tape: &mut Tape<'static>, args: &Args<'_>) -> Result<Vec<Output>> {
    let device = tape.device();
    let (x, y, ids) = (args.tensor("x")?, args.tensor("y")?, args.tensor("ids")?);
    // The destination shares the storage of the input, which must not change.
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
