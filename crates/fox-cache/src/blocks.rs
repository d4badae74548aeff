//! The decode state of a layer whose past is a list of closed blocks, which later tokens never change, and the rows of
//! the tokens after them.
//!
//! Rows and blocks are lists of tensors whose meaning only the layer knows. Closed blocks are shared between clones of a
//! cache. As with pages, a step's results are staged and become current when the whole step has succeeded.

use std::sync::Arc;

use fox_tensor::{PAGE, Result, Segment, Segments, Tensor};

use crate::meter::{CacheMeter, Lease};
use crate::spec::BlockStateSpec;

/// One layer of a batch of sequences.
#[derive(Clone, Debug)]
pub struct BlockState {
    sequences: Vec<BlockSequence>,
}

/// One layer of one sequence.
#[derive(Clone, Debug)]
struct BlockSequence {
    spec: BlockStateSpec,
    past: Past,
    staged: Option<Past>,
    meter: Option<CacheMeter>,
}

/// The tokens of one sequence.
#[derive(Clone, Debug, Default)]
struct Past {
    /// Closed blocks, oldest first.
    closed: Vec<Arc<Closed>>,
    /// Blocks before them that no later query sees.
    dropped: usize,
    /// Rows of the tokens after them; no tensors without tokens.
    open: Vec<Tensor>,
    lease: Option<Lease>,
}

#[derive(Debug)]
struct Closed {
    tensors: Vec<Tensor>,
    /// Counts the bytes, once for all sequences that share the block.
    _lease: Option<Lease>,
}

/// The rows of all sequences that are not in closed blocks, those of the step included.
#[derive(Debug)]
pub struct OpenRows {
    /// Stacked rows of each tensor.
    pub tensors: Vec<Tensor>,
    /// The step's queries, and which of the stacked rows are their keys.
    pub segments: Segments,
}

impl BlockState {
    pub(crate) fn new(spec: &BlockStateSpec, batch: usize, meter: Option<&CacheMeter>) -> Self {
        let sequence = BlockSequence {
            spec: spec.clone(),
            past: Past::default(),
            staged: None,
            meter: meter.cloned(),
        };
        BlockState { sequences: vec![sequence; batch] }
    }

    /// The rows of all sequences that are not in closed blocks, followed by the rows of the step in `new`, one tensor of
    /// `[R, width]` for each tensor of the open rows. `segments` have the queries of each sequence.
    pub fn append(&self, new: &[&Tensor], segments: &Segments) -> Result<OpenRows> {
        let (mut placed, mut rows) = (Vec::new(), 0);
        for (sequence, s) in self.sequences.iter().zip(segments.as_slice()) {
            let k_len = sequence.past.open_len() + s.q_len;
            placed.push(Segment { q_start: s.q_start, q_len: s.q_len, k_start: rows, k_len });
            rows += k_len;
        }
        let stack = |(index, new): (usize, &&Tensor)| -> Result<Tensor> {
            let device = new.device().clone();
            let mut all = device.uninit([rows, new.cols()], new.dtype())?;
            for (sequence, s) in self.sequences.iter().zip(&placed) {
                if let Some(open) = sequence.past.open.get(index) {
                    device.backend().copy_rows(open, 0, &mut all, s.k_start, open.rows())?;
                }
                if s.q_len > 0 {
                    let row = s.k_start + s.offset();
                    device.backend().copy_rows(new, s.q_start, &mut all, row, s.q_len)?;
                }
            }
            Ok(all)
        };
        let tensors = new.iter().enumerate().map(stack).collect::<Result<_>>()?;
        Ok(OpenRows { tensors, segments: Segments::new(placed)? })
    }

    /// The closed blocks of each sequence, oldest first.
    pub fn closed(&self) -> Vec<Vec<&[Tensor]>> {
        self.sequences.iter().map(tensors).collect()
    }

    /// Stages the rows of a step: full blocks of them are closed by `close`, which gets the rows of one block.
    pub fn stage(
        &mut self,
        rows: &OpenRows,
        close: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<()> {
        for (sequence, s) in self.sequences.iter_mut().zip(rows.segments.as_slice()) {
            let slice = |start: usize, len: usize| -> Result<Vec<Tensor>> {
                rows.tensors.iter().map(|x| x.slice_rows(s.k_start + start, len)).collect()
            };
            let full = s.k_len / PAGE;
            let past = &sequence.past;
            let mut next =
                Past { closed: past.closed.clone(), dropped: past.dropped, ..Past::default() };
            for block in 0..full {
                let tensors = close(&slice(block * PAGE, PAGE)?)?;
                let lease = sequence.meter.as_ref().map(|meter| meter.lease(bytes(&tensors)));
                next.closed.push(Arc::new(Closed { tensors, _lease: lease }));
            }
            if s.k_len > full * PAGE {
                next.open = slice(full * PAGE, s.k_len - full * PAGE)?;
            }
            next.lease = sequence.meter.as_ref().map(|meter| meter.lease(bytes(&next.open)));
            next.drop_unseen(sequence.spec.window);
            sequence.staged = Some(next);
        }
        Ok(())
    }

    /// Blocks held and dropped of sequence `b`.
    pub(crate) fn block_counts(&self, b: usize) -> Option<(usize, usize)> {
        let past = &self.sequences.get(b)?.past;
        Some((past.closed.len(), past.dropped))
    }

    /// Bytes that sequence `b` holds, and would hold with all blocks.
    pub(crate) fn bytes(&self, b: usize) -> (usize, usize) {
        let Some(BlockSequence { past, spec, .. }) = self.sequences.get(b) else { return (0, 0) };
        let (open, block) = (bytes(&past.open), spec.block_bytes());
        let held = open + past.closed.len() * block;
        (held, held + past.dropped * block)
    }

    pub(crate) fn extend(&mut self, other: BlockState) {
        self.sequences.extend(other.sequences);
    }

    pub(crate) fn split(self) -> impl Iterator<Item = BlockState> {
        self.sequences.into_iter().map(|sequence| BlockState { sequences: vec![sequence] })
    }

    pub(crate) fn discard(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.staged = None);
    }

    pub(crate) fn commit(&mut self) {
        for sequence in &mut self.sequences {
            if let Some(staged) = sequence.staged.take() {
                sequence.past = staged;
            }
        }
    }
}

fn tensors(sequence: &BlockSequence) -> Vec<&[Tensor]> {
    sequence.past.closed.iter().map(|block| &block.tensors[..]).collect()
}

impl Past {
    fn open_len(&self) -> usize {
        self.open.first().map_or(0, Tensor::rows)
    }

    /// Drops the blocks that lie outside the window of the next query.
    fn drop_unseen(&mut self, window: Option<usize>) {
        let Some(window) = window else { return };
        let held = self.closed.len() * PAGE + self.open_len();
        let unseen = (held + 1).saturating_sub(window) / PAGE;
        let unseen = unseen.min(self.closed.len());
        self.closed.drain(..unseen);
        self.dropped += unseen;
    }
}

fn bytes(tensors: &[Tensor]) -> usize {
    tensors.iter().map(|x| x.len() * x.dtype().size()).sum()
}

#[cfg(test)]
mod tests {
    use fox_tensor::Device;

    use super::*;

    fn state(window: Option<usize>, meter: &CacheMeter) -> BlockState {
        let spec = BlockStateSpec { row: 3, block: 3 * PAGE, window };
        BlockState::new(&spec, 1, Some(meter))
    }

    /// Feeds `count` tokens whose rows hold their position.
    fn feed(state: &mut BlockState, device: &Device, from: usize, count: usize) {
        let rows: Vec<f32> = (from..from + count).flat_map(|t| [t as f32; 3]).collect();
        let new = device.from_f32(&rows, [count, 3]).unwrap();
        let open = state.append(&[&new], &Segments::uniform(1, count)).unwrap();
        state.stage(&open, |rows| Ok(rows.to_vec())).unwrap();
        state.commit();
    }

    fn positions(state: &BlockState) -> Vec<f32> {
        let past = &state.sequences[0].past;
        let closed = past.closed.iter().flat_map(|block| block.tensors.iter());
        let rows = closed.chain(&past.open).flat_map(|x| x.to_f32().unwrap());
        rows.step_by(3).collect()
    }

    #[test]
    fn blocks_close_in_order() {
        let (meter, device) = (CacheMeter::default(), fox_cpu::device());
        let mut state = state(None, &meter);
        for (from, count) in [(0, 1), (1, 130), (131, 0), (131, 61), (192, 5)] {
            if count > 0 {
                feed(&mut state, &device, from, count);
            }
        }
        let all: Vec<f32> = (0..197).map(|t| t as f32).collect();
        assert_eq!(positions(&state), all);
        assert_eq!(state.block_counts(0), Some((3, 0)));
        assert_eq!(meter.bytes(), 197 * 3 * 4);
        let copy = state.clone();
        // Closed blocks are shared; the 5 open rows count again.
        assert_eq!(meter.bytes(), (197 + 5) * 3 * 4);
        drop((state, copy));
        assert_eq!(meter.bytes(), 0);
    }

    #[test]
    fn window_drops_blocks_no_query_sees() {
        let (meter, device) = (CacheMeter::default(), fox_cpu::device());
        let mut state = state(Some(64), &meter);
        feed(&mut state, &device, 0, 126);
        assert_eq!(state.block_counts(0), Some((1, 0)), "token 126 sees key 63");
        feed(&mut state, &device, 126, 1);
        assert_eq!(state.block_counts(0), Some((0, 1)), "token 127 sees keys from 64 on");
    }

    #[test]
    fn failed_step_leaves_no_trace() {
        let (meter, device) = (CacheMeter::default(), fox_cpu::device());
        let mut state = state(None, &meter);
        feed(&mut state, &device, 0, 10);
        let new = device.full([60, 3], 1.0).unwrap();
        let open = state.append(&[&new], &Segments::uniform(1, 60)).unwrap();
        state.stage(&open, |rows| Ok(rows.to_vec())).unwrap();
        state.discard();
        state.commit();
        assert_eq!((positions(&state).len(), meter.bytes()), (10, 10 * 3 * 4));
    }
}
