//! Gradient reduction over all processes, overlapped with the backward pass.

use std::sync::Arc;

use fox_dist::{Group, Owned};
use fox_tensor::{BucketSink, Gradients, ParamId, Tape, Tensor};

use crate::Result;
use crate::optimizer::Updater;

/// Begins sums of complete gradients in the last backward pass of a step. Its first pass only counts: how many terms
/// the gradient of a parameter has follows from the model, and is the same in every pass and process. By default nothing
/// is summed early.
#[derive(Debug, Default)]
pub struct OverlappedReduce {
    /// The processes, and which of them each parameter belongs to; `None` where sums wait for the end of the pass.
    owners: Option<(Arc<Group>, Arc<[usize]>)>,
    /// Terms of every parameter in a pass.
    terms: Option<Vec<u32>>,
    /// Bytes that are summed at once.
    bucket: usize,
    /// Whether gradients are dropped where their parameter is not owned.
    drops: bool,
}

impl OverlappedReduce {
    /// For the processes of an updater, if there are several and buckets have a size.
    pub fn new(updater: &Updater, bucket: usize) -> OverlappedReduce {
        let group = updater.group();
        let owners = (bucket > 0 && group.size() > 1)
            .then(|| (Arc::clone(group), Arc::from(updater.owners())));
        let weights = updater.sharded_weights();
        // Gradients of about a block are in memory before they are summed.
        let bucket = weights.map_or(bucket, |weights| bucket.min(weights.window()).max(1));
        OverlappedReduce { owners, terms: None, bucket, drops: weights.is_some() }
    }

    /// Whether the terms must be counted by a pass that keeps no gradients: all gradients may not fit.
    pub fn counts_first(&self) -> bool {
        self.drops && self.owners.is_some() && self.terms.is_none()
    }

    /// A backward pass that counts only.
    pub fn count(&mut self, tape: Tape<'_>) -> Result<()> {
        let mut gradients = Gradients::counting();
        tape.backward(&mut gradients)?;
        self.terms = Some(gradients.term_counts().to_vec());
        Ok(())
    }

    /// The backward pass after which the gradients are complete.
    pub fn backward(&mut self, tape: Tape<'_>, gradients: &mut Gradients) -> Result<()> {
        let Some((group, owners)) = &self.owners else { return Ok(tape.backward(gradients)?) };
        match &self.terms {
            None => {
                gradients.reset_term_counts();
                tape.backward(gradients)?;
                self.terms = Some(gradients.term_counts().to_vec());
            }
            Some(terms) => {
                let taker = taker(Arc::clone(group), Arc::clone(owners), self.drops);
                gradients.set_bucket_sink(terms.clone(), self.bucket, taker);
                tape.backward(gradients)?;
            }
        }
        Ok(())
    }
}

fn taker(group: Arc<Group>, owners: Arc<[usize]>, drops: bool) -> BucketSink {
    Box::new(move |bucket: &mut [(ParamId, &mut Tensor)]| {
        let owned = bucket.iter_mut().map(|(id, tensor)| Owned { owner: owners[id.0], tensor });
        group.begin_reduce(&mut owned.collect::<Vec<_>>()).map_err(|error| match error {
            fox_dist::Error::Tensor(error) => error,
            // The tape knows of no other processes; the caller asks the group for the reason.
            other => fox_tensor::Error::argument("backward", other.to_string()),
        })?;
        // A device holds the memory until it was sent.
        let others = bucket.iter_mut().filter(|(id, _)| drops && owners[id.0] != group.rank());
        others.for_each(|(_, tensor)| drop_values(tensor));
        Ok(())
    })
}

/// Frees the memory of a gradient that was sent to the owner of its parameter.
pub(crate) fn drop_values(tensor: &mut Tensor) {
    *tensor = Tensor::absent(tensor.shape(), tensor.device());
}
