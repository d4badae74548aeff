//! The shards of both splits while they are written.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use fox_base::durable;

use super::PrepareOptions;
use crate::dataset::Split;
use crate::error::{Error, Result};
use crate::shard::{Index, ShardEntry, ShardReader, ShardWriter, SplitIndex, TokenWidth};

/// Hashes of the documents in finished shards, per split, in order.
#[derive(Debug, Default)]
pub(super) struct FinishedDocuments {
    train: VecDeque<u64>,
    heldout: VecDeque<u64>,
    /// The preparation is complete: the corpus must have no other documents.
    complete: bool,
}

impl FinishedDocuments {
    /// The documents of a complete preparation.
    pub(super) fn all(out: &Path, index: &Index) -> Result<Self> {
        let hashes = |split: &SplitIndex| -> Result<VecDeque<u64>> {
            let mut hashes = VecDeque::new();
            for shard in &split.shards {
                let shard = ShardReader::open(&out.join(&shard.file))?;
                hashes.extend(shard.entries().iter().map(|e| e.text_hash));
            }
            Ok(hashes)
        };
        Ok(Self { train: hashes(&index.train)?, heldout: hashes(&index.heldout)?, complete: true })
    }

    fn of(&mut self, split: Split) -> &mut VecDeque<u64> {
        match split {
            Split::Train => &mut self.train,
            Split::HeldOut => &mut self.heldout,
        }
    }

    /// Whether the next document of a split is in a finished shard; `None` if another document is expected there.
    pub(super) fn take(&mut self, split: Split, text_hash: u64) -> Option<bool> {
        match self.of(split).pop_front() {
            Some(stored) => (stored == text_hash).then_some(true),
            None => (!self.complete).then_some(false),
        }
    }

    /// Whether every document of the finished shards was taken.
    pub(super) fn is_empty(&self) -> bool {
        self.train.is_empty() && self.heldout.is_empty()
    }

    /// Held-out documents whose text is also a training document.
    pub(super) fn shared(&self) -> u64 {
        let heldout: HashSet<u64> = self.heldout.iter().copied().collect();
        let trained: HashSet<u64> =
            self.train.iter().copied().filter(|hash| heldout.contains(hash)).collect();
        self.heldout.iter().filter(|hash| trained.contains(hash)).count() as u64
    }
}

/// Both splits.
pub(super) struct Output {
    train: SplitOutput,
    heldout: SplitOutput,
    finished: Option<FinishedDocuments>,
}

impl Output {
    /// Reads the shards of an earlier run: undamaged ones stay, all from the first damaged one on are removed.
    pub(super) fn open(options: &PrepareOptions, width: TokenWidth) -> Result<Self> {
        let mut finished = FinishedDocuments::default();
        let mut open = |split| SplitOutput::open(options, width, split, finished.of(split));
        let train = open(Split::Train)?;
        let heldout = open(Split::HeldOut)?;
        Ok(Self { train, heldout, finished: Some(finished) })
    }

    /// The documents that need no tokenizing. Can be taken once.
    pub(super) fn finished(&mut self) -> FinishedDocuments {
        self.finished.take().unwrap_or_default()
    }

    pub(super) fn shards(&self) -> u64 {
        (self.train.done.len() + self.heldout.done.len()) as u64
    }

    /// Tokens in finished shards.
    pub(super) fn tokens(&self) -> u64 {
        let done = self.train.done.iter().chain(&self.heldout.done);
        done.map(|shard| shard.tokens).sum()
    }

    fn of(&mut self, split: Split) -> &mut SplitOutput {
        match split {
            Split::Train => &mut self.train,
            Split::HeldOut => &mut self.heldout,
        }
    }

    /// Appends ids to the current document of a split.
    pub(super) fn push(&mut self, split: Split, ids: &[u32]) -> Result<()> {
        self.of(split).writer()?.push(ids)
    }

    /// Ends a document; returns how many ids that added.
    pub(super) fn end_document(&mut self, split: Split, text_hash: u64) -> Result<u64> {
        self.of(split).end_document(text_hash)
    }

    /// Finishes the last shards.
    pub(super) fn finish(self) -> Result<(SplitIndex, SplitIndex)> {
        Ok((self.train.finish()?, self.heldout.finish()?))
    }
}

struct SplitOutput {
    out: PathBuf,
    split: Split,
    width: TokenWidth,
    tokenizer: u128,
    shard_tokens: u64,
    end_mark: Option<u32>,
    done: Vec<ShardEntry>,
    current: Option<ShardWriter>,
}

impl SplitOutput {
    fn open(
        options: &PrepareOptions,
        width: TokenWidth,
        split: Split,
        finished: &mut VecDeque<u64>,
    ) -> Result<Self> {
        let mut output = Self {
            out: options.out.clone(),
            split,
            width,
            tokenizer: options.tokenizer.identity().hash,
            shard_tokens: options.shard_tokens,
            end_mark: options.end_mark.then(|| options.tokenizer.bos()),
            done: Vec::new(),
            current: None,
        };
        loop {
            let name = output.next_name();
            let path = output.out.join(&name);
            let whole = ShardReader::open(&path).and_then(|shard| {
                shard.verify()?;
                Ok(shard)
            });
            match whole {
                // A short shard is the last one of a complete run; an incomplete run must not append after it.
                Ok(shard) if output.is_full(&shard) => {
                    finished.extend(shard.entries().iter().map(|e| e.text_hash));
                    output.done.push(shard.index_entry(name));
                }
                Ok(_) | Err(Error::Missing { .. } | Error::BadShard { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        output.remove_leftovers()?;
        Ok(output)
    }

    fn is_full(&self, shard: &ShardReader) -> bool {
        shard.tokenizer() == self.tokenizer
            && shard.width() == self.width
            && shard.entries().last().is_some_and(|e| e.end >= self.shard_tokens)
    }

    fn next_name(&self) -> String {
        format!("{}/{:05}.tokens", self.split.name(), self.done.len())
    }

    /// Removes unfinished files and shards after the finished ones.
    fn remove_leftovers(&self) -> Result<()> {
        let folder = self.out.join(self.split.name());
        for entry in fs::read_dir(&folder).map_err(Error::io("list", &folder))? {
            let path = entry.map_err(Error::io("list", &folder))?.path();
            let finished = self.done.iter().any(|shard| self.out.join(&shard.file) == path);
            let named = durable::final_path(&path).unwrap_or_else(|| path.clone());
            let ours = named.extension().is_some_and(|ending| ending == "tokens");
            if ours && !finished {
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            }
        }
        Ok(())
    }

    fn writer(&mut self) -> Result<&mut ShardWriter> {
        let writer = match self.current.take() {
            Some(writer) => writer,
            None => {
                let path = self.out.join(self.next_name());
                ShardWriter::create(&path, self.width, self.tokenizer)?
            }
        };
        Ok(self.current.insert(writer))
    }

    fn end_document(&mut self, text_hash: u64) -> Result<u64> {
        let end_mark = self.end_mark;
        let shard_tokens = self.shard_tokens;
        let writer = self.writer()?;
        if let Some(id) = end_mark {
            writer.push(&[id])?;
        }
        writer.end_document(text_hash);
        if writer.tokens() >= shard_tokens {
            self.finish_current()?;
        }
        Ok(u64::from(end_mark.is_some()))
    }

    fn finish_current(&mut self) -> Result<()> {
        if let Some(writer) = self.current.take() {
            let entry = writer.finish(self.next_name())?;
            self.done.push(entry);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<SplitIndex> {
        self.finish_current()?;
        Ok(SplitIndex { shards: self.done })
    }
}
