//! The gradient of a batch, in as many parts as memory allows.
//!
//! The gradient is that of the mean loss over all labelled positions of the whole batch, whatever the
//! parts: every position has the weight `1 / labelled`.

use fox_data::{Batch, IGNORED_LABEL};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Gradients, Segments, Tape, Tensor};

use crate::Result;

/// The loss of a batch and what the attention visited.
#[derive(Debug)]
pub struct BatchLoss {
    /// Mean loss over the labelled positions.
    pub mean: f64,
    /// Labelled positions.
    pub labelled: usize,
    /// Per part and layer, attention blocks visited and in all `[H, 2]` i32, still on the device.
    pub blocks: Vec<Vec<Tensor>>,
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
    let (mut sum, mut blocks, mut first) = (0.0, Vec::new(), 0);
    while first < batch.batch {
        let rows = micro_batch.clamp(1, batch.batch - first);
        let range = first * batch.time..(first + rows) * batch.time;
        let positions = range.len();
        let labels = &batch.labels[range.clone()];
        let mut tape = Tape::recording(device);
        let loss = model.loss(
            &mut tape,
            &device.from_i32(&batch.inputs[range], [positions])?,
            &device.from_i32(labels, [positions])?,
            &device.full([positions], weight)?,
            &segments(batch, first, rows)?,
            options,
        )?;
        tape.backward(gradients)?;
        // Read after the backward pass, so that an asynchronous device is not kept waiting.
        let per_token = loss.per_token.to_f32()?;
        sum += labelled_sum(&per_token, labels);
        blocks.push(loss.blocks);
        first += rows;
    }
    Ok(BatchLoss { mean: sum / labelled.max(1) as f64, labelled, blocks })
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
