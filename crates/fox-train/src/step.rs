//! The gradient of a batch, in as many parts as memory allows.
//!
//! The gradient is that of the mean loss over all labelled positions of the whole batch, whatever the
//! parts: every position has the weight `1 / labelled`. The losses of all parts stay on the device and are
//! read once, after the last backward pass, so that the host does not wait between the parts.

use std::ops::Range;

use fox_data::{Batch, IGNORED_LABEL};
use fox_dist::context::{Context, SequenceShard, SequenceSplit, Traffic};
use fox_model::{ForwardOptions, Model, Pass};
use fox_tensor::{DType, Dropout, Gradients, RowNumbers, Segments, Tape, Tensor};

use crate::overlapped_reduce::OverlappedReduce;
use crate::recipe::Reduction;
use crate::{Error, Result};

/// The loss of a batch and what the attention visited.
#[derive(Debug)]
pub struct BatchLoss {
    /// Mean loss over the labelled positions.
    pub mean: f64,
    /// Labelled positions.
    pub labelled: usize,
    /// Per part and layer, attention tiles visited and in all `[H, 4]` i32 ([`fox_tensor::tile_counts`]), still on the
    /// device; those of this process's own rows.
    pub tiles: Vec<Vec<Tensor>>,
    /// Per attention layer, the earlier keys that travelled between all processes that share sequences.
    pub traffic: Vec<Traffic>,
}

/// The tokens of a batch that a process works on, and how.
#[derive(Clone, Debug)]
pub struct RankShard {
    /// The rows.
    pub rows: Range<usize>,
    /// The processes that share the columns of these rows; `None` when all are here.
    pub context: Option<Context>,
    /// Rows in memory at once: a part.
    pub micro_batch: usize,
    /// How the gradients of the parts are added.
    pub reduction: Reduction,
}

impl RankShard {
    /// All rows of a batch, this many at once, added one after the other.
    #[cfg(test)]
    fn whole(batch: &Batch, micro_batch: usize) -> RankShard {
        let (rows, reduction) = (0..batch.batch, Reduction::Running);
        RankShard { rows, context: None, micro_batch, reduction }
    }

    /// The same tokens in `times` as many rows, each that much shorter.
    pub(crate) fn of_stage(&self, times: usize) -> RankShard {
        let rows = self.rows.start * times..self.rows.end * times;
        RankShard { rows, micro_batch: self.micro_batch * times, ..self.clone() }
    }

    /// The columns of rows of `time` tokens.
    fn columns(&self, time: usize) -> Range<usize> {
        let context = self.context.as_ref().map_or((0, 1), |c| (c.index(), c.size()));
        SequenceSplit::columns(time, context.0, context.1)
    }

    /// The part of the sequences of some rows that is here, where they are shared.
    fn part(&self, batch: &Batch, first: usize, rows: usize) -> Result<Option<SequenceShard>> {
        let Some(context) = &self.context else { return Ok(None) };
        let split = SequenceSplit::new(&segments(batch, first, rows)?, batch.time, context.size())?;
        Ok(Some(SequenceShard::new(context, split)))
    }
}

/// The loss of a portion.
#[derive(Debug)]
pub struct ShardLoss {
    /// Sum of the losses of the labelled positions of every part.
    pub sums: Vec<f64>,
    /// As in [`BatchLoss`].
    pub tiles: Vec<Vec<Tensor>>,
    /// What came to this process.
    pub traffic: Vec<Traffic>,
}

/// The sequences of rows `first .. first + rows` of a batch, counted from the first of these rows.
pub fn segments(batch: &Batch, first: usize, rows: usize) -> Result<Segments> {
    let (start, end) = (first * batch.time, (first + rows) * batch.time);
    let Some(boundaries) = &batch.boundaries else {
        return Ok(Segments::uniform(rows, batch.time));
    };
    // Every row begins a sequence, so a cut between rows is a boundary.
    let inside = boundaries.iter().filter(|&&at| at >= start && at <= end);
    let own: Vec<usize> = inside.map(|at| at - start).collect();
    Ok(Segments::packed(&own)?)
}

/// The part of the gradient of the mean loss of `batch` that comes from the tokens of `portion`. The rows of a dropout in
/// `options` are set to those of the batch.
pub fn gradient(
    model: &Model,
    batch: &Batch,
    portion: &RankShard,
    options: &ForwardOptions,
) -> Result<(Gradients, ShardLoss)> {
    gradient_with(model, batch, portion, options, &mut OverlappedReduce::default())
}

/// [`gradient`]; sums over all processes may begin before it returns.
pub(crate) fn gradient_with(
    model: &Model,
    batch: &Batch,
    portion: &RankShard,
    options: &ForwardOptions,
    early: &mut OverlappedReduce,
) -> Result<(Gradients, ShardLoss)> {
    let device = model.device();
    let weight = 1.0 / batch.labelled().max(1) as f32;
    let (begin, end) = (portion.rows.start, portion.rows.end);
    let columns = portion.columns(batch.time);
    let own = |ids: &[i32], first: usize, rows: usize| -> Vec<i32> {
        let rows = ids[first * batch.time..(first + rows) * batch.time].chunks(batch.time);
        rows.flat_map(|row| &row[columns.clone()]).copied().collect()
    };
    let mut losses = device.uninit([(end - begin) * columns.len()], DType::F32)?;
    let (mut parts, mut tiles, mut traffic) = (Vec::new(), Vec::new(), Vec::new());
    let (mut first, mut at) = (begin, 0);
    let mut sum = Sum::new(portion.reduction);
    while first < end {
        let _weights = model.params().begin_pass(Pass::Training);
        let rows = portion.micro_batch.clamp(1, end - first);
        let (inputs, labels) = (own(&batch.inputs, first, rows), own(&batch.labels, first, rows));
        let positions = inputs.len();
        let part = portion.part(batch, first, rows)?;
        let (mut tape, sequences) = match &part {
            None => (Tape::recording(device), segments(batch, first, rows)?),
            Some(part) => (part.tape(Tape::recording(device)), part.segments()?),
        };
        let numbers = RowNumbers {
            first: (first * batch.time + columns.start) as u64,
            width: columns.len(),
            stride: batch.time as u64,
        };
        let dropout = options.dropout.map(|dropout| Dropout { rows: numbers, ..dropout });
        let options = ForwardOptions { dropout, ..*options };
        // The engine knows of no other processes: the reason is with the part.
        let reason = |error: Error| {
            part.as_ref().and_then(SequenceShard::failure).map_or(error, Error::Group)
        };
        let loss = model.loss(
            &mut tape,
            &device.from_i32(&inputs, [positions])?,
            &device.from_i32(&labels, [positions])?,
            &device.full([positions], weight)?,
            &sequences,
            &options,
        );
        let loss = loss.map_err(|error| reason(error.into()))?;
        if early.counts_first() {
            early.count(tape).map_err(reason)?;
            continue;
        }
        device.backend().copy_rows(&loss.per_token, 0, &mut losses, at, positions)?;
        let last = first + rows == end;
        sum.backward(tape, Some(&mut *early).filter(|_| last)).map_err(reason)?;
        if let Some(part) = &part {
            // Blocks that are recomputed fetch twice, the second time in the backward pass.
            add_traffic(&mut traffic, &part.traffic()[..loss.tiles.len()]);
        }
        parts.push((at..at + positions, labels));
        tiles.push(loss.tiles);
        (first, at) = (first + rows, at + positions);
    }
    let losses = losses.to_f32()?;
    let part = |(range, labels): (Range<usize>, Vec<i32>)| labelled_sum(&losses[range], &labels);
    let sums = parts.into_iter().map(part).collect();
    Ok((sum.finish()?, ShardLoss { sums, tiles, traffic }))
}

/// Adds layer by layer.
pub fn add_traffic(sum: &mut Vec<Traffic>, terms: &[Traffic]) {
    sum.resize(sum.len().max(terms.len()), Traffic::default());
    for (sum, term) in sum.iter_mut().zip(terms) {
        sum.fetched += term.fetched;
        sum.full += term.full;
    }
}

/// A sum of the gradients of several parts.
enum Sum {
    /// One after the other, in one place.
    Running(Gradients),
    /// As a binary tree of the parts: the sums of complete subtrees, the largest first, with the number of
    /// their parts.
    Tree(Vec<(usize, Gradients)>),
}

impl Sum {
    fn new(reduction: Reduction) -> Sum {
        match reduction {
            Reduction::Running => Sum::Running(Gradients::default()),
            Reduction::Tree => Sum::Tree(Vec::new()),
        }
    }

    /// Adds the gradients of one part. Those of the `last` one are complete when the backward pass is through with
    /// them, unless a tree is still to be added up.
    fn backward(&mut self, tape: Tape<'_>, last: Option<&mut OverlappedReduce>) -> Result<()> {
        match self {
            Sum::Running(gradients) => match last {
                Some(early) => early.backward(tape, gradients)?,
                None => tape.backward(gradients)?,
            },
            Sum::Tree(subtrees) => {
                let mut gradients = Gradients::default();
                match last.filter(|_| subtrees.is_empty()) {
                    Some(early) => early.backward(tape, &mut gradients)?,
                    None => tape.backward(&mut gradients)?,
                }
                let mut parts = 1;
                while let Some((_, mut left)) = subtrees.pop_if(|(n, _)| *n == parts) {
                    left.add(gradients)?;
                    (gradients, parts) = (left, 2 * parts);
                }
                subtrees.push((parts, gradients));
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Gradients> {
        match self {
            Sum::Running(gradients) => Ok(gradients),
            Sum::Tree(mut subtrees) => {
                let mut sum = subtrees.pop().map(|(_, last)| last).unwrap_or_default();
                while let Some((_, mut left)) = subtrees.pop() {
                    left.add(sum)?;
                    sum = left;
                }
                Ok(sum)
            }
        }
    }
}

/// Sum of the losses of the positions that have a label.
fn labelled_sum(losses: &[f32], labels: &[i32]) -> f64 {
    let pairs = losses.iter().zip(labels);
    pairs.filter(|(_, label)| **label != IGNORED_LABEL).map(|(loss, _)| f64::from(*loss)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_data::LoaderState;
    use fox_model::ModelConfig;

    fn batch(rows: usize, time: usize, boundaries: Option<Vec<usize>>) -> Batch {
        let ids = |shift: usize| (0..rows * time).map(|i| ((i * 7 + shift) % 31) as i32).collect();
        let mut labels: Vec<i32> = ids(3);
        labels[5] = IGNORED_LABEL;
        labels[rows * time - 1] = IGNORED_LABEL;
        let state = LoaderState { next_batch: 1, fingerprint: 0 };
        Batch { inputs: ids(0), labels, batch: rows, time, boundaries, state }
    }

    #[test]
    fn shard_of_a_stage_has_more_shorter_rows() {
        let shard = RankShard { rows: 2..4, ..RankShard::whole(&batch(8, 16, None), 3) };
        let stage = shard.of_stage(4);
        assert_eq!((stage.rows, stage.micro_batch), (8..16, 12));
    }

    const HALF: Dropout =
        Dropout { rate: 0.5, seed: 3, rows: RowNumbers { first: 0, width: 1, stride: 1 } };

    fn model() -> Model {
        let config = ModelConfig::fox_pro(32, 2, 2).with_vocab(31);
        Model::init(&config, 1, &fox_cpu::device()).unwrap()
    }

    fn whole_gradient(
        batch: &Batch,
        micro: usize,
        recompute: bool,
        dropout: Option<Dropout>,
    ) -> (f64, Vec<f32>) {
        let model = model();
        let options = ForwardOptions { recompute, dropout, ..Default::default() };
        let portion = RankShard::whole(batch, micro);
        let (gradients, loss) = gradient(&model, batch, &portion, &options).unwrap();
        let all = gradients.iter().flat_map(|(_, grad)| grad.to_f32().unwrap()).collect();
        (loss.sums.iter().sum(), all)
    }

    #[test]
    fn gradient_is_independent_of_micro_batch() {
        let cuts = vec![0, 9, 24, 48, 50, 72, 96];
        for (boundaries, dropout) in [(None, None), (Some(cuts), None), (None, Some(HALF))] {
            let batch = batch(4, 24, boundaries);
            let (loss, whole) = whole_gradient(&batch, 4, false, dropout);
            for (micro, recompute) in [(1, false), (2, false), (3, true)] {
                let (again, parts) = whole_gradient(&batch, micro, recompute, dropout);
                assert!((again / loss - 1.0).abs() < 1e-6, "{again} {loss}");
                let scale = whole.iter().fold(0f32, |a, b| a.max(b.abs()));
                for (a, b) in whole.iter().zip(&parts) {
                    assert!((a - b).abs() < 1e-5 * scale, "{a} {b}");
                }
            }
        }
    }

    #[test]
    fn losses_are_downloaded_once() {
        let batch = batch(4, 24, None);
        let model = model();
        let options = ForwardOptions::default();
        for micro in [1, 2, 4] {
            let before = model.device().downloads();
            let portion = RankShard::whole(&batch, micro);
            gradient(&model, &batch, &portion, &options).unwrap();
            assert_eq!(model.device().downloads() - before, 1, "{micro} rows at a time");
        }
    }

    #[test]
    fn loss_is_sum_of_micro_batches() {
        let batch = batch(4, 24, None);
        let model = model();
        let options = ForwardOptions::default();
        let mut sum = 0.0;
        for row in 0..4 {
            let range = row * 24..(row + 1) * 24;
            let device = model.device();
            let mut tape = Tape::inference(device);
            let tensor = |ids: &[i32]| device.from_i32(ids, [24]).unwrap();
            let (inputs, labels) = (&batch.inputs[range.clone()], &batch.labels[range]);
            let weights = device.full([24], 1.0).unwrap();
            let segments = Segments::uniform(1, 24);
            let loss = model
                .loss(&mut tape, &tensor(inputs), &tensor(labels), &weights, &segments, &options)
                .unwrap();
            sum += labelled_sum(&loss.per_token.to_f32().unwrap(), labels);
        }
        let portion = RankShard::whole(&batch, 1);
        let (_, got) = gradient(&model, &batch, &portion, &options).unwrap();
        assert_eq!(got.sums.iter().sum::<f64>(), sum, "to the bit");
    }

    /// With trees, the rows of a batch may be divided among any power of two of processes.
    #[test]
    fn tree_reduction_is_independent_of_ranks() {
        let batch = batch(8, 24, None);
        let model = model();
        let options = ForwardOptions { dropout: Some(HALF), ..Default::default() };
        let sum = |rows: Range<usize>| {
            let (micro_batch, reduction) = (1, Reduction::Tree);
            let portion = RankShard { rows, context: None, micro_batch, reduction };
            gradient(&model, &batch, &portion, &options).unwrap()
        };
        let values = |gradients: &Gradients| -> Vec<Vec<f32>> {
            gradients.iter().map(|(_, grad)| grad.to_f32().unwrap()).collect()
        };
        let (whole, loss) = sum(0..8);
        for ranks in [2, 4, 8] {
            let own = 8 / ranks;
            let parts: Vec<_> = (0..ranks).map(|r| sum(r * own..(r + 1) * own)).collect();
            let sums: Vec<f64> = parts.iter().flat_map(|(_, loss)| loss.sums.clone()).collect();
            assert_eq!(sums, loss.sums);
            let lists: Vec<Vec<Vec<f32>>> = parts.iter().map(|(grads, _)| values(grads)).collect();
            for (i, want) in values(&whole).iter().enumerate() {
                let got = fox_dist::tree_sum(lists.iter().map(|list| list[i].clone()).collect());
                assert_eq!(&got, want, "{ranks} processes, parameter {i}");
            }
        }
    }

    #[test]
    fn packed_rows_are_cut_at_their_boundaries() {
        let batch = batch(2, 10, Some(vec![0, 4, 10, 17, 20]));
        let lens = |first, rows| -> Vec<usize> {
            let segments = segments(&batch, first, rows).unwrap();
            segments.as_slice().iter().map(|s| s.q_len).collect()
        };
        assert_eq!(lens(0, 2), [4, 6, 7, 3]);
        assert_eq!(lens(0, 1), [4, 6]);
        assert_eq!(lens(1, 1), [7, 3]);
    }
}
