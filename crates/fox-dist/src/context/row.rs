//! The row before the first one, for the token shift.

use fox_tensor::{CustomOp, DType, Result, Tape, Tensor, Var};

use super::Part;

/// See [`PrecedingRows::preceding_row`](fox_tensor::PrecedingRows::preceding_row).
pub(super) fn preceding_row(part: &Part, tape: &mut Tape<'_>, u: &Var) -> Result<Var> {
    let mut rows = tape.custom(RowBefore(part.clone()), &[u])?;
    rows.pop().ok_or_else(|| fox_tensor::Error::Argument {
        op: "preceding_row",
        detail: "the op gave no rows".into(),
    })
}

/// The last rows of `u: [R, W]` to the next rank, those of the rank before as `[pieces, W]`.
struct RowBefore(Part);

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
            let piece = split.pieces(index)[i];
            last.extend(u.slice_rows(piece.row + piece.len - 1, 1)?.to_f32()?);
        }
        let came = self.0.keep_failure(context.step(|ranks| {
            if index + 1 < context.size() {
                ranks.send(index + 1, &last);
            }
            if index > 0 { ranks.receive::<f32>(index - 1) } else { Ok(Vec::new()) }
        }))?;
        let pieces = split.pieces(index).len();
        let mut rows = vec![0.0; pieces * width];
        for (i, row) in split.continued(index).into_iter().zip(came.chunks_exact(width)) {
            rows[i * width..][..width].copy_from_slice(row);
        }
        Ok(vec![u.device().from_f32(&rows, [pieces, width])?.to_activations()?])
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
        let came = self.0.keep_failure(context.step(|ranks| {
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
        for (i, row) in split.crossing(index).into_iter().zip(came.chunks_exact(width)) {
            let piece = split.pieces(index)[i];
            let row = device.from_f32(row, [1, width])?;
            device.backend().copy_rows(&row, 0, &mut du, piece.row + piece.len - 1, 1)?;
        }
        Ok(vec![Some(du)])
    }
}
