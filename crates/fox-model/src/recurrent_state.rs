//! The decode state of a recurrent layer: its size does not depend on the number of tokens seen.

use fox_tensor::{DType, Device, Result, Segments, Tensor};

use crate::config::RecurrentShape;

/// What a recurrent layer must remember.
///
/// As with attention, a step's results are staged and become current only when the whole step has
/// succeeded.
#[derive(Clone, Debug)]
pub(crate) struct RecurrentState {
    /// Per convolution, the last raw rows of each sequence, oldest first
    /// `[batch * (taps - 1), channels]`.
    convs: Vec<Tensor>,
    /// States of all heads `[batch, H * dk * dv]`.
    scan: Tensor,
    staged_convs: Vec<Option<Tensor>>,
    staged_scan: Option<Tensor>,
}

impl RecurrentState {
    pub fn new(shape: &RecurrentShape, batch: usize, device: &Device) -> Result<Self> {
        let conv =
            |&(width, taps): &(usize, usize)| device.zeros([batch * (taps - 1), width], DType::F32);
        Ok(RecurrentState {
            convs: shape.convs.iter().map(conv).collect::<Result<_>>()?,
            scan: device.zeros([batch, shape.scan], DType::F32)?,
            staged_convs: vec![None; shape.convs.len()],
            staged_scan: None,
        })
    }

    /// The rows before the step of convolution `index`.
    pub fn conv(&self, index: usize) -> &Tensor {
        &self.convs[index]
    }

    /// The states before the step.
    pub fn scan(&self) -> &Tensor {
        &self.scan
    }

    /// Notes the states after the step.
    pub fn stage_scan(&mut self, after: Tensor) {
        self.staged_scan = Some(after);
    }

    /// Notes the last rows of the input `x: [R, C]` of convolution `index`.
    pub fn stage_conv(&mut self, index: usize, x: &Tensor, segments: &Segments) -> Result<()> {
        let old = &self.convs[index];
        let kept = old.rows() / segments.len().max(1);
        let mut next = old.slice_rows(0, old.rows())?;
        let device = x.device().clone();
        for (b, s) in segments.as_slice().iter().enumerate() {
            let (new, first) = (s.q_len.min(kept), b * kept);
            let stay = kept - new;
            let backend = device.backend();
            if new > 0 && stay > 0 {
                backend.copy_rows(old, first + new, &mut next, first, stay)?;
            }
            if new > 0 {
                backend.copy_rows(x, s.q_start + s.q_len - new, &mut next, first + stay, new)?;
            }
        }
        self.staged_convs[index] = Some(next);
        Ok(())
    }

    /// The step has succeeded.
    pub fn commit(&mut self) {
        for (conv, staged) in self.convs.iter_mut().zip(&mut self.staged_convs) {
            if let Some(staged) = staged.take() {
                *conv = staged;
            }
        }
        if let Some(staged) = self.staged_scan.take() {
            self.scan = staged;
        }
    }
}
