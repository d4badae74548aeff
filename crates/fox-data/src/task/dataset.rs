//! The cases of a task as a data set.

use super::config::Stream;
use super::{START, Setting, TaskConfig};
use crate::dataset::{Dataset, DocumentLengths, check_range};
use crate::error::{Error, Result};

/// How many cases a stream has: more than any run reads.
const CASES: u64 = 1 << 32;

/// The training cases of a task, each a document. Nothing is stored: cases are written when they are read.
///
/// Case `n` has the setting `n` modulo their number. All documents are as long as the longest case; shorter cases are
/// padded behind their end, without answers.
#[derive(Debug, Clone)]
pub struct TaskDataset {
    config: TaskConfig,
    stream: Stream,
    lengths: DocumentLengths,
}

impl TaskDataset {
    /// The cases to train on.
    ///
    /// # Errors
    /// A task that does not exist, settings that cannot be.
    pub fn train(config: TaskConfig) -> Result<Self> {
        Self::new(config, Stream::Train)
    }

    /// Other cases of the same settings, for evaluations during training.
    ///
    /// # Errors
    /// As [`Self::train`].
    pub fn held_out(config: TaskConfig) -> Result<Self> {
        Self::new(config, Stream::HeldOut)
    }

    fn new(config: TaskConfig, stream: Stream) -> Result<Self> {
        if config.task().is_none() {
            return Err(Error::UnknownTask { name: config.name });
        }
        if let Err(problem) = config.check() {
            let (name, detail) = (config.name, format!("{} {}", problem.key, problem.detail));
            return Err(Error::BadTask { name, detail });
        }
        let len = config.training_length() as u64;
        Ok(TaskDataset {
            config,
            stream,
            lengths: DocumentLengths::Uniform { documents: CASES, len },
        })
    }

    fn setting(&self, document: u64) -> &Setting {
        &self.config.train[(document % self.config.train.len() as u64) as usize]
    }
}

impl Dataset for TaskDataset {
    fn lengths(&self) -> &DocumentLengths {
        &self.lengths
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<()> {
        let mut labelled = vec![false; out.len()];
        self.read_labelled(document, start, out, &mut labelled)
    }

    fn read_labelled(
        &self,
        document: u64,
        start: u64,
        out: &mut [u32],
        labelled: &mut [bool],
    ) -> Result<()> {
        check_range(&self.lengths, document, start, out.len())?;
        let case = self.config.case(self.stream, self.setting(document), document);
        let Some(case) = case else {
            return Err(Error::UnknownTask { name: self.config.name.clone() });
        };
        for (i, (token, labelled)) in out.iter_mut().zip(labelled).enumerate() {
            let at = start as usize + i;
            *token = case.tokens.get(at).copied().unwrap_or(START);
            *labelled = case.answers.get(at).copied().unwrap_or(false);
        }
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        self.config.vocabulary as usize
    }

    fn bos(&self) -> u32 {
        START
    }

    fn identity(&self) -> String {
        let TaskConfig { name, seed, vocabulary, train, .. } = &self.config;
        let setting = |s: &Setting| format!("{} x {}", s.length, s.difficulty);
        let settings: Vec<String> = train.iter().map(setting).collect();
        let stream = match self.stream {
            Stream::Train => "",
            _ => " held out",
        };
        format!(
            "task-v1 {name} seed {seed} vocabulary {vocabulary} settings {}{stream}",
            settings.join(", ")
        )
    }

    fn tokenizer_identity(&self) -> String {
        format!("task {} of {} ids", self.config.name, self.config.vocabulary)
    }
}
