//! The row before the first one, for the token shift.

use fox_tensor::{CustomOp, DType, Result, Tape, Tensor, Var};

use super::SequenceShard;

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
        let (u, inner) = (inputs[0], &*self.0.0);
        let (split, context, width) = (&inner.split, &inner.context, u.cols());
        let index = context.index();
        let mut last = Vec::new();
        for i in split.crossing(index) {
            let chunk = split.chunks(index)[i];
            last.extend(u.slice_rows(chunk.row + chunk.len - 1, 1)?.to_f32()?);
        }
        let received = self.0.record_failure(context.step(|ranks| {
            if index + 1 < context.size() {
                ranks.send(index + 1, &last);
            }
            if index > 0 { ranks.receive::<f32>(index - 1) } else { Ok(Vec::new()) }
        }))?;
        let chunks = split.chunks(index).len();
        let mut rows = vec![0.0; chunks * width];
        for (i, row) in split.continued(index).into_iter().zip(received.chunks_exact(width)) {
            rows[i * width..][..width].copy_from_slice(row);
        }
        Ok(vec![u.device().from_f32(&rows, [chunks, width])?.to_activations()?])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (u, inner) = (inputs[0], &*self.0.0);
        let (split, context, width) = (&inner.split, &inner.context, u.cols());
        let (index, grads) = (context.index(), grads[0].to_f32()?);
        let home: Vec<f32> = split
            .continued(index)
            .into_iter()
            .flat_map(|i| grads[i * width..][..width].iter().copied())
            .collect();
        let received = self.0.record_failure(context.step(|ranks| {
            if index > 0 {
                ranks.send(index - 1, &home);
            }
            if index + 1 < context.size() {
                ranks.receive::<f32>(index + 1)
            } else {
                Ok(Vec::new())
            }
        }))?;
        let device = u.device();
        let mut du = device.zeros(u.shape(), DType::F32)?;
        for (i, row) in split.crossing(index).into_iter().zip(received.chunks_exact(width)) {
            let chunk = split.chunks(index)[i];
            let row = device.from_f32(row, [1, width])?;
            device.backend().copy_rows(&row, 0, &mut du, chunk.row + chunk.len - 1, 1)?;
        }
        Ok(vec![Some(du)])
    }
}
