//! Validation of a recipe.

use super::{PruningRecipe, Recipe, Weights, nearest};
use crate::{Error, Result};

impl Recipe {
    /// The first value that cannot be right.
    pub(super) fn validate(&self) -> Result<()> {
        let rule = |holds: bool, key: &str, detail: &str| match holds {
            true => Ok(()),
            false => Err(Error::value(&self.name, key, detail)),
        };
        let (o, t) = (&self.optimizer, &self.training);
        rule(t.tokens > 0, "training.tokens", "must be at least 1")?;
        rule(t.batch > 0, "training.batch", "must be at least 1")?;
        rule(t.micro_batch != Some(0), "training.micro_batch", "must be at least 1")?;
        rule(self.parallel.context > 0, "parallel.context", "must be at least 1")?;
        rule(t.max_skips > 0, "training.max_skips", "must be at least 1")?;
        rule(
            self.data.sequence_length > 0 && self.data.sequence_length <= 1 << 30,
            "data.sequence_length",
            "must be between 1 and 2^30",
        )?;
        self.validate_task()?;
        self.check_stages()?;
        let step = t.batch.checked_mul(self.data.sequence_length);
        rule(
            step.is_some_and(|tokens| tokens <= i32::MAX as usize),
            "training.batch",
            "times data.sequence_length is more than 2^31 tokens in a step; lower one of them",
        )?;
        rule(o.peak_lr >= 0.0 && o.peak_lr.is_finite(), "optimizer.peak_lr", "must be at least 0")?;
        rule(o.clip > 0.0, "optimizer.clip", "must be above 0; use inf for no clipping")?;
        rule(t.ema.is_none_or(|x| x > 0.0 && x < 1.0), "training.ema", "must be between 0 and 1")?;
        rule(
            t.ema.is_some() || self.evaluation.weights == Weights::Raw,
            "evaluation.weights",
            "is \"ema\", but no average is kept; set training.ema, e.g. to 0.999",
        )?;
        self.schedule.validate(&self.name)?;
        rule(self.checkpoints.keep > 0, "checkpoints.keep", "must be at least 1")?;
        rule(self.metrics.every > 0, "metrics.every", "must be at least 1")?;
        rule(self.evaluation.length != Some(0), "evaluation.length", "must be at least 1")?;
        rule(
            t.gate_init.is_valid(),
            "training.gate_init",
            "must be [shortest, longest] in tokens, both above 0 and the shortest first",
        )?;
        rule(
            (0.0..1.0).contains(&t.dropout),
            "training.dropout",
            "must be a probability of at least 0 and below 1, e.g. 0.1",
        )?;
        rule(
            t.rates.values().all(|factor| *factor >= 0.0 && factor.is_finite()),
            "training.rates",
            "must be factors of at least 0",
        )?;
        rule(
            t.train.as_ref().is_none_or(|list| !list.is_empty()),
            "training.train",
            "is empty, so nothing would be trained; name a part of the model, e.g. \"gates\"",
        )?;
        rule(
            t.distill.is_none_or(|weight| (0.0..=1.0).contains(&weight)),
            "training.distill",
            "must be a weight between 0 and 1",
        )?;
        rule(
            t.distill.is_none() || t.init.is_some(),
            "training.distill",
            "needs a teacher; name the checkpoint to start from in training.init",
        )?;
        rule(
            t.distill.is_none() || self.parallel.context == 1,
            "training.distill",
            "needs whole sequences for the teacher; set parallel.context to 1",
        )?;
        rule(
            t.rope_fade.is_none_or(|[from, to]| from < to),
            "training.rope_fade",
            "must be two numbers of tokens, [begin, end]",
        )?;
        if let PruningRecipe::Tolerance(x) = t.pruning {
            rule(x < 0.0, "training.pruning", "must be config, off, auto or a negative number")?;
        }
        if let Some(Err((key, detail))) = t.masking.map(|masking| masking.check()) {
            return Err(Error::value(&self.name, key, detail));
        }
        if let Err((key, detail)) = self.data.synthetic.check() {
            return Err(Error::value(&self.name, &format!("data.synthetic.{key}"), detail));
        }
        Ok(())
    }

    fn validate_task(&self) -> Result<()> {
        let Some(task) = &self.data.task else { return Ok(()) };
        let bad = |key: &str, detail: String| Err(Error::value(&self.name, key, detail));
        if task.task().is_none() {
            let known: Vec<&str> = fox_data::task::names().collect();
            let meant = match nearest(&task.name, known.iter().copied()) {
                Some(name) => format!("did you mean `{name}`?"),
                None => format!("the tasks are {}", known.join(", ")),
            };
            return bad(
                "data.task.name",
                format!("is `{}`, which is not a task; {meant}", task.name),
            );
        }
        if let Err(problem) = task.check() {
            return bad(&format!("data.task.{}", problem.key), problem.detail);
        }
        let (length, longest) = (self.data.sequence_length, task.training_length());
        match length == longest {
            true => Ok(()),
            false => bad(
                "data.sequence_length",
                format!(
                    "is {length}, but the longest case of data.task.train has {longest} tokens; make them equal"
                ),
            ),
        }
    }
}
