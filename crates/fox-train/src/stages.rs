//! Lengths that grow in the course of a run, a stage each.
//!
//! `data.stages` lists the shorter lengths that come before `data.sequence_length`, each with its tokens. A step has the
//! same number of tokens in all stages: sequences half as long are twice as many. So steps, schedule and memory are those
//! of the last stage, and a stage is a loader and the step that it begins with.

use fox_data::{Loader, LoaderConfig, LoaderState, Prefetcher};
use serde::{Deserialize, Serialize};

use crate::checkpoint::RunState;
use crate::data::RunData;
use crate::{Error, Recipe, Result};

/// A stage before the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageRecipe {
    /// Tokens in a sequence; a divisor of `data.sequence_length`, longer than in the stage before.
    pub length: usize,
    /// Tokens of the stage; its last step may go beyond.
    pub tokens: u64,
}

impl Recipe {
    /// Stages that do not grow, do not divide a step, or leave nothing for the last one.
    pub(crate) fn check_stages(&self) -> Result<()> {
        let stages = &self.data.stages;
        let bad = |detail: String| Err(Error::value(&self.name, "data.stages", detail));
        if stages.is_empty() {
            return Ok(());
        }
        if self.data.task.is_some() || self.data.messages.is_some() {
            return bad("are for text; leave them out with data.task and data.messages".into());
        }
        if self.parallel.context > 1 {
            return bad("and shared sequences do not go together; set parallel.context to 1".into());
        }
        let (last, mut before) = (self.data.sequence_length, 0);
        for stage in stages {
            let length = stage.length;
            if length <= before || length >= last || !last.is_multiple_of(length) {
                return bad(format!(
                    "have a length of {length}; lengths must grow and divide data.sequence_length, which is {last}"
                ));
            }
            before = length;
        }
        let first: u64 = stages.iter().fold(0, |sum, stage| sum.saturating_add(stage.tokens));
        if first >= self.training.tokens || stages.iter().any(|stage| stage.tokens == 0) {
            return bad(format!(
                "have {first} tokens in all; give each at least 1 and leave some of training.tokens, which is {}, for the last length",
                self.training.tokens
            ));
        }
        Ok(())
    }
}

/// A loader for every stage.
pub(crate) struct Stages {
    /// First step and loader, in order; never empty.
    stages: Vec<(u64, Loader)>,
}

impl Stages {
    /// The stages of a recipe over its data.
    pub fn new(data: &RunData, recipe: &Recipe) -> Result<Stages> {
        let whole = data.loader(recipe)?;
        let (step, mut stages, mut tokens) = (recipe.tokens_per_step(), Vec::new(), 0);
        for stage in &recipe.data.stages {
            let rows = recipe.training.batch * (recipe.data.sequence_length / stage.length);
            let config =
                LoaderConfig { window: stage.length, batch: rows, ..whole.config().clone() };
            stages.push((u64::div_ceil(tokens, step), Loader::new(data.train.clone(), config)?));
            tokens += stage.tokens;
        }
        stages.push((u64::div_ceil(tokens, step), whole));
        // A stage of less than a step has none.
        stages.reverse();
        stages.dedup_by_key(|(first, _)| *first);
        stages.reverse();
        // Known before the first step, not after days.
        let ends = stages[1..].iter().map(|(first, _)| *first).chain([recipe.steps()]);
        for ((first, loader), end) in stages.iter().zip(ends) {
            if let Some(batches) =
                loader.batches().filter(|batches| *batches < end.saturating_sub(*first))
            {
                return Err(Error::DataEnd { batches });
            }
        }
        Ok(Stages { stages })
    }

    /// The stage of the step that comes after `done` steps.
    fn at(&self, done: u64) -> &(u64, Loader) {
        let later = self.stages.iter().rposition(|(first, _)| *first <= done);
        &self.stages[later.unwrap_or(0)]
    }

    /// The loader of the step that comes after `done` steps.
    pub fn loader(&self, done: u64) -> &Loader {
        &self.at(done).1
    }

    /// Before the first step.
    pub fn start(&self) -> LoaderState {
        self.loader(0).state_at(0)
    }

    /// Whether another stage comes after `done` steps.
    pub fn change_after(&self, done: u64) -> bool {
        self.stages[1..].iter().any(|(first, _)| *first == done)
    }

    /// An error if the state of a run belongs to other data or settings. At the end of a stage it is one of the loader
    /// that is over.
    pub fn check(&self, state: &RunState) -> Result<()> {
        Ok(self.loader(state.step.saturating_sub(1)).check_state(&state.loader)?)
    }

    /// Batches of the stage that a run is in, from its next step on.
    pub fn prefetch(&self, state: &RunState, depth: usize) -> Result<Prefetcher> {
        let (first, loader) = self.at(state.step);
        Ok(loader.prefetch(loader.state_at(state.step - first), depth)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    fn recipe(stages: &str) -> Result<Recipe> {
        let set = ["data.sequence_length=64", "training.batch=2", "training.tokens=1024"];
        let mut set = set.map(String::from).to_vec();
        set.extend(["schedule.warmup_tokens=0".to_string(), format!("data.stages={stages}")]);
        recipe::load("tiny-fox-pro", &set)
    }

    #[test]
    fn steps_have_stage_length_and_equal_tokens() {
        // 1.5 and 3 steps of 128 tokens: the second stage begins with step 2, the last with step 5.
        let text = "[{ length = 16, tokens = 192 }, { length = 32, tokens = 384 }]";
        let recipe = recipe(text).unwrap();
        let data = RunData::open(&recipe).unwrap();
        let stages = Stages::new(&data, &recipe).unwrap();
        let mut lengths = Vec::new();
        let mut state = RunState::start(stages.start());
        for step in 0..8 {
            stages.check(&state).unwrap();
            let batch = stages.prefetch(&state, 1).unwrap().next().unwrap().unwrap();
            assert_eq!(batch.batch * batch.time, 128);
            lengths.push(batch.time);
            let first = [0, 2, 5].into_iter().rfind(|first| *first <= step).unwrap();
            assert_eq!(batch.state.next_batch, step - first + 1, "batches of the stage so far");
            (state.step, state.loader) = (step + 1, batch.state);
            assert_eq!(stages.change_after(step + 1), [2, 5].contains(&(step + 1)));
        }
        assert_eq!(lengths, [16, 16, 32, 32, 32, 64, 64, 64]);
        // A state of the first stage is none of the last one.
        state.loader = stages.start();
        assert!(stages.check(&state).is_err());
    }

    #[test]
    fn rejects_bad_stages() {
        let message = |text: &str| recipe(text).unwrap_err().to_string();
        let text = message("[{ length = 48, tokens = 128 }]");
        assert!(
            text.contains("a length of 48; lengths must grow and divide data.sequence_length"),
            "{text}"
        );
        let text = message("[{ length = 32, tokens = 128 }, { length = 16, tokens = 128 }]");
        assert!(text.contains("a length of 16; lengths must grow"), "{text}");
        let text = message("[{ length = 32, tokens = 1024 }]");
        assert!(text.contains("have 1024 tokens in all"), "{text}");
        let text = message("[{ length = 32, token = 1 }]");
        assert!(
            text.ends_with("unknown key `data.stages.token`; did you mean `data.stages.tokens`?"),
            "{text}"
        );
    }

    #[test]
    fn rejects_data_that_end_before_the_run() {
        let stages = |epochs: u64, steps: u64| {
            let documents = vec![vec![1; 1024]; 4];
            let train = fox_data::MemoryDataset::new(documents, 8, 0, "ones");
            let data = RunData {
                train: std::sync::Arc::new(train),
                heldout: None,
                tokenizer: None,
                chat: None,
            };
            let mut recipe = recipe("[]").unwrap();
            recipe.data.epochs = Some(epochs);
            recipe.training.tokens = steps * recipe.tokens_per_step();
            Stages::new(&data, &recipe).map(|_| ())
        };
        let one = match stages(1, 1 << 20) {
            Err(Error::DataEnd { batches }) => batches,
            other => panic!("{other:?}"),
        };
        assert!(one > 0);
        stages(1, one).unwrap();
        stages(2, 2 * one).unwrap();
        assert!(matches!(stages(1, one + 1), Err(Error::DataEnd { batches }) if batches == one));
    }
}
