//! Corpus to token shards: parallel, resumable, the same bytes for any number of threads.
//!
//! One thread reads, decompresses and parses; it splits long documents where the tokenizer allows and bundles short
//! ones, so that every bundle is some 64 KiB of text. Worker threads turn text into ids. The calling thread sorts the
//! results and writes shards. Text in flight is bounded in bytes.
//!
//! A stopped preparation resumes when it is started again with the same options: finished shards are verified, their
//! documents are read again only to compare their hashes, and the rest is tokenized. A complete preparation is
//! verified in the same way, because equal sizes and dates of files do not prove equal contents.

mod chunks;
mod manifest;
mod output;
mod pipeline;

mod split;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

pub use split::HeldOut;

use crate::corpus::{Corpus, CorpusOptions};
use crate::dataset::Split;
use crate::error::{Error, Result};
use crate::shard::{
    INDEX_FILE, Index, PreparedDataset, TokenWidth, Verify, read_index, write_index,
};
use crate::tokenizer::Tokenizer;
use fox_base::durable;
use manifest::Manifest;
use output::{FinishedDocuments, Output};
use pipeline::Source;

/// What to prepare.
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// File or folder of the corpus.
    pub corpus: PathBuf,
    /// How to find documents in it.
    pub corpus_options: CorpusOptions,
    /// Folder for the shards; it must be empty, missing, or hold the same preparation.
    pub out: PathBuf,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Which documents are finished for evaluation.
    pub held_out: HeldOut,
    /// A shard is ended by the first document that brings it to this many tokens.
    pub shard_tokens: u64,
    /// Whether every document ends with the tokenizer's start marker, so that a model learns where texts end.
    pub end_mark: bool,
    /// Worker threads; 0 for one per core.
    pub threads: usize,
    /// Whether another preparation in `out` is replaced.
    pub replace: Replace,
}

/// Which preparation in the output folder is replaced instead of refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Replace {
    /// None.
    #[default]
    Never,
    /// One with the same options of an earlier version of the corpus.
    ChangedCorpus,
    /// Any preparation.
    Always,
}

impl Replace {
    /// Whether the preparation that `error` is about is replaced.
    fn allows(self, error: &Error) -> bool {
        match error {
            Error::DifferentPreparation { same_options, .. } => match self {
                Replace::Never => false,
                Replace::ChangedCorpus => *same_options,
                Replace::Always => true,
            },
            _ => false,
        }
    }
}

impl PrepareOptions {
    /// Default options: one percent of the documents held out, shards of 16 million tokens, end marks, all cores.
    pub fn new(corpus: impl Into<PathBuf>, out: impl Into<PathBuf>, tokenizer: Tokenizer) -> Self {
        Self {
            corpus: corpus.into(),
            corpus_options: CorpusOptions::default(),
            out: out.into(),
            tokenizer,
            held_out: HeldOut::Fraction { fraction: 0.01, seed: 0 },
            shard_tokens: 1 << 24,
            end_mark: true,
            threads: 0,
            replace: Replace::Never,
        }
    }
}

/// How far a preparation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrepareProgress {
    /// Bytes of the corpus read and tokenized so far, as they lie on the disk.
    pub bytes_read: u64,
    /// Bytes of the whole corpus on the disk.
    pub bytes_total: u64,
    /// Documents done, those in finished shards of an earlier run included.
    pub documents: u64,
    /// Tokens done, those in finished shards of an earlier run included.
    pub tokens: u64,
    /// Bytes of text tokenized in this run.
    pub text_bytes: u64,
    /// Finished shards, those of an earlier run included.
    pub shards: u64,
    /// Finished shards of an earlier run.
    pub shards_kept: u64,
    /// Documents without any text, which are left out.
    pub empty_documents: u64,
}

/// What was prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareReport {
    /// The folder's index.
    pub index: Index,
    /// The last state of the progress.
    pub progress: PrepareProgress,
    /// Whether the folder was complete before, so that the corpus had only to be compared with it.
    pub already_complete: bool,
    /// Whether another preparation in the folder was replaced.
    pub replaced: bool,
    /// Held-out documents that are training documents as well; 0 unless they come from a separate corpus.
    pub shared_documents: u64,
}

/// Prepares a corpus. `progress` is called from this thread, many times a second; after `Break` the same call
/// resumes.
///
/// # Errors
/// A corpus that cannot be read or has changed, an output folder that holds something else or is in use, a disk that
/// is full. Finished shards stay in all cases.
pub fn prepare(
    options: &PrepareOptions,
    mut progress: impl FnMut(&PrepareProgress) -> ControlFlow<()>,
) -> Result<PrepareReport> {
    if options.shard_tokens == 0 {
        return Err(Error::BadOption {
            option: "shard_tokens",
            detail: "a shard needs at least one token; leave it out for the default size".into(),
        });
    }
    let corpora = sources(options)?;
    let manifest = Manifest::new(options, &corpora);
    let (_lock, replaced) = manifest.claim(&options.out, options.replace)?;
    let report = match complete_index(&options.out)? {
        Some(index) => confirm(options, corpora, index, &mut progress),
        None => create(options, corpora, &mut progress),
    };
    match report {
        // Files of the same sizes have other contents.
        Err(error) if options.replace.allows(&error) => {
            manifest::remove_shards(&options.out)?;
            let report = create(options, sources(options)?, &mut progress)?;
            Ok(PrepareReport { replaced: true, ..report })
        }
        report => Ok(PrepareReport { replaced, ..report? }),
    }
}

type Progress<'a> = &'a mut dyn FnMut(&PrepareProgress) -> ControlFlow<()>;

fn report_to(progress: Progress<'_>, state: &PrepareProgress) -> Result<()> {
    match progress(state) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Stopped),
    }
}

/// Compares the corpus with a complete preparation. Nothing is written.
fn confirm(
    options: &PrepareOptions,
    sources: Vec<Source>,
    index: Index,
    progress: Progress<'_>,
) -> Result<PrepareReport> {
    let finished = FinishedDocuments::all(&options.out, &index)?;
    let shared_documents = finished.shared();
    let shards = (index.train.shards.len() + index.heldout.shards.len()) as u64;
    let mut state = PrepareProgress {
        bytes_total: total_bytes(&sources),
        shards_kept: shards,
        shards,
        tokens: index.train.tokens() + index.heldout.tokens(),
        ..PrepareProgress::default()
    };
    let empty = pipeline::run(options, sources, finished, |_, reading| {
        state.documents += 1;
        state.bytes_read = reading.bytes.load(Ordering::Relaxed);
        state.empty_documents = reading.empty.load(Ordering::Relaxed);
        report_to(progress, &state)
    })?;
    state.bytes_read = state.bytes_total;
    state.empty_documents = empty;
    Ok(PrepareReport {
        index,
        progress: state,
        already_complete: true,
        replaced: false,
        shared_documents,
    })
}

/// Tokenizes what the finished shards lack and writes the index.
fn create(
    options: &PrepareOptions,
    sources: Vec<Source>,
    progress: Progress<'_>,
) -> Result<PrepareReport> {
    let width = TokenWidth::for_vocabulary(options.tokenizer.vocab_size());
    let mut output = Output::open(options, width)?;
    let mut state = PrepareProgress {
        bytes_total: total_bytes(&sources),
        shards_kept: output.shards(),
        shards: output.shards(),
        tokens: output.tokens(),
        ..PrepareProgress::default()
    };
    let empty = pipeline::run(options, sources, output.finished(), |event, reading| {
        match event {
            pipeline::Event::Finished => state.documents += 1,
            pipeline::Event::Ids { split, ids, text_bytes, ends } => {
                state.tokens += ids.len() as u64;
                state.text_bytes += text_bytes as u64;
                output.push(split, &ids)?;
                if let Some(text_hash) = ends {
                    state.documents += 1;
                    state.tokens += output.end_document(split, text_hash)?;
                }
            }
        }
        state.shards = output.shards();
        state.bytes_read = reading.bytes_done(state.text_bytes);
        state.empty_documents = reading.empty.load(Ordering::Relaxed);
        report_to(progress, &state)
    })?;
    let (train, heldout) = output.finish()?;
    if state.documents == 0 {
        return Err(Error::NoDocuments { path: options.corpus.clone() });
    }
    state.shards = (train.shards.len() + heldout.shards.len()) as u64;
    state.bytes_read = state.bytes_total;
    state.empty_documents = empty;
    let index = Index {
        version: Index::current_version(),
        tokenizer: options.tokenizer.identity().to_string(),
        vocab_size: options.tokenizer.vocab_size(),
        bos: options.tokenizer.bos(),
        token_bytes: width.bytes(),
        end_mark: options.end_mark,
        train,
        heldout,
    };
    options.tokenizer.save(&options.out)?;
    write_index(&options.out, &index)?;
    let shared_documents = match options.held_out {
        HeldOut::Path(_) => FinishedDocuments::all(&options.out, &index)?.shared(),
        // Copies of a document are on the same side.
        HeldOut::None | HeldOut::Fraction { .. } | HeldOut::Ends { .. } => 0,
    };
    Ok(PrepareReport {
        index,
        progress: state,
        already_complete: false,
        replaced: false,
        shared_documents,
    })
}

fn total_bytes(sources: &[Source]) -> u64 {
    sources.iter().map(|s| s.corpus.total_bytes()).sum()
}

/// The corpora to read, in order, and where their documents go.
fn sources(options: &PrepareOptions) -> Result<Vec<Source>> {
    let open = |path: &Path| {
        let mut corpus = Corpus::open(path, options.corpus_options.clone())?;
        // The output may lie inside of the corpus, and has files that end like a corpus.
        corpus.leave_out(&options.out)?;
        Ok::<_, Error>(corpus)
    };
    let corpus = open(&options.corpus)?;
    match &options.held_out {
        HeldOut::None => Ok(vec![Source::all(corpus, Split::Train)]),
        HeldOut::Fraction { fraction, seed } => {
            let rule = split::SplitRule::new(*fraction, *seed)?;
            Ok(vec![Source::by_rule(corpus, rule)])
        }
        HeldOut::Ends { fraction } => {
            split::check_fraction(*fraction)?;
            Ok(vec![Source::ends(corpus, *fraction)])
        }
        HeldOut::Path(path) => {
            let held_out = open(path)?;
            Ok(vec![Source::all(corpus, Split::Train), Source::all(held_out, Split::HeldOut)])
        }
    }
}

/// The index of a complete, undamaged folder. An index beside damaged files is removed, so that these are rebuilt.
fn complete_index(out: &Path) -> Result<Option<Index>> {
    let path = out.join(INDEX_FILE);
    if !path.exists() {
        return Ok(None);
    }
    let checked = read_index(out).and_then(|index| {
        for (split, entries) in [(Split::Train, &index.train), (Split::HeldOut, &index.heldout)] {
            if !entries.shards.is_empty() {
                PreparedDataset::open(out, split, Verify::Everything)?;
            }
        }
        Ok(index)
    });
    match checked {
        Ok(index) => Ok(Some(index)),
        Err(
            Error::Missing { .. }
            | Error::BadIndex { .. }
            | Error::BadShard { .. }
            | Error::WrongTokenizer { .. },
        ) => {
            fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Creates the output's folders.
fn create_folders(out: &Path) -> Result<()> {
    for split in [Split::Train, Split::HeldOut] {
        durable::create_folder(&out.join(split.name()))?;
    }
    Ok(())
}
