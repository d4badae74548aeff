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
use super::transfer::{Expected, Parcel, arranged};

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

    /// Rank `from` sends the states of `chunks`, if there are any.
    fn expected(&self, from: usize, chunks: &[usize]) -> Vec<Expected> {
        let layout = ([chunks.len(), self.spec.state_len()].into(), DType::F32);
        if chunks.is_empty() { Vec::new() } else { vec![(from, vec![layout])] }
    }

    /// States of all chunks `[segments, H * dk * dv]`: those of `chunks` from another rank, zeros elsewhere.
    fn states(&self, chunks: &[usize], received: Vec<Vec<Tensor>>) -> Result<Option<Tensor>> {
        let places = chunks.iter().enumerate().map(|(n, &i)| [n, i, 1]);
        let all = |x| arranged(x, self.spec.segments.len(), DType::F32, places);
        received.first().and_then(|received| received.first()).map(all).transpose()
    }

    /// The states of `chunks`, one after the other, for rank `to`.
    fn parcel(&self, to: usize, states: Option<&Tensor>, chunks: &[usize]) -> Result<Vec<Parcel>> {
        let Some(states) = states.filter(|_| !chunks.is_empty()) else { return Ok(Vec::new()) };
        let places = chunks.iter().enumerate().map(|(n, &i)| [i, n, 1]);
        Ok(vec![(to, vec![arranged(states, chunks.len(), DType::F32, places)?])])
    }
}

impl CustomOp for ScanShard {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (part, device, index) = (&self.part, inputs[0].device(), self.part.0.context.index());
        let (continued, crossing) = (part.0.split.continued(index), part.0.split.crossing(index));
        let number = part.number_transfer()?;
        let expected = self.expected(index.wrapping_sub(1), &continued);
        let transfer = part.begin_numbered(number, device, Vec::new(), expected)?;
        let state = self.states(&continued, part.finish(transfer)?)?;
        let keep = ScanExtras { state: !crossing.is_empty(), backward: self.backward };
        let inputs = self.inputs(inputs, state.as_ref());
        let out = device.backend().scan_fwd(&inputs, &self.spec, keep)?;
        let sent = self.parcel(index + 1, out.state.as_ref(), &crossing)?;
        part.finish(part.begin_numbered(number, device, sent, Vec::new())?)?;
        Ok([Some(out.o), state, out.saved].into_iter().flatten().collect())
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (part, device, index) = (&self.part, inputs[0].device(), self.part.0.context.index());
        let (continued, crossing) = (part.0.split.continued(index), part.0.split.crossing(index));
        let mut kept = outputs[1..].iter().copied();
        let state = if continued.is_empty() { None } else { kept.next() };
        let saved = kept.next();
        let number = part.number_transfer()?;
        let expected = self.expected(index + 1, &crossing);
        let transfer = part.begin_numbered(number, device, Vec::new(), expected)?;
        let d_state = self.states(&crossing, part.finish(transfer)?)?;
        let inputs = self.inputs(inputs, state);
        let found =
            device.backend().scan_bwd(grads[0], d_state.as_ref(), &inputs, saved, &self.spec)?;
        let sent = self.parcel(index.wrapping_sub(1), found.dstate.as_ref(), &continued)?;
        part.finish(part.begin_numbered(number, device, sent, Vec::new())?)?;
        let optional = [found.dlog_decay, found.dwrite, found.dskip];
        let optional = optional.into_iter().zip(self.present).filter(|(_, present)| *present);
        let all = [Some(found.dq), Some(found.dk), Some(found.dv)].into_iter();
        Ok(all.chain(optional.map(|(grad, _)| grad)).collect())
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

    /// Gradients of the rows before each continued chunk, `[continued * (K - 1), C]` in f32. Only the first `K - 1` rows of
    /// a chunk see them: these and the rows before them are convolved on their own.
    fn before_gradients(
        &self,
        inputs: &ConvInputs<'_>,
        before: &Tensor,
        dy: &Tensor,
    ) -> Result<Vec<Tensor>> {
        let split = &self.part.0.split;
        let chunks = split.chunks(self.part.0.context.index());
        let continued = split.continued(self.part.0.context.index());
        let count = inputs.taps() - 1;
        if continued.is_empty() {
            return Ok(Vec::new());
        }
        let (mut bounds, mut own) = (vec![0], Vec::with_capacity(continued.len()));
        for &i in &continued {
            let (row, known, at) = (chunks[i].row, chunks[i].len.min(count), bounds[own.len()]);
            own.push([row, at + count, known]);
            bounds.push(at + count + known);
        }
        let rows = bounds[continued.len()];
        let mut x = arranged(inputs.x, rows, inputs.x.dtype(), own.iter().copied())?;
        let device = x.device().clone();
        for (&i, &at) in continued.iter().zip(&bounds) {
            device.backend().copy_rows(before, i * count, &mut x, at, count)?;
        }
        let dy = arranged(dy, rows, dy.dtype(), own)?;
        let spec = ConvSpec { segments: Segments::packed(&bounds)?, ..self.spec.clone() };
        let alone = ConvInputs { x: &x, before: None, ..*inputs };
        let dx = device.backend().short_conv_bwd(&dy, &alone, &spec)?.dx;
        let home = bounds.iter().zip(0..continued.len()).map(|(&at, n)| [at, n * count, count]);
        Ok(vec![arranged(&dx, continued.len() * count, DType::F32, home)?])
    }
}

impl CustomOp for ConvShard {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        let mut inputs = ConvInputs { x, weight, bias, before: None };
        let before = rows_before(&self.part, &[x], inputs.taps() - 1)?;
        inputs.before = before.first();
        let y = x.device().backend().short_conv_fwd(&inputs, &self.spec)?;
        Ok([vec![y], before].concat())
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
        let mut dx = [arranged(&found.dx, x.rows(), DType::F32, [[0, 0, x.rows()]])?];
        add_returned(&self.part, home, &mut dx, inputs.taps() - 1)?;
        let [dx] = dx;
        let bias = inputs.bias.map(|_| found.dbias);
        Ok([Some(dx), Some(found.dweight)].into_iter().chain(bias).collect())
    }
}
