//! Distillation: a model is also trained on the next-token distributions of a teacher.
//!
//! ```text
//! objective = sum_r weights[r] ((1 - a) loss[r] + a KL(teacher_r || student_r))     over the labelled rows
//! dlogits[r] = a weights[r] (softmax(student_r) - softmax(teacher_r))               of the second term
//! ```
//!
//! The loss on a device computes both terms ([`fox_tensor::Teacher`]).

use fox_tensor::{Segments, Tape, Tensor, Var};

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
    /// Adds the divergence from `teacher` to the objective, with weight `weight` against the loss of the labels.
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
    /// The loss of every token of `labels: [R]`, from the student's `states: [R, D]` and its output projection
    /// `head: [V, D]`; a backward pass starts from the objective above.
    pub fn loss(
        &self,
        tape: &mut Tape<'_>,
        (states, head): (&Var, &Var),
        tokens: &Tensor,
        (labels, weights): (&Tensor, &Tensor),
        segments: &Segments,
    ) -> Result<Tensor> {
        let options = ForwardOptions { pruning: Pruning::Off, ..ForwardOptions::default() };
        let mut quiet = Tape::inference(&self.model.device);
        let hidden = self.model.forward(&mut quiet, tokens, segments, None, &options)?;
        let own_head = self.model.params.value(self.model.structure.lm_head);
        let teacher =
            fox_tensor::Teacher { x: hidden.states.value(), w: own_head, weight: self.weight };
        Ok(tape.distillation_cross_entropy(states, head, labels, weights, Some(teacher))?)
    }
}
