//! The gradient of a batch, in as many parts as memory allows.
//!
//! The gradient is that of the mean loss over all labelled positions of the whole batch, whatever the
//! parts: every position has the weight `1 / labelled`. The losses of all parts stay on the device and are
//! read once, after the last backward pass, so that the host does not wait between the parts.

use std::ops::Range;

use fox_data::{Batch, IGNORED_LABEL};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{DType, Gradients, Segments, Tape, Tensor};

use crate::Result;

/// The loss of a batch and what the attention visited.
#[derive(Debug)]
pub struct BatchLoss {
    /// Mean loss over the labelled positions.
    pub mean: f64,
    /// Labelled positions.
    pub labelled: usize,
    /// Per part and layer, attention tiles visited and in all `[H, 4]` i32 ([`fox_tensor::tile_counts`]), still on the device.
    pub tiles: Vec<Vec<Tensor>>,
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

/// Adds the gradient of the mean loss of `batch` to `gradients`, `micro_batch` rows at a time.
pub fn accumulate(
    model: &Model,
    batch: &Batch,
    micro_batch: usize,
    options: &ForwardOptions,
    gradients: &mut Gradients,
) -> Result<BatchLoss> {
    let device = model.device();
    let labelled = batch.labelled();
    let weight = 1.0 / labelled.max(1) as f32;
    let mut losses = device.uninit([batch.batch * batch.time], DType::F32)?;
    let (mut parts, mut tiles, mut first) = (Vec::new(), Vec::new(), 0);
    while first < batch.batch {
        let rows = micro_batch.clamp(1, batch.batch - first);
        let range = first * batch.time..(first + rows) * batch.time;
        let positions = range.len();
        let mut tape = Tape::recording(device);
        let loss = model.loss(
            &mut tape,
            &device.from_i32(&batch.inputs[range.clone()], [positions])?,
            &device.from_i32(&batch.labels[range.clone()], [positions])?,
            &device.full([positions], weight)?,
            &segments(batch, first, rows)?,
            options,
        )?;
        device.backend().copy_rows(&loss.per_token, 0, &mut losses, range.start, positions)?;
        tape.backward(gradients)?;
        parts.push(range);
        tiles.push(loss.tiles);
        first += rows;
    }
    let losses = losses.to_f32()?;
    // Part by part: the sums of the parts are added up, not all positions in a row.
    let part = |range: Range<usize>| labelled_sum(&losses[range.clone()], &batch.labels[range]);
    let sum: f64 = parts.into_iter().map(part).fold(0.0, |sum, part| sum + part);
    Ok(BatchLoss { mean: sum / labelled.max(1) as f64, labelled, tiles })
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

    fn gradient(batch: &Batch, micro: usize, recompute: bool) -> (f64, Vec<f32>) {
        let mut config = ModelConfig::fox_pro(32, 2, 2);
        config.vocab_size = 31;
        let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
        let options = ForwardOptions { recompute, ..Default::default() };
        let mut gradients = Gradients::default();
        let loss = accumulate(&model, batch, micro, &options, &mut gradients).unwrap();
        let all = gradients.iter().flat_map(|(_, grad)| grad.to_f32().unwrap()).collect();
        (loss.mean, all)
    }

    #[test]
    fn the_gradient_does_not_depend_on_the_parts() {
        let cuts = vec![0, 9, 24, 48, 50, 72, 96];
        for boundaries in [None, Some(cuts)] {
            let batch = batch(4, 24, boundaries);
            let (loss, whole) = gradient(&batch, 4, false);
            for (micro, recompute) in [(1, false), (2, false), (3, true)] {
                let (again, parts) = gradient(&batch, micro, recompute);
                assert!((again / loss - 1.0).abs() < 1e-6, "{again} {loss}");
                let scale = whole.iter().fold(0f32, |a, b| a.max(b.abs()));
                for (a, b) in whole.iter().zip(&parts) {
                    assert!((a - b).abs() < 1e-5 * scale, "{a} {b}");
                }
            }
        }
    }

    #[test]
    fn the_losses_of_all_parts_are_read_at_once() {
        let batch = batch(4, 24, None);
        let mut config = ModelConfig::fox_pro(32, 2, 2);
        config.vocab_size = 31;
        let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
        let options = ForwardOptions::default();
        for micro in [1, 2, 4] {
            let before = model.device().downloads();
            accumulate(&model, &batch, micro, &options, &mut Gradients::default()).unwrap();
            assert_eq!(model.device().downloads() - before, 1, "{micro} rows at a time");
        }
    }

    #[test]
    fn the_loss_is_the_sum_of_the_parts_sums() {
        let batch = batch(4, 24, None);
        let mut config = ModelConfig::fox_pro(32, 2, 2);
        config.vocab_size = 31;
        let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
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
        let got = accumulate(&model, &batch, 1, &options, &mut Gradients::default()).unwrap();
        assert_eq!(got.mean, sum / 94.0, "to the bit");
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
