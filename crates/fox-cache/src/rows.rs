//! The contiguous KV cache of an attention layer, `capacity` rows per sequence.

use fox_tensor::{DType, Device, Result, Segments, Tensor};

use crate::recurrent::RecurrentState;
use crate::spec::AttentionStateSpec;

/// One attention layer of a batch of sequences.
#[derive(Clone, Debug)]
pub struct RowState {
    k: Tensor,
    v: Tensor,
    transitions: Option<Tensor>,
    log_gates: Option<Tensor>,
    conv: Option<RecurrentState>,
    last_uk: Option<Tensor>,
    last_uv: Option<Tensor>,
    staged_uk: Option<Tensor>,
    staged_uv: Option<Tensor>,
}

impl RowState {
    /// `rows` rows for `batch` sequences.
    pub(crate) fn new(
        spec: &AttentionStateSpec,
        batch: usize,
        rows: usize,
        device: &Device,
    ) -> Result<Self> {
        let kept = device.backend().caps().activation_type;
        let zeros = |rows: usize| device.zeros([rows, spec.width()], kept);
        let last = |shifted: bool| shifted.then(|| zeros(batch)).transpose();
        Ok(RowState {
            k: zeros(rows)?,
            v: zeros(rows)?,
            transitions: (spec.transition > 0)
                .then(|| device.zeros([rows, spec.transitions()], DType::F32))
                .transpose()?,
            conv: spec
                .conv_state()
                .map(|conv| RecurrentState::new(&conv, batch, device))
                .transpose()?,
            log_gates: spec
                .gated
                .then(|| device.zeros([rows, spec.heads], DType::F32))
                .transpose()?,
            last_uk: last(spec.k_shift)?,
            last_uv: last(spec.v_shift)?,
            staged_uk: None,
            staged_uv: None,
        })
    }

    /// Keys after shift, norm and rotation `[batch * capacity, H_kv * d]`.
    pub fn keys(&self) -> &Tensor {
        &self.k
    }

    /// Values after the shift `[batch * capacity, H_kv * d]`.
    pub fn values(&self) -> &Tensor {
        &self.v
    }

    /// Transitions between keys `[batch * capacity, H_kv * transition]`.
    pub fn transitions(&self) -> Option<&Tensor> {
        self.transitions.as_ref()
    }

    pub(crate) fn conv(&mut self) -> Option<&mut RecurrentState> {
        self.conv.as_mut()
    }

    /// Log forget gates `[batch * capacity, H]`.
    pub fn log_gates(&self) -> Option<&Tensor> {
        self.log_gates.as_ref()
    }

    /// Last raw key and value projections `[batch, H_kv * d]`, with a token shift.
    pub(crate) fn last(&self) -> (Option<Tensor>, Option<Tensor>) {
        (self.last_uk.clone(), self.last_uv.clone())
    }

    /// Appends keys and values `[R, H_kv * d]` and log gates `[R, H]` to each sequence, and stages the last raw projections
    /// among `uk` and `uv: [R, H_kv * d]`.
    pub fn append(
        &mut self,
        (k, v): (&Tensor, &Tensor),
        log_gates: Option<&Tensor>,
        (uk, uv): (&Tensor, &Tensor),
        segments: &Segments,
    ) -> Result<()> {
        self.staged_uk = staged(self.last_uk.as_ref(), uk, segments)?;
        self.staged_uv = staged(self.last_uv.as_ref(), uv, segments)?;
        write_rows(k, &mut self.k, segments)?;
        write_rows(v, &mut self.v, segments)?;
        match (log_gates, &mut self.log_gates) {
            (Some(new), Some(gates)) => write_rows(new, gates, segments),
            _ => Ok(()),
        }
    }

    /// [`RowState::append`] of keys with transitions `[R, H_kv * transition]`, whose layer has no token shift.
    pub fn append_with(
        &mut self,
        keys: (&Tensor, &Tensor),
        transitions: &Tensor,
        log_gates: Option<&Tensor>,
        segments: &Segments,
    ) -> Result<()> {
        if let Some(all) = &mut self.transitions {
            write_rows(transitions, all, segments)?;
        }
        self.append(keys, log_gates, keys, segments)
    }

    pub(crate) fn discard(&mut self) {
        (self.staged_uk, self.staged_uv) = (None, None);
        self.conv.iter_mut().for_each(RecurrentState::discard);
    }

    pub(crate) fn commit(&mut self) {
        for (last, staged) in
            [(&mut self.last_uk, &mut self.staged_uk), (&mut self.last_uv, &mut self.staged_uv)]
        {
            if let Some(staged) = staged.take() {
                *last = Some(staged);
            }
        }
        self.conv.iter_mut().for_each(RecurrentState::commit);
    }

    /// The rows of all tensors, for [`RowState::set_rows`].
    pub(crate) fn map_rows(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Rows> {
        let log_gates = self.log_gates.as_ref().map(&f).transpose()?;
        let transitions = self.transitions.as_ref().map(&f).transpose()?;
        Ok(Rows { k: f(&self.k)?, v: f(&self.v)?, transitions, log_gates })
    }

    pub(crate) fn set_rows(&mut self, rows: Rows) {
        (self.k, self.v) = (rows.k, rows.v);
        (self.transitions, self.log_gates) = (rows.transitions, rows.log_gates);
    }
}

/// The tensors with a row per token.
pub(crate) struct Rows {
    k: Tensor,
    v: Tensor,
    transitions: Option<Tensor>,
    log_gates: Option<Tensor>,
}

fn write_rows(new: &Tensor, all: &mut Tensor, segments: &Segments) -> Result<()> {
    let device = new.device().clone();
    for s in segments.as_slice().iter().filter(|s| s.q_len > 0) {
        device.backend().copy_rows(new, s.q_start, all, s.k_start + s.offset(), s.q_len)?;
    }
    Ok(())
}

/// The last raw rows after the step; unchanged for sequences without new tokens.
fn staged(last: Option<&Tensor>, u: &Tensor, segments: &Segments) -> Result<Option<Tensor>> {
    let Some(last) = last else { return Ok(None) };
    let mut next = last.slice_rows(0, last.rows())?;
    for (b, s) in segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
        u.device().backend().copy_rows(u, s.q_start + s.q_len - 1, &mut next, b, 1)?;
    }
    Ok(Some(next))
}
