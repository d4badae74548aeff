//! Scores of samples: string match of the greedy answer, and the order of right and wrong candidates.

use std::path::Path;

use fox_data::Tokenizer;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::draft::{Generator, Sample};
use super::file::FileSamples;
use super::report::{Cell, ModelCells};
use super::{Matching, RulerTask};
use crate::needle::Reader;
use crate::score_log::ScoreLog;
use crate::{Error, Result};

/// Where samples come from.
pub enum Samples<'a> {
    /// Generated from a seed and a text.
    Generated {
        /// Makes them.
        generator: Generator<'a>,
        /// Their tasks.
        tasks: Vec<RulerTask>,
        /// Tokens of prompt and answer.
        lengths: Vec<usize>,
        /// Samples per task and length.
        count: u64,
    },
    /// Read from RULER's files.
    Files {
        /// The files.
        files: Vec<FileSamples>,
        /// Tokens to generate instead of RULER's.
        max_tokens: Option<usize>,
    },
}

/// Samples of one task and length.
struct Group {
    task: String,
    length: usize,
    matching: Matching,
    count: u64,
}

impl Samples<'_> {
    fn groups(&self) -> Vec<Group> {
        match self {
            Samples::Generated { tasks, lengths, count, .. } => {
                let group = |length: usize, task: &RulerTask| Group {
                    task: task.name().into(),
                    length,
                    matching: task.matching(),
                    count: *count,
                };
                let groups = lengths.iter().flat_map(|l| tasks.iter().map(move |t| group(*l, t)));
                groups.collect()
            }
            Samples::Files { files, .. } => files
                .iter()
                .map(|file| Group {
                    task: file.task.clone(),
                    length: file.length,
                    matching: file.matching,
                    count: file.samples.len() as u64,
                })
                .collect(),
        }
    }

    fn sample(&self, group: usize, index: u64, tokenizer: &Tokenizer) -> Result<Sample> {
        match self {
            Samples::Generated { generator, tasks, lengths, .. } => {
                let (length, task) = (lengths[group / tasks.len()], tasks[group % tasks.len()]);
                generator.sample(task, length, index)
            }
            Samples::Files { files, max_tokens } => {
                let file = &files[group];
                let (input, outputs) = &file.samples[index as usize];
                let mut prompt = vec![tokenizer.bos()];
                prompt.extend(tokenizer.encode(input)?);
                let max_tokens = max_tokens.unwrap_or(file.max_tokens);
                Ok(Sample { prompt, outputs: outputs.clone(), wrong: Vec::new(), max_tokens })
            }
        }
    }

    /// Number of samples.
    pub fn total(&self) -> u64 {
        self.groups().iter().map(|group| group.count).sum()
    }

    /// Everything that decides the samples, in words.
    pub fn identity(&self, tokenizer: &Tokenizer) -> String {
        match self {
            Samples::Generated { generator, .. } => generator.identity().to_string(),
            Samples::Files { files, max_tokens } => {
                let mut hash = 0;
                for file in files {
                    hash = XxHash3_64::oneshot_with_seed(hash, format!("{file:?}").as_bytes());
                }
                format!("files {hash:016x} {max_tokens:?} by {}", tokenizer.identity())
            }
        }
    }
}

/// The score of one sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleScore {
    /// RULER's string match of the greedy answer, 0 to 1.
    pub matched: f64,
    /// Of `k` right answers, the fraction that is among the `k` most likely candidates; absent without wrong answers.
    pub top: Option<f64>,
    /// Fraction of the pairs of a right and a wrong candidate in which the right one is more likely; 0.5 by chance.
    pub auc: Option<f64>,
    /// Fraction `top` of a random order.
    pub chance: Option<f64>,
    /// The greedy answer.
    pub said: String,
}

/// Which sample, in the score file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct SampleKey {
    task: String,
    length: usize,
    sample: u64,
}

/// Asks every sample. With a file and the fingerprint of the model, scores are kept there line by line and not asked
/// again. `progress` receives the number of finished samples.
///
/// # Errors
/// No samples, lengths that are too short for a task or longer than the text, and whatever computing can fail with.
pub fn run_ruler(
    model: &str,
    reader: &mut dyn Reader,
    samples: &Samples<'_>,
    tokenizer: &Tokenizer,
    file: Option<(&Path, u64)>,
    mut progress: impl FnMut(u64),
) -> Result<ModelCells> {
    if samples.total() == 0 {
        return Err(Error::Argument("the evaluation needs tasks, lengths and samples".into()));
    }
    let (path, fingerprint) = file.unzip();
    let identity =
        format!("model {:016x}, {}", fingerprint.unwrap_or(0), samples.identity(tokenizer));
    let mut log: ScoreLog<SampleKey, SampleScore> = ScoreLog::open(path, &identity)?;
    let mut cells = Vec::new();
    let mut done = 0;
    for (g, group) in samples.groups().iter().enumerate() {
        let mut scores = Vec::new();
        for index in 0..group.count {
            let key = SampleKey { task: group.task.clone(), length: group.length, sample: index };
            let score = match log.get(&key) {
                Some(score) => score.clone(),
                None => {
                    let sample = samples.sample(g, index, tokenizer)?;
                    let score = score(reader, &sample, group.matching, tokenizer)?;
                    log.add(key, score.clone())?;
                    score
                }
            };
            scores.push(score);
            done += 1;
            progress(done);
        }
        cells.push(Cell::new(&group.task, group.length, &scores));
    }
    Ok(ModelCells { model: model.to_string(), cells })
}

fn score(
    reader: &mut dyn Reader,
    sample: &Sample,
    matching: Matching,
    tokenizer: &Tokenizer,
) -> Result<SampleScore> {
    let (right, wrong) = (&sample.outputs[..], &sample.wrong[..]);
    let candidates: Vec<Vec<u32>> = match wrong {
        [] => Vec::new(),
        _ => {
            let encode = |text: &String| tokenizer.encode(&format!(" {text}"));
            right.iter().chain(wrong).map(encode).collect::<fox_data::Result<_>>()?
        }
    };
    let reading = reader.read(&sample.prompt, &candidates, sample.max_tokens)?;
    let said = tokenizer.decode(&reading.greedy)?;
    let order = (!wrong.is_empty()).then(|| order(&reading.log_probs, right.len()));
    Ok(SampleScore {
        matched: matching.score(&said, right),
        top: order.map(|(top, _)| top),
        auc: order.map(|(_, auc)| auc),
        chance: order.map(|_| right.len() as f64 / candidates.len() as f64),
        said,
    })
}

/// `top` and `auc` of log-probabilities of which the first `right` are those of right answers; ties count as lost.
fn order(log_probs: &[f64], right: usize) -> (f64, f64) {
    let (good, bad) = log_probs.split_at(right);
    let mut pairs = 0;
    let mut top = 0;
    for value in good {
        let above = bad.iter().filter(|other| *other >= value).count();
        pairs += bad.len() - above;
        let better = good.iter().filter(|other| *other > value).count();
        top += usize::from(above + better < right);
    }
    let of = |count: usize, all: usize| count as f64 / all.max(1) as f64;
    (of(top, right), of(pairs, right * bad.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_by_hand() {
        // Right: -1 and -4; wrong: -2, -3, -5.
        let (top, auc) = order(&[-1.0, -4.0, -2.0, -3.0, -5.0], 2);
        assert_eq!(top, 0.5);
        assert!((auc - 4.0 / 6.0).abs() < 1e-12);
        assert_eq!(order(&[-1.0, -2.0, -3.0], 1), (1.0, 1.0));
        assert_eq!(order(&[-1.0, -1.0, -3.0], 1), (0.0, 0.5));
        assert_eq!(order(&[-9.0, -1.0, -3.0], 1), (0.0, 0.0));
    }
}
