//! Buckets of complete gradients that are sent during the backward pass, for overlapped gradient reduction.
//!
//! A parameter may get several terms, for example tied weights. Their number is known from an earlier pass of the same
//! model; with the last term the gradient is complete. Complete gradients are collected until they fill a bucket.

use super::{Gradients, ParamId};
use crate::{Error, Result, Tensor};

/// Receives a bucket of complete gradients in the order of the parameters; they stay in [`Gradients`].
pub type BucketSink = Box<dyn FnMut(&mut [(ParamId, &mut Tensor)]) -> Result<()> + Send>;

/// Buckets of one backward pass.
pub(super) struct Buckets {
    /// Number of terms of every parameter in a pass.
    expected: Vec<u32>,
    /// Bytes of a full bucket.
    bytes: usize,
    sink: BucketSink,
    /// Complete gradients that are not sent yet.
    ready: Vec<ParamId>,
    sent: Vec<bool>,
}

impl Gradients {
    /// Sends gradients to `sink` in buckets of about `bytes` as they become complete in the next backward pass, which
    /// adds `expected` terms to each parameter, see [`Gradients::term_counts`]. The rest is
    /// [`Gradients::unsent_mut`].
    pub fn set_bucket_sink(&mut self, expected: Vec<u32>, bytes: usize, sink: BucketSink) {
        self.terms.clear();
        let sent = vec![false; expected.len()];
        self.buckets = Some(Buckets { expected, bytes, sink, ready: Vec::new(), sent });
    }

    /// Number of terms of each parameter since the gradients were created or [`Gradients::set_bucket_sink`] was called.
    pub fn term_counts(&self) -> &[u32] {
        &self.terms
    }

    /// Resets the counts, so that they cover the next pass alone.
    pub fn reset_term_counts(&mut self) {
        self.terms.clear();
    }

    /// The gradients that were not sent, in order.
    pub fn unsent_mut(&mut self) -> impl Iterator<Item = (ParamId, &mut Tensor)> {
        let sent = self.buckets.as_ref().map_or(&[][..], |buckets| &buckets.sent);
        let all = self.params.iter_mut().enumerate();
        all.filter(|(i, _)| !sent.get(*i).is_some_and(|sent| *sent))
            .filter_map(|(i, grad)| Some((ParamId(i), grad.as_mut()?)))
    }

    /// Counts one more term of a parameter.
    pub(super) fn count_term(&mut self, ParamId(i): ParamId) {
        if self.terms.len() <= i {
            self.terms.resize(i + 1, 0);
        }
        self.terms[i] += 1;
        if let Some(buckets) = &mut self.buckets
            && buckets.expected.get(i) == Some(&self.terms[i])
        {
            buckets.ready.push(ParamId(i));
        }
    }

    /// Sends a full bucket. A term that arrives after its gradient was sent is an error.
    pub(super) fn send_full_bucket(&mut self) -> Result<()> {
        let Some(buckets) = &mut self.buckets else { return Ok(()) };
        let late = buckets.sent.iter().zip(&buckets.expected).zip(&self.terms);
        if let Some(i) = late.into_iter().position(|((sent, n), terms)| *sent && terms > n) {
            return Err(Error::argument(
                "backward",
                format!("parameter {i} got a term after its gradient was sent"),
            ));
        }
        let sizes = buckets.ready.iter().filter_map(|id| self.params[id.0].as_ref());
        let bytes: usize = sizes.map(|grad| grad.len() * grad.dtype().size()).sum();
        if buckets.ready.is_empty() || bytes < buckets.bytes {
            return Ok(());
        }
        let mut full = vec![false; self.params.len()];
        for id in std::mem::take(&mut buckets.ready) {
            buckets.sent[id.0] = true;
            full[id.0] = true;
        }
        let all = self.params.iter_mut().enumerate().filter(|(i, _)| full[*i]);
        let mut bucket: Vec<(ParamId, &mut Tensor)> =
            all.filter_map(|(i, grad)| Some((ParamId(i), grad.as_mut()?))).collect();
        (buckets.sink)(&mut bucket)
    }
}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sent = self.sent.iter().filter(|sent| **sent).count();
        write!(f, "Buckets({sent} of {} sent)", self.expected.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{Device, Tape, Var};

    /// A table that is used twice, like tied embeddings, and a matrix in between.
    fn pass(gradients: &mut Gradients) -> Result<()> {
        let device = Device::naive();
        let table =
            Var::param(ParamId(0), device.from_f32(&[0.5, -1.0, 2.0, 0.25, 1.0, -0.5], [3, 2])?);
        let matrix = Var::param(ParamId(2), device.from_f32(&[1.0, 0.5, -0.5, 2.0], [2, 2])?);
        let mut tape = Tape::recording(&device);
        let ids = device.from_i32(&[2, 0], [2])?;
        let x = tape.embedding(&table, &ids, None)?;
        let y = tape.linear(&x, &matrix, None)?;
        tape.linear_cross_entropy(&y, &table, &ids, &device.full([2], 0.5)?)?;
        tape.backward(gradients)
    }

    type Seen = Arc<Mutex<Vec<Vec<(usize, Vec<f32>)>>>>;

    fn recorder(seen: &Seen) -> BucketSink {
        let seen = Arc::clone(seen);
        Box::new(move |bucket| {
            let values = bucket.iter().map(|(id, grad)| Ok((id.0, grad.to_f32()?)));
            seen.lock().unwrap().push(values.collect::<Result<_>>()?);
            Ok(())
        })
    }

    #[test]
    fn sends_a_bucket_when_its_gradients_are_complete() {
        let mut first = Gradients::default();
        pass(&mut first).unwrap();
        assert_eq!(first.term_counts(), [2, 0, 1]);
        let complete = |id| first.get(ParamId(id)).unwrap().to_f32().unwrap();
        let seen = Seen::default();
        let mut gradients = Gradients::default();
        gradients.set_bucket_sink(first.term_counts().to_vec(), 1, recorder(&seen));
        pass(&mut gradients).unwrap();
        // The matrix comes first: the table gets its second term from the embedding at the very end.
        assert_eq!(*seen.lock().unwrap(), [[(2, complete(2))], [(0, complete(0))]]);
        assert_eq!(gradients.unsent_mut().count(), 0);
    }

    #[test]
    fn keeps_gradients_of_an_unfilled_bucket() {
        let mut first = Gradients::default();
        pass(&mut first).unwrap();
        let seen = Seen::default();
        let mut gradients = Gradients::default();
        // The matrix has 16 bytes, the table 24.
        gradients.set_bucket_sink(first.term_counts().to_vec(), 20, recorder(&seen));
        pass(&mut gradients).unwrap();
        let ids = |bucket: &Vec<(usize, Vec<f32>)>| bucket.iter().map(|(id, _)| *id).collect();
        let buckets: Vec<Vec<usize>> = seen.lock().unwrap().iter().map(ids).collect();
        assert_eq!(buckets, [[0, 2]]);
        let mut gradients = Gradients::default();
        gradients.set_bucket_sink(first.term_counts().to_vec(), 1000, recorder(&seen));
        pass(&mut gradients).unwrap();
        let remaining: Vec<usize> = gradients.unsent_mut().map(|(id, _)| id.0).collect();
        assert_eq!(remaining, [0, 2]);
    }

    #[test]
    fn rejects_a_term_after_its_bucket_was_sent() {
        let mut gradients = Gradients::default();
        gradients.set_bucket_sink(vec![1, 0, 1], 1, Box::new(|_| Ok(())));
        let error = pass(&mut gradients).unwrap_err().to_string();
        assert!(error.contains("parameter 0 got a term after its gradient was sent"), "{error}");
    }
}
