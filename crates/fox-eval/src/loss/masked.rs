//! Pseudo-likelihood of encoders: the loss of every token with that token masked.
//!
//! One token of every `mask_every` is masked at a time, in as many passes, so that each token is predicted once, from all
//! tokens that are not masked with it. With few masks a pass is close to the pseudo-likelihood of a single masked token,
//! and costs as many passes more.

use fox_data::IGNORED_LABEL;
use fox_model::{ForwardOptions, Pruning};
use fox_tensor::{Segments, Tape};

use crate::subject::Subject;
use crate::{Error, Result};

/// Masked tokens are about as many as in training with the usual 15%.
pub const MASK_EVERY: usize = 8;

/// The loss of every token of documents of equal length, end to end.
pub(super) fn masked_losses_of(
    subject: &Subject<'_>,
    tokens: &[u32],
    length: usize,
    mask_every: usize,
    pruning: Pruning,
) -> Result<Vec<f32>> {
    let Some(mask) = subject.model.config().tokens.mask else {
        return Err(Error::Argument(format!(
            "the config.json of {} has no `mask_token_id`, which stands for the token to predict; add it",
            subject.name
        )));
    };
    let (device, rows) = (subject.model.device(), tokens.len());
    let segments = Segments::uniform(rows / length, length);
    let options = ForwardOptions { pruning, ..ForwardOptions::default() };
    // Without a recording tape the weights of the losses are not looked at.
    let weights = device.full([rows], 1.0)?;
    let mut losses = vec![0.0; rows];
    for pass in 0..mask_every.min(length) {
        let masked = |i: usize| i % length % mask_every == pass;
        let id = |(i, id): (usize, &u32)| if masked(i) { mask as i32 } else { *id as i32 };
        let label = |(i, id): (usize, &u32)| if masked(i) { *id as i32 } else { IGNORED_LABEL };
        let inputs: Vec<i32> = tokens.iter().enumerate().map(id).collect();
        let labels: Vec<i32> = tokens.iter().enumerate().map(label).collect();
        let (inputs, labels) =
            (device.from_i32(&inputs, [rows])?, device.from_i32(&labels, [rows])?);
        let mut tape = Tape::inference(device);
        let loss =
            subject.model.loss(&mut tape, &inputs, &labels, &weights, &segments, &options)?;
        let found = loss.per_token.to_f32()?;
        (0..rows).filter(|i| masked(*i)).for_each(|i| losses[i] = found[i]);
    }
    Ok(losses)
}
