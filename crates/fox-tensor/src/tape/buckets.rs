//! Gradients that are handed over while the backward pass goes on.
//!
//! A parameter may get several terms: tied weights, ops that wait for each other. How many is known from an
//! earlier pass of the same model; with the last one the gradient is complete. Complete gradients are collected until
//! they fill a bucket.

use super::{Gradients, ParamId};
use crate::{Error, Result, Tensor};

/// Takes complete gradients, in the order of the parameters. They stay where they are.
pub type BucketSink = Box<dyn FnMut(&mut [(ParamId, &mut Tensor)]) -> Result<()> + Send>;

/// Complete gradients on their way.
pub(super) struct Buckets {
    /// Terms that every parameter gets in a pass.
    expected: Vec<u32>,
    /// Bytes of a full bucket.
    bytes: usize,
    taker: BucketSink,
    /// Complete, not handed over yet.
    ready: Vec<ParamId>,
    handed_over: Vec<bool>,
}

impl Gradients {
    /// Hands gradients to `taker` in buckets of about `bytes` as they become complete in the next backward pass, which
    /// adds `expected` terms to each parameter, see [`Gradients::term_counts`]. What remains is
    /// [`Gradients::unsent_mut`].
    pub fn set_bucket_sink(&mut self, expected: Vec<u32>, bytes: usize, taker: BucketSink) {
        self.terms.clear();
        let handed_over = vec![false; expected.len()];
        self.buckets = Some(Buckets { expected, bytes, taker, ready: Vec::new(), handed_over });
    }

    /// How many terms each parameter got since the gradients were made or [`Gradients::set_bucket_sink`] was called.
    pub fn term_counts(&self) -> &[u32] {
        &self.terms
    }

    /// Forgets how many terms there were, so that the next pass can be counted.
    pub fn reset_term_counts(&mut self) {
        self.terms.clear();
    }

    /// The gradients that were not handed over, in order.
    pub fn unsent_mut(&mut self) -> impl Iterator<Item = (ParamId, &mut Tensor)> {
        let gone = self.buckets.as_ref().map_or(&[][..], |buckets| &buckets.handed_over);
        let all = self.params.iter_mut().enumerate();
        all.filter(|(i, _)| !gone.get(*i).is_some_and(|gone| *gone))
            .filter_map(|(i, grad)| Some((ParamId(i), grad.as_mut()?)))
    }

    /// Notes one more term of a parameter.
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

    /// Hands a full bucket over. A term that came too late is an error: what was handed over lacks it.
    pub(super) fn empty_full_bucket(&mut self) -> Result<()> {
        let Some(buckets) = &mut self.buckets else { return Ok(()) };
        let late = buckets.handed_over.iter().zip(&buckets.expected).zip(&self.terms);
        if let Some(i) = late.into_iter().position(|((gone, n), terms)| *gone && terms > n) {
            return Err(Error::argument(
                "backward",
                format!("parameter {i} got a term after its gradient was handed over"),
            ));
        }
        let sizes = buckets.ready.iter().filter_map(|id| self.params[id.0].as_ref());
        let bytes: usize = sizes.map(|grad| grad.len() * grad.dtype().size()).sum();
        if buckets.ready.is_empty() || bytes < buckets.bytes {
            return Ok(());
        }
        let mut full = vec![false; self.params.len()];
        for id in std::mem::take(&mut buckets.ready) {
            buckets.handed_over[id.0] = true;
            full[id.0] = true;
        }
        let all = self.params.iter_mut().enumerate().filter(|(i, _)| full[*i]);
        let mut bucket: Vec<(ParamId, &mut Tensor)> =
            all.filter_map(|(i, grad)| Some((ParamId(i), grad.as_mut()?))).collect();
        (buckets.taker)(&mut bucket)
    }
}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let handed_over = self.handed_over.iter().filter(|gone| **gone).count();
        write!(f, "Buckets({handed_over} of {} handed over)", self.expected.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{Device, Tape, Var};

    /// A table that is used twice, as tied embeddings are, and a matrix in between.
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
    fn gradients_are_handed_over_when_their_last_term_has_come() {
        let mut first = Gradients::default();
        pass(&mut first).unwrap();
        assert_eq!(first.term_counts(), [2, 0, 1]);
        let whole = |id| first.get(ParamId(id)).unwrap().to_f32().unwrap();
        let seen = Seen::default();
        let mut gradients = Gradients::default();
        gradients.set_bucket_sink(first.term_counts().to_vec(), 1, recorder(&seen));
        pass(&mut gradients).unwrap();
        // The matrix comes first: the table gets its second term from the embedding at the very end.
        assert_eq!(*seen.lock().unwrap(), [[(2, whole(2))], [(0, whole(0))]]);
        assert_eq!(gradients.unsent_mut().count(), 0);
    }

    #[test]
    fn what_does_not_fill_a_bucket_remains() {
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
    fn a_term_that_comes_too_late_is_an_error() {
        let mut gradients = Gradients::default();
        gradients.set_bucket_sink(vec![1, 0, 1], 1, Box::new(|_| Ok(())));
        let error = pass(&mut gradients).unwrap_err().to_string();
        assert!(
            error.contains("parameter 0 got a term after its gradient was handed over"),
            "{error}"
        );
    }
}
