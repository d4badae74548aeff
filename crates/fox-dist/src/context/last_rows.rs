//! The rows before the first one of a rank, for ops that look back a fixed number of rows.

use fox_tensor::{CustomOp, DType, Result, Tape, Tensor, Var};

use super::SequenceShard;
use crate::Error;

/// See [`PrecedingRows::preceding_row`](fox_tensor::PrecedingRows::preceding_row).
pub(super) fn preceding_row(part: &SequenceShard, tape: &mut Tape<'_>, u: &Var) -> Result<Var> {
    let mut rows = tape.custom(RowBefore(part.clone()), &[u])?;
    rows.pop().ok_or_else(|| fox_tensor::Error::Argument {
        op: "preceding_row",
        detail: "the op gave no rows".into(),
    })
}

/// The last rows of `u: [R, W]` to the next rank, those of the rank before as `[chunks, W]`.
struct RowBefore(SequenceShard);

impl CustomOp for RowBefore {
    fn name(&self) -> &'static str {
        "preceding_row"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![rows_before(&self.0, inputs[0], 1)?])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let u = inputs[0];
        let mut du = u.device().zeros(u.shape(), DType::F32)?;
        let index = self.0.0.context.index();
        let (grads, width) = (grads[0].to_f32()?, u.cols());
        let home = self.0.0.split.continued(index).into_iter();
        let home: Vec<f32> = home.flat_map(|i| grads[i * width..][..width].to_vec()).collect();
        add_returned(&self.0, &home, &mut du, 1)?;
        Ok(vec![Some(du)])
    }
}

/// The `count` rows before the first one of every chunk, oldest first: `[chunks * count, W]` for `u: [R, W]`. Zeros
/// before the start of a sequence.
pub(super) fn rows_before(part: &SequenceShard, u: &Tensor, count: usize) -> Result<Tensor> {
    let (split, context, width) = (&part.0.split, &part.0.context, u.cols());
    let index = context.index();
    let mut last = Vec::new();
    for i in split.crossing(index) {
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
        last.resize(last.len() + (count - known) * width, 0.0);
        last.extend(u.slice_rows(chunk.row + chunk.len - known, known)?.to_f32()?);
    }
    let received = part.record_failure(context.step(|ranks| {
        if index + 1 < context.size() {
            ranks.send(index + 1, &last);
        }
        if index > 0 { ranks.receive::<f32>(index - 1) } else { Ok(Vec::new()) }
    }))?;
    let (chunks, size) = (split.chunks(index).len(), count * width);
    let mut rows = vec![0.0; chunks * size];
    for (i, row) in split.continued(index).into_iter().zip(received.chunks_exact(size)) {
        rows[i * size..][..size].copy_from_slice(row);
    }
    u.device().from_f32(&rows, [chunks * count, width])?.to_activations()
}

/// Returns the gradients `home` of the rows that came from the rank before, `count` for every continued chunk, and adds
/// those that come back to `du: [R, W]` in f32.
pub(super) fn add_returned(
    part: &SequenceShard,
    home: &[f32],
    du: &mut Tensor,
    count: usize,
) -> Result<()> {
    let (split, context, width) = (&part.0.split, &part.0.context, du.cols());
    let (index, device) = (context.index(), du.device().clone());
    let received = part.record_failure(context.step(|ranks| {
        if index > 0 {
            ranks.send(index - 1, home);
        }
        if index + 1 < context.size() { ranks.receive::<f32>(index + 1) } else { Ok(Vec::new()) }
    }))?;
    for (i, rows) in split.crossing(index).into_iter().zip(received.chunks_exact(count * width)) {
        let chunk = split.chunks(index)[i];
        let known = chunk.len.min(count);
        let first = chunk.row + chunk.len - known;
        let rows = device.from_f32(&rows[(count - known) * width..], [known, width])?;
        let sum = device.backend().add(du.slice_rows(first, known)?, &rows)?;
        device.backend().copy_rows(&sum, 0, du, first, known)?;
    }
    Ok(())
}
