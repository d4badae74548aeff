//! The decode state of a recurrent layer: its size does not depend on the number of tokens seen.

use fox_tensor::{DType, Device, Result, Segments, Tensor};

use crate::meter::Lease;
use crate::spec::{ConvStateSpec, RecurrentStateSpec};

/// What a recurrent layer must remember.
///
/// As with attention, a step's results are staged and become current only when the whole step has
/// succeeded.
#[derive(Clone, Debug)]
pub struct RecurrentState {
    /// Per convolution, the last raw rows of each sequence, oldest first
    /// `[batch * (taps - 1), channels]`.
    convs: Vec<Tensor>,
    /// States of all heads `[batch, H * dk * dv]`.
    scan: Tensor,
    staged_convs: Vec<Option<Tensor>>,
    staged_scan: Option<Tensor>,
    /// Sequences that were joined but not merged yet.
    others: Vec<RecurrentState>,
    /// Of the sequences, where their bytes are counted.
    leases: Vec<Lease>,
}

impl RecurrentState {
    pub(crate) fn new(spec: &RecurrentStateSpec, batch: usize, device: &Device) -> Result<Self> {
        let conv = |conv: &ConvStateSpec| {
            device.zeros([batch * (conv.taps - 1), conv.channels], DType::F32)
        };
        Ok(RecurrentState {
            convs: spec.convs.iter().map(conv).collect::<Result<_>>()?,
            // A layer with convolutions alone has an unused element.
            scan: device.zeros([batch, spec.scan.max(1)], DType::F32)?,
            staged_convs: vec![None; spec.convs.len()],
            staged_scan: None,
            others: Vec::new(),
            leases: Vec::new(),
        })
    }

    /// The state of one sequence, with its bytes counted.
    pub(crate) fn counted(mut self, lease: Lease) -> Self {
        self.leases = vec![lease];
        self
    }

    /// Bytes of sequence `b` that are counted.
    pub(crate) fn bytes(&self, b: usize) -> usize {
        self.leases.get(b).map_or(0, Lease::bytes)
    }

    /// Takes the state of further sequences along; [`RecurrentState::merge`] makes them one.
    pub(crate) fn extend(&mut self, other: RecurrentState) {
        self.others.push(other);
    }

    /// Makes one state of all that were taken along.
    pub(crate) fn merge(&mut self) -> Result<()> {
        let others = std::mem::take(&mut self.others);
        if others.is_empty() {
            return Ok(());
        }
        for (index, conv) in self.convs.iter_mut().enumerate() {
            *conv = stack(conv, others.iter().map(|other| &other.convs[index]))?;
        }
        self.scan = stack(&self.scan, others.iter().map(|other| &other.scan))?;
        self.leases.extend(others.into_iter().flat_map(|other| other.leases));
        Ok(())
    }

    /// The states of the `count` sequences.
    pub(crate) fn split(self, count: usize) -> Result<Vec<RecurrentState>> {
        if count == 1 {
            return Ok(vec![self]);
        }
        let part = |tensor: &Tensor, b: usize| {
            let rows = tensor.rows() / count;
            tensor.slice_rows(b * rows, rows)
        };
        let mut leases = self.leases.into_iter();
        let single = |b: usize| {
            Ok(RecurrentState {
                convs: self.convs.iter().map(|conv| part(conv, b)).collect::<Result<_>>()?,
                scan: part(&self.scan, b)?,
                staged_convs: vec![None; self.convs.len()],
                staged_scan: None,
                others: Vec::new(),
                leases: leases.next().into_iter().collect(),
            })
        };
        (0..count).map(single).collect()
    }

    /// The last raw rows of convolution `index` before the step, oldest first
    /// `[batch * (taps - 1), channels]`.
    pub fn conv(&self, index: usize) -> &Tensor {
        &self.convs[index]
    }

    /// The states of all heads before the step `[batch, scan]`.
    pub fn scan(&self) -> &Tensor {
        &self.scan
    }

    /// Notes the states after the step `[batch, scan]`.
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

    /// Forgets what was noted.
    pub(crate) fn discard(&mut self) {
        self.staged_convs.iter_mut().for_each(|staged| *staged = None);
        self.staged_scan = None;
    }

    /// The step has succeeded.
    pub(crate) fn commit(&mut self) {
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

/// The rows of all tensors under each other.
fn stack<'a>(first: &'a Tensor, rest: impl Iterator<Item = &'a Tensor> + Clone) -> Result<Tensor> {
    let all = std::iter::once(first).chain(rest);
    let rows = all.clone().map(Tensor::rows).sum();
    let mut stacked = first.device().uninit([rows, first.cols()], first.dtype())?;
    let mut row = 0;
    for tensor in all {
        first.device().backend().copy_rows(tensor, 0, &mut stacked, row, tensor.rows())?;
        row += tensor.rows();
    }
    Ok(stacked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CacheMeter;

    #[test]
    fn bytes_stay_counted_through_a_shared_step() {
        let (meter, device) = (CacheMeter::default(), fox_cpu::device());
        let spec =
            RecurrentStateSpec { convs: vec![ConvStateSpec { channels: 3, taps: 4 }], scan: 8 };
        // Three rows of the convolution and the scan, in f32.
        assert_eq!(spec.bytes(), 4 * (3 * 3 + 8));
        let single = || {
            let state = RecurrentState::new(&spec, 1, &device).unwrap();
            state.counted(meter.lease(spec.bytes()))
        };
        let mut joined = single();
        joined.extend(single());
        joined.merge().unwrap();
        assert_eq!((joined.bytes(0), joined.bytes(1)), (spec.bytes(), spec.bytes()));
        let parts = joined.split(2).unwrap();
        assert_eq!(parts.iter().map(|part| part.bytes(0)).sum::<usize>(), 2 * spec.bytes());
        assert_eq!(meter.bytes(), 2 * spec.bytes());
        drop(parts);
        assert_eq!(meter.bytes(), 0);
    }
}
