//! The rows before the first one of a rank, for ops that look back a fixed number of rows.

use fox_tensor::{CustomOp, DType, Result, Tensor};

use super::SequenceShard;
use super::transfer::arranged;
use crate::Error;

/// The last rows of every `u: [R, W]` to the next rank, those of the rank before as `[chunks, W]`.
pub(super) struct RowBefore(pub SequenceShard);

impl CustomOp for RowBefore {
    fn name(&self) -> &'static str {
        "preceding_rows"
    }

    fn reads_values(&self) -> bool {
        false
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        rows_before(&self.0, inputs, 1)
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let continued = self.0.0.split.continued(self.0.0.context.index());
        let home = |grad: &&Tensor| {
            let rows = continued.iter().enumerate().map(|(n, &i)| [i, n, 1]);
            arranged(grad, continued.len(), DType::F32, rows)
        };
        let home = match continued.is_empty() {
            true => Vec::new(),
            false => grads.iter().map(home).collect::<Result<_>>()?,
        };
        let zeros = |u: &&Tensor| u.device().zeros(u.shape(), DType::F32);
        let mut du = inputs.iter().map(zeros).collect::<Result<Vec<_>>>()?;
        add_returned(&self.0, home, &mut du, 1)?;
        Ok(du.into_iter().map(Some).collect())
    }
}

/// The `count` rows before the first one of every chunk, oldest first: `[chunks * count, W]` for each `u: [R, W]`. Zeros
/// before the start of a sequence.
pub(super) fn rows_before(
    part: &SequenceShard,
    u: &[&Tensor],
    count: usize,
) -> Result<Vec<Tensor>> {
    let (split, index) = (&part.0.split, part.0.context.index());
    let (crossing, continued) = (split.crossing(index), split.continued(index));
    let mut last = Vec::with_capacity(crossing.len());
    for (n, &i) in crossing.iter().enumerate() {
        let chunk = split.chunks(index)[i];
        if chunk.len < count && chunk.position > 0 {
            // The older rows are at a rank before this one.
            return part.record_failure(Err(Error::Refused(format!(
                "rank {index} holds {} tokens of a sequence, and its layers look back {count}; \
                 use fewer ranks per sequence or longer sequences",
                chunk.len
            ))));
        }
        let known = chunk.len.min(count);
        last.push([chunk.row + chunk.len - known, (n + 1) * count - known, known]);
    }
    let (mut sent, mut expected) = (Vec::new(), Vec::new());
    if !last.is_empty() {
        let rows = last.len() * count;
        let last = |u: &&Tensor| arranged(u, rows, u.dtype(), last.iter().copied());
        sent.push((index + 1, u.iter().map(last).collect::<Result<_>>()?));
    }
    if !continued.is_empty() {
        let rows = continued.len() * count;
        let layout = u.iter().map(|u| ([rows, u.cols()].into(), u.dtype()));
        expected.push((index - 1, layout.collect()));
    }
    let transfer = part.begin(u[0].device(), sent, expected)?;
    let received = part.finish(transfer)?.pop();
    let rows = split.chunks(index).len() * count;
    let Some(received) = received else {
        return u.iter().map(|u| u.device().zeros([rows, u.cols()], u.dtype())).collect();
    };
    let placed = |x: &Tensor| {
        let places = continued.iter().enumerate().map(|(n, &i)| [n * count, i * count, count]);
        arranged(x, rows, x.dtype(), places)
    };
    received.iter().map(placed).collect()
}

/// Returns the gradients `home` of the rows that came from the rank before, `[continued * count, W]` in f32, and adds those
/// that come back to every `du: [R, W]` in f32. Empty `home`: no rows came.
pub(super) fn add_returned(
    part: &SequenceShard,
    home: Vec<Tensor>,
    du: &mut [Tensor],
    count: usize,
) -> Result<()> {
    let (split, index) = (&part.0.split, part.0.context.index());
    let (crossing, device) = (split.crossing(index), du[0].device().clone());
    let (mut sent, mut expected) = (Vec::new(), Vec::new());
    if !home.is_empty() {
        sent.push((index - 1, home));
    }
    if !crossing.is_empty() {
        let rows = crossing.len() * count;
        let layout = du.iter().map(|du| ([rows, du.cols()].into(), DType::F32));
        expected.push((index + 1, layout.collect()));
    }
    let transfer = part.begin(&device, sent, expected)?;
    let received = part.finish(transfer)?;
    for (du, returned) in du.iter_mut().zip(received.iter().flatten()) {
        for (n, &i) in crossing.iter().enumerate() {
            let chunk = split.chunks(index)[i];
            let known = chunk.len.min(count);
            let first = chunk.row + chunk.len - known;
            let returned = returned.slice_rows((n + 1) * count - known, known)?;
            let sum = device.backend().add(du.slice_rows(first, known)?, &returned)?;
            device.backend().copy_rows(&sum, 0, du, first, known)?;
        }
    }
    Ok(())
}
