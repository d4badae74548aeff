//! Recurrent mixers: the state after the rows of a rank is the one before the rows of the next.
//!
//! A rank waits for the state of the rank before it, so the ranks run a layer one after the other; each goes on to the
//! next layer meanwhile, so that all of them work after the first few layers.

use fox_tensor::{
    ConvInputs, ConvSpec, CustomOp, DType, Error, Result, ScanExtras, ScanInputs, ScanSpec,
    ScanVars, Segments, Tape, Tensor, Var,
};

use super::SequenceShard;
use super::last_rows::{add_returned, rows_before};

/// See [`PrecedingRows::scan`](fox_tensor::PrecedingRows::scan).
pub(super) fn scan(
    part: &SequenceShard,
    tape: &mut Tape<'_>,
    vars: &ScanVars<'_>,
    spec: &ScanSpec,
) -> Result<Var> {
    let ScanVars { q, k, v, log_decay, write, skip } = *vars;
    let optional = [log_decay, write, skip];
    let op = ScanShard {
        part: part.clone(),
        spec: spec.clone(),
        present: optional.map(|var| var.is_some()),
        backward: tape.is_recording(),
    };
    let inputs: Vec<&Var> = [q, k, v].into_iter().chain(optional.into_iter().flatten()).collect();
    first_of(ScanShard::NAME, tape.custom(op, &inputs)?)
}

/// See [`PrecedingRows::short_conv`](fox_tensor::PrecedingRows::short_conv).
pub(super) fn short_conv(
    part: &SequenceShard,
    tape: &mut Tape<'_>,
    x: &Var,
    weight: &Var,
    bias: Option<&Var>,
    spec: &ConvSpec,
) -> Result<Var> {
    let inputs: Vec<&Var> = [x, weight].into_iter().chain(bias).collect();
    let op = ConvShard { part: part.clone(), spec: spec.clone() };
    first_of(ConvShard::NAME, tape.custom(op, &inputs)?)
}

fn first_of(op: &'static str, outputs: Vec<Var>) -> Result<Var> {
    let missing = || Error::Argument { op, detail: "the op gave no output".into() };
    outputs.into_iter().next().ok_or_else(missing)
}

/// A scan that starts from the states of the rank before. Its outputs: `o`, and what the backward pass needs: the states
/// at the start (`[segments, H * dk * dv]`, not on the first rank) and the backend's saved states.
struct ScanShard {
    part: SequenceShard,
    spec: ScanSpec,
    /// Which of decay, write strength and skip there are.
    present: [bool; 3],
    backward: bool,
}

impl ScanShard {
    const NAME: &'static str = "scan over several ranks";

    fn inputs<'a>(&self, tensors: &[&'a Tensor], state: Option<&'a Tensor>) -> ScanInputs<'a> {
        let mut rest = tensors[3..].iter().copied();
        let [log_decay, write, skip] =
            self.present.map(|present| present.then(|| rest.next()).flatten());
        ScanInputs { q: tensors[0], k: tensors[1], v: tensors[2], log_decay, write, skip, state }
    }

    /// States of all chunks `[segments, H * dk * dv]`: those of `chunks` from `values`, zeros elsewhere.
    fn states(&self, like: &Tensor, chunks: &[usize], values: &[f32]) -> Result<Tensor> {
        let (segments, width) = (self.spec.segments.len(), self.spec.state_len());
        let mut states = vec![0.0; segments * width];
        for (&i, state) in chunks.iter().zip(values.chunks_exact(width)) {
            states[i * width..][..width].copy_from_slice(state);
        }
        like.device().from_f32(&states, [segments, width])
    }

    /// The states of `chunks`, one after the other.
    fn values(&self, states: Option<&Tensor>, chunks: &[usize]) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(chunks.len() * self.spec.state_len());
        for &i in chunks {
            if let Some(states) = states {
                values.extend(states.slice_rows(i, 1)?.to_f32()?);
            }
        }
        Ok(values)
    }
}

impl CustomOp for ScanShard {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (split, context) = (&self.part.0.split, &self.part.0.context);
        let (index, last) = (context.index(), context.index() + 1 == context.size());
        self.part.record_failure(context.step(|ranks| {
            let state = match index {
                0 => None,
                _ => {
                    let received = ranks.receive::<f32>(index - 1)?;
                    Some(self.states(inputs[0], &split.continued(index), &received)?)
                }
            };
            let keep = ScanExtras { state: !last, backward: self.backward };
            let backend = inputs[0].device().backend();
            let out = backend.scan_fwd(&self.inputs(inputs, state.as_ref()), &self.spec, keep)?;
            if !last {
                ranks.send(index + 1, &self.values(out.state.as_ref(), &split.crossing(index))?);
            }
            Ok([Some(out.o), state, out.saved].into_iter().flatten().collect())
        }))
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (split, context) = (&self.part.0.split, &self.part.0.context);
        let index = context.index();
        let mut kept = outputs[1..].iter().copied();
        let state = if index > 0 { kept.next() } else { None };
        let saved = kept.next();
        self.part.record_failure(context.step(|ranks| {
            let d_state = match index + 1 == context.size() {
                true => None,
                false => {
                    let received = ranks.receive::<f32>(index + 1)?;
                    Some(self.states(inputs[0], &split.crossing(index), &received)?)
                }
            };
            let found = inputs[0].device().backend().scan_bwd(
                grads[0],
                d_state.as_ref(),
                &self.inputs(inputs, state),
                saved,
                &self.spec,
            )?;
            if index > 0 {
                ranks
                    .send(index - 1, &self.values(found.dstate.as_ref(), &split.continued(index))?);
            }
            let optional = [found.dlog_decay, found.dwrite, found.dskip];
            let optional = optional.into_iter().zip(self.present).filter(|(_, present)| *present);
            let all = [Some(found.dq), Some(found.dk), Some(found.dv)].into_iter();
            Ok(all.chain(optional.map(|(grad, _)| grad)).collect())
        }))
    }
}

/// A short convolution whose first rows are preceded by the last ones of the rank before. Its outputs: `y`, and the rows
/// before each chunk for the backward pass.
struct ConvShard {
    part: SequenceShard,
    spec: ConvSpec,
}

impl ConvShard {
    const NAME: &'static str = "short convolution over several ranks";

    /// Gradients of the rows before each continued chunk, `(K - 1) * C` values each. Only the first `K - 1` rows of a
    /// chunk see them: these and the rows before them are convolved on their own.
    fn before_gradients(
        &self,
        inputs: &ConvInputs<'_>,
        before: &Tensor,
        dy: &Tensor,
    ) -> Result<Vec<f32>> {
        let split = &self.part.0.split;
        let (chunks, width) = (split.chunks(self.part.0.context.index()), inputs.x.cols());
        let continued = split.continued(self.part.0.context.index());
        let count = inputs.taps() - 1;
        if continued.is_empty() || count == 0 {
            return Ok(Vec::new());
        }
        let (mut x, mut d, mut bounds) = (Vec::new(), Vec::new(), vec![0]);
        for &i in &continued {
            let (row, known) = (chunks[i].row, chunks[i].len.min(count));
            x.extend(before.slice_rows(i * count, count)?.to_f32()?);
            x.extend(inputs.x.slice_rows(row, known)?.to_f32()?);
            d.resize(d.len() + count * width, 0.0);
            d.extend(dy.slice_rows(row, known)?.to_f32()?);
            bounds.push(x.len() / width);
        }
        let (device, rows) = (inputs.x.device(), x.len() / width);
        let x = device.from_f32(&x, [rows, width])?.to_activations()?;
        let mut d_rows = device.uninit([rows, width], dy.dtype())?;
        let d = device.from_f32(&d, [rows, width])?;
        device.backend().copy_rows(&d, 0, &mut d_rows, 0, rows)?;
        let spec = ConvSpec { segments: Segments::packed(&bounds)?, ..self.spec.clone() };
        let alone = ConvInputs { x: &x, before: None, ..*inputs };
        let dx = device.backend().short_conv_bwd(&d_rows, &alone, &spec)?.dx.to_f32()?;
        let of_chunk = |&first: &usize| dx[first * width..][..count * width].to_vec();
        Ok(bounds[..continued.len()].iter().flat_map(of_chunk).collect())
    }
}

impl CustomOp for ConvShard {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        let mut inputs = ConvInputs { x, weight, bias, before: None };
        let before = rows_before(&self.part, x, inputs.taps() - 1)?;
        inputs.before = Some(&before);
        let y = x.device().backend().short_conv_fwd(&inputs, &self.spec)?;
        Ok(vec![y, before])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (dy, before) = (grads[0], outputs[1]);
        let (x, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        let inputs = ConvInputs { x, weight, bias, before: Some(before) };
        let found = x.device().backend().short_conv_bwd(dy, &inputs, &self.spec)?;
        let home = self.before_gradients(&inputs, before, dy)?;
        let mut dx = x.device().uninit(x.shape(), DType::F32)?;
        x.device().backend().copy_rows(&found.dx, 0, &mut dx, 0, x.rows())?;
        add_returned(&self.part, &home, &mut dx, inputs.taps() - 1)?;
        let bias = inputs.bias.map(|_| found.dbias);
        Ok([Some(dx), Some(found.dweight)].into_iter().chain(bias).collect())
    }
}
