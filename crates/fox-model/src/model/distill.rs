//! Distillation: a model in training is also held to the next-token distributions of another one.
//!
//! ```text
//! objective = sum_r weights[r] ((1 - a) loss[r] + a KL(teacher_r || student_r))     over the labelled rows
//! dlogits[r] = a weights[r] (softmax(student_r) - softmax(teacher_r))               of the second term
//! ```
//!
//! The second term's gradient is computed on the host from the logits of both, whatever the device.

use fox_tensor::{
    CustomOp, Error as TensorError, Gradients, IGNORE_LABEL, Result as TensorResult, Segments,
    Tape, Tensor, Var,
};

use super::{ForwardOptions, Model};
use crate::{Error, Pruning, Result};

/// The teacher of a model.
#[derive(Debug)]
pub(super) struct Teacher {
    model: Box<Model>,
    /// Weight `a` of the divergence from it.
    weight: f32,
}

impl Model {
    /// Holds training to the distributions of `teacher`, with weight `weight` against the loss of the labels.
    /// [`Model::loss`] still gives the loss of the labels.
    ///
    /// # Errors
    /// A teacher with another vocabulary, a weight outside of 0 to 1.
    pub fn distil_from(&mut self, teacher: Model, weight: f64) -> Result<()> {
        let (own, other) = (self.config.vocab_size, teacher.config.vocab_size);
        if own != other {
            return Err(Error::Argument(format!(
                "a model with {own} token ids cannot learn from one with {other}"
            )));
        }
        if !(0.0..=1.0).contains(&weight) {
            return Err(Error::Argument(format!("a weight of {weight} is not between 0 and 1")));
        }
        self.teacher = Some(Teacher { model: Box::new(teacher), weight: weight as f32 });
        Ok(())
    }
}

impl Teacher {
    /// The weights `[R]` that are left to the labels.
    pub fn rest(&self, weights: &Tensor) -> Result<Tensor> {
        let rest: Vec<f32> = weights.to_f32()?.iter().map(|w| w * (1.0 - self.weight)).collect();
        Ok(weights.device().from_f32(&rest, weights.shape())?)
    }

    /// The student's `states: [R, D]`, on whose way back the gradient of the divergence is added; `head` is the
    /// student's output projection `[V, D]`.
    pub fn teach(
        &self,
        tape: &mut Tape<'_>,
        (states, head): (&Var, &Var),
        tokens: &Tensor,
        (labels, weights): (&Tensor, &Tensor),
        segments: &Segments,
    ) -> Result<Var> {
        let options = ForwardOptions { pruning: Pruning::Off, ..ForwardOptions::default() };
        let mut quiet = Tape::inference(&self.model.device);
        let hidden = self.model.forward(&mut quiet, tokens, segments, None, &options)?;
        let wanted = self.model.logits(&mut quiet, &hidden.states)?.value().to_f32()?;
        let constant = |var: &Var| Var::constant(var.value().clone());
        let logits = quiet.linear(&constant(states), &constant(head), None)?;
        let (labels, weights) = (labels.to_i32()?, weights.to_f32()?);
        let (shape, vocab) = (logits.value().shape(), logits.value().cols());
        let mut gradient = logits.value().to_f32()?;
        for (r, (row, wanted)) in gradient.chunks_mut(vocab).zip(wanted.chunks(vocab)).enumerate() {
            let weight = if labels[r] == IGNORE_LABEL { 0.0 } else { self.weight * weights[r] };
            let (own, other) = (softmax(row), softmax(wanted));
            for (x, (own, other)) in row.iter_mut().zip(own.into_iter().zip(other)) {
                *x = (f64::from(weight) * (own - other)) as f32;
            }
        }
        let logits = states.value().device().from_f32(&gradient, shape)?;
        let mut outs = tape.custom(Divergence { logits }, &[states, head])?;
        outs.pop().ok_or_else(|| Error::Argument("distillation gave no states".into()))
    }
}

/// Passes states on, and adds on the way back what the gradient of their logits gives them and the output projection.
struct Divergence {
    /// Gradient of the logits `[R, V]`.
    logits: Tensor,
}

impl CustomOp for Divergence {
    fn name(&self) -> &'static str {
        "divergence"
    }

    fn forward(&self, inputs: &[&Tensor]) -> TensorResult<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> TensorResult<Vec<Option<Tensor>>> {
        let device = inputs[0].device();
        let mut tape = Tape::recording(device);
        let (states, head) = (tape.leaf(inputs[0].clone()), tape.leaf(inputs[1].clone()));
        let logits = tape.linear(&states, &head, None)?;
        let seeds = [(logits, self.logits.clone())];
        let found = tape.backward_from(&seeds, &[states, head], &mut Gradients::default())?;
        let mut found = found.into_iter();
        let (Some(Some(states)), Some(head)) = (found.next(), found.next()) else {
            return Err(TensorError::argument("divergence", "the states have no gradient"));
        };
        let sum: Vec<f64> =
            grads[0].to_f64()?.iter().zip(states.to_f64()?).map(|(a, b)| a + b).collect();
        Ok(vec![Some(device.from_f64(&sum, inputs[0].shape())?), head])
    }
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut all: Vec<f64> = logits.iter().map(|x| f64::from(x - most).exp()).collect();
    let sum: f64 = all.iter().sum();
    all.iter_mut().for_each(|x| *x /= sum);
    all
}
