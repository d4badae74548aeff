//! A model's answers to the cases of a test set.

use fox_data::task::{Case, START, Setting, TaskConfig};
use fox_model::ForwardOptions;
use fox_tensor::{DType, Segments, Tape, Tensor, Var};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::subject::Subject;
use crate::{Error, Result};

/// Cases are read together, up to this many tokens at a time.
const BATCH_TOKENS: usize = 16_384;
/// Logits in memory at once.
const LOGITS: usize = 1 << 24;

/// How many answers and cases of a setting were right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CellScore {
    /// Tokens of a case.
    pub length: usize,
    /// Difficulty of the cases.
    pub difficulty: f64,
    /// Cases asked.
    pub cases: u64,
    /// Answers asked for.
    pub answers: u64,
    /// Answers that were right.
    pub answers_right: u64,
    /// Cases all of whose answers were right.
    pub cases_right: u64,
}

impl CellScore {
    /// No cases yet.
    pub fn new(setting: &Setting) -> Self {
        let Setting { length, difficulty } = *setting;
        CellScore { length, difficulty, ..CellScore::default() }
    }

    /// Counts a case by whether each of its answers was right.
    pub fn add(&mut self, right: &[bool]) {
        self.cases += 1;
        self.answers += right.len() as u64;
        self.answers_right += right.iter().filter(|right| **right).count() as u64;
        self.cases_right += u64::from(right.iter().all(|right| *right));
    }
}

/// A function that returns the most likely token at every answer of every case, in order.
pub type Reading<'a> = dyn FnMut(&[Case]) -> Result<Vec<Vec<u32>>> + 'a;

/// Scores a reader on `cases` cases of each setting. `progress` receives the number of finished cases.
///
/// # Errors
/// Whatever the reader fails with, and a task that does not exist.
pub fn score_task(
    task: &TaskConfig,
    settings: &[Setting],
    cases: u64,
    read: &mut Reading<'_>,
    mut progress: impl FnMut(u64),
) -> Result<Vec<CellScore>> {
    let mut scores = Vec::new();
    let mut done = 0;
    for setting in settings {
        let mut score = CellScore::new(setting);
        let together = (BATCH_TOKENS / setting.length.max(1)).max(1) as u64;
        let mut next = 0;
        while next < cases {
            let batch = next..cases.min(next + together);
            next = batch.end;
            let batch: Option<Vec<Case>> = batch.map(|i| task.test_case(setting, i)).collect();
            let batch = batch.ok_or_else(|| Error::Argument(format!("no task {}", task.name)))?;
            let said = read(&batch)?;
            for (case, said) in batch.iter().zip(&said) {
                score.add(&answers_right(case, said));
            }
            done += batch.len() as u64;
            progress(done);
        }
        scores.push(score);
    }
    Ok(scores)
}

/// Compares the predicted answers of a case with the right ones; a missing answer is wrong.
pub fn answers_right(case: &Case, said: &[u32]) -> Vec<bool> {
    let wanted = case.tokens.iter().zip(&case.answers).filter(|(_, answer)| **answer);
    wanted.enumerate().map(|(i, (token, _))| said.get(i) == Some(token)).collect()
}

impl Subject<'_> {
    /// The most likely token at every answer of cases of equal length, given the tokens before it.
    ///
    /// # Errors
    /// A model whose output is NaN or infinite, and whatever computing can fail with.
    pub fn answers(&self, cases: &[Case], options: &ForwardOptions) -> Result<Vec<Vec<u32>>> {
        let Some(length) = cases.first().map(|case| case.tokens.len()) else { return Ok(vec![]) };
        let mut inputs = Vec::with_capacity(cases.len() * length);
        for case in cases {
            inputs.push(START as i32);
            inputs.extend(case.tokens[..length - 1].iter().map(|id| *id as i32));
        }
        let device = self.model.device();
        let rows = inputs.len();
        let inputs = device.from_i32(&inputs, [rows])?;
        let segments = Segments::uniform(cases.len(), length);
        let mut tape = Tape::inference(device);
        let hidden = self.model.forward(&mut tape, &inputs, &segments, None, options)?;
        // Row `i` has read all tokens before token `i`.
        let asked: Vec<usize> = cases
            .iter()
            .flat_map(|case| &case.answers)
            .enumerate()
            .filter_map(|(row, answer)| answer.then_some(row))
            .collect();
        let mut said = self.most_likely(hidden.states.value(), &asked)?.into_iter();
        let count = |case: &Case| case.answers.iter().filter(|answer| **answer).count();
        Ok(cases.iter().map(|case| said.by_ref().take(count(case)).collect()).collect())
    }

    /// The most likely next token after each of `rows` of normalised states `[R, D]`.
    fn most_likely(&self, states: &Tensor, rows: &[usize]) -> Result<Vec<u32>> {
        let vocab = self.model.config().vocab_size;
        let device = self.model.device();
        let mut said = Vec::with_capacity(rows.len());
        for rows in rows.chunks((LOGITS / vocab).max(1)) {
            let mut chosen = device.zeros([rows.len(), states.cols()], DType::F32)?;
            for (i, row) in rows.iter().enumerate() {
                device.backend().copy_rows(states, *row, &mut chosen, i, 1)?;
            }
            let mut tape = Tape::inference(device);
            let logits = self.model.logits(&mut tape, &Var::constant(chosen))?.value().to_f32()?;
            self.check_finite(&logits, |at| format!("a logit of token {}", at % vocab))?;
            said.par_extend(logits.par_chunks(vocab).map(largest));
        }
        Ok(said)
    }
}

/// The first of the largest values.
fn largest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str, vocabulary: u32, setting: (usize, f64)) -> TaskConfig {
        let settings = vec![Setting::from(setting)];
        TaskConfig {
            name: name.into(),
            seed: 3,
            vocabulary,
            train: settings.clone(),
            test: settings,
            test_cases: 40,
        }
    }

    /// The right answers of a case, but only the first `known` of them.
    fn knowing(case: &Case, known: usize) -> Vec<u32> {
        let right = case.tokens.iter().zip(&case.answers).filter(|(_, a)| **a).map(|(t, _)| *t);
        right.enumerate().map(|(i, token)| if i < known { token } else { START }).collect()
    }

    #[test]
    fn perfect_reader_scores_one() {
        for config in [config("mqar", 64, (40, 8.0)), config("flip-flop", 6, (64, 0.5))] {
            let mut all = |cases: &[Case]| Ok(cases.iter().map(|c| knowing(c, 99)).collect());
            let score = score_task(&config, &config.test, 40, &mut all, |_| ()).unwrap()[0];
            assert_eq!((score.cases, score.cases_right), (40, 40));
            assert!(score.answers >= 40 && score.answers == score.answers_right);
        }
    }

    #[test]
    fn case_needs_all_answers_right() {
        let config = config("mqar", 64, (40, 8.0));
        let mut first = |cases: &[Case]| Ok(cases.iter().map(|c| knowing(c, 1)).collect());
        let score = score_task(&config, &config.test, 40, &mut first, |_| ()).unwrap()[0];
        assert_eq!((score.cases_right, score.answers_right, score.answers), (0, 40, 320));
    }

    #[test]
    fn missing_answer_is_wrong() {
        let case = Case { tokens: vec![1, 2, 3], answers: vec![false, true, true] };
        assert_eq!(answers_right(&case, &[2]), [true, false]);
        assert_eq!(answers_right(&case, &[3, 2]), [false, false]);
    }
}
