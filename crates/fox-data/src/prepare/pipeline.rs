//! The pipeline of a preparation: one reader, tokenizer threads, one writer.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use twox_hash::XxHash3_64;

use super::output::FinishedDocuments;
use super::split::SplitRule;
use super::{PrepareOptions, chunks as chunking, split};
use crate::corpus::Corpus;
use crate::dataset::Split;
use crate::error::{Error, Result};
use crate::tokenizer::{SafeSplit, Tokenizer};

/// Text in one bundle: large enough that sending it costs nothing, small enough that one book occupies all cores.
const BUNDLE_BYTES: usize = 64 * 1024;
/// Text in flight at most; a single document that cannot be split may exceed it.
const BUDGET_BYTES: usize = 64 << 20;

/// A corpus and where its documents go.
pub(super) struct Source {
    pub(super) corpus: Corpus,
    target: Target,
}

enum Target {
    All(Split),
    ByRule(SplitRule),
    /// The end of every document, this fraction of it, is held out.
    Ends(f64),
}

impl Target {
    /// The splits of a document and their texts, each a document. Empty ones are left out.
    fn splits<'t>(&self, text: &'t str) -> impl Iterator<Item = (Split, &'t str)> + use<'t> {
        let (head, end) = match self {
            Target::Ends(fraction) => split::cut_end(text, *fraction),
            _ => (text, ""),
        };
        let split = match self {
            Target::All(split) => *split,
            Target::ByRule(rule) => rule.split_of(hash(text)),
            Target::Ends(_) => Split::Train,
        };
        [(split, head), (Split::HeldOut, end)].into_iter().filter(|(_, text)| !text.is_empty())
    }
}

fn hash(text: &str) -> u64 {
    XxHash3_64::oneshot(text.as_bytes())
}

impl Source {
    pub(super) fn all(corpus: Corpus, split: Split) -> Self {
        Self { corpus, target: Target::All(split) }
    }

    pub(super) fn by_rule(corpus: Corpus, rule: SplitRule) -> Self {
        Self { corpus, target: Target::ByRule(rule) }
    }

    pub(super) fn ends(corpus: Corpus, fraction: f64) -> Self {
        Self { corpus, target: Target::Ends(fraction) }
    }
}

/// Progress of the reader.
#[derive(Default)]
pub(super) struct ReadProgress {
    /// Bytes of the corpus, as they lie on the disk.
    pub(super) bytes: AtomicU64,
    /// Bytes of the text of documents that are to be tokenized.
    text: AtomicU64,
    /// Empty documents skipped.
    pub(super) empty: AtomicU64,
}

impl ReadProgress {
    /// Bytes of the corpus on the disk that are read and tokenized, after `tokenized` bytes of text. A long document is
    /// read at once and tokenized in chunks.
    pub(super) fn bytes_done(&self, tokenized: u64) -> u64 {
        let (bytes, text) = (self.bytes.load(Ordering::Relaxed), self.text.load(Ordering::Relaxed));
        match text {
            0 => bytes,
            text => (bytes as f64 * (tokenized as f64 / text as f64).min(1.0)) as u64,
        }
    }
}

/// Input of the writer, in the order of the corpus.
pub(super) enum Event {
    /// A document that is in a finished shard.
    Finished,
    /// Ids of a chunk of a document.
    Ids {
        split: Split,
        ids: Vec<u32>,
        text_bytes: usize,
        /// The hash of the document's text, for its last chunk.
        ends: Option<u64>,
    },
}

/// A chunk of a document to be tokenized.
struct TextChunk {
    split: Split,
    /// `None` for a document in a finished shard.
    text: Option<String>,
    ends: Option<u64>,
}

/// A numbered bundle of chunks.
struct Bundle {
    number: u64,
    chunks: Vec<TextChunk>,
}

struct EncodedBundle {
    number: u64,
    bytes: usize,
    events: Result<Vec<Event>>,
}

/// Reads, tokenizes and calls `write` with every event in the order of the corpus. Documents in finished shards are not
/// tokenized: their hashes and order must be the same. Returns the number of empty documents.
pub(super) fn run(
    options: &PrepareOptions,
    sources: Vec<Source>,
    finished: FinishedDocuments,
    mut write: impl FnMut(Event, &ReadProgress) -> Result<()>,
) -> Result<u64> {
    let threads = match options.threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let budget = Budget::default();
    let reading = ReadProgress::default();
    let (work_sender, work_receiver) = mpsc::channel::<Bundle>();
    let (done_sender, done_receiver) = mpsc::channel::<EncodedBundle>();
    let work_receiver = Mutex::new(work_receiver);

    thread::scope(|scope| {
        let reader = {
            let (budget, reading) = (&budget, &reading);
            let safe = options.tokenizer.safe_split();
            scope.spawn(move || {
                let bundler = BundleSender::new(work_sender, budget, safe);
                bundler.read(sources, finished, reading, &options.out)
            })
        };
        for _ in 0..threads {
            let done = done_sender.clone();
            let (work, tokenizer) = (&work_receiver, &options.tokenizer);
            scope.spawn(move || encode_all(work, &done, tokenizer));
        }
        drop(done_sender);
        let written = write_in_order(done_receiver, &budget, |event| write(event, &reading));
        // Wakes the reader if writing stopped early; its next send then fails.
        budget.close();
        let read = reader.join().unwrap_or(Err(Error::ThreadLost { thread: "reader" }));
        written.and(read)
    })?;
    Ok(reading.empty.into_inner())
}

/// Turns documents into bundles and sends them to the workers.
struct BundleSender<'a> {
    sender: Sender<Bundle>,
    budget: &'a Budget,
    safe: SafeSplit,
    chunks: Vec<TextChunk>,
    bytes: usize,
    number: u64,
}

/// The writer has stopped and reports the reason itself.
struct WriterStopped;

impl<'a> BundleSender<'a> {
    fn new(sender: Sender<Bundle>, budget: &'a Budget, safe: SafeSplit) -> Self {
        Self { sender, budget, safe, chunks: Vec::new(), bytes: 0, number: 0 }
    }

    fn read(
        mut self,
        sources: Vec<Source>,
        mut finished: FinishedDocuments,
        reading: &ReadProgress,
        out: &Path,
    ) -> Result<()> {
        let changed = |detail: String| Error::DifferentPreparation {
            path: out.to_path_buf(),
            detail,
            same_options: true,
        };
        let (mut bytes_before, mut empty_before) = (0, 0);
        for source in sources {
            let mut documents = source.corpus.documents();
            let counter = documents.bytes_read();
            while let Some(document) = documents.next() {
                let text = document?.text;
                let read = bytes_before + counter.load(Ordering::Relaxed);
                reading.bytes.store(read, Ordering::Relaxed);
                reading.empty.store(empty_before + documents.empty(), Ordering::Relaxed);
                for (split, text) in source.target.splits(&text) {
                    let hash = hash(text);
                    let skip = finished.take(split, hash).ok_or_else(|| {
                        let file = documents.file().map_or("", |file| file.name.as_str());
                        changed(format!("the corpus file {file} has changed since"))
                    })?;
                    if !skip {
                        reading.text.fetch_add(text.len() as u64, Ordering::Relaxed);
                    }
                    if self.push_document(text, split, hash, skip).is_err() {
                        return Ok(());
                    }
                }
            }
            bytes_before += source.corpus.total_bytes();
            empty_before += documents.empty();
        }
        reading.empty.store(empty_before, Ordering::Relaxed);
        if !finished.is_empty() {
            return Err(changed("the corpus has fewer documents than before".into()));
        }
        // A failure means that the writer has stopped, which reports the reason.
        let _ = self.send();
        Ok(())
    }

    fn push_document(
        &mut self,
        text: &str,
        split: Split,
        hash: u64,
        skip: bool,
    ) -> std::result::Result<(), WriterStopped> {
        if skip {
            self.chunks.push(TextChunk { split, text: None, ends: Some(hash) });
            return self.send_if_full();
        }
        let mut chunks = chunking::chunks(text, self.safe, BUNDLE_BYTES).peekable();
        while let Some(chunk) = chunks.next() {
            self.bytes += chunk.len();
            self.chunks.push(TextChunk {
                split,
                text: Some(chunk.to_owned()),
                ends: chunks.peek().is_none().then_some(hash),
            });
            self.send_if_full()?;
        }
        Ok(())
    }

    fn send_if_full(&mut self) -> std::result::Result<(), WriterStopped> {
        if self.bytes >= BUNDLE_BYTES || self.chunks.len() >= 1024 {
            return self.send();
        }
        Ok(())
    }

    fn send(&mut self) -> std::result::Result<(), WriterStopped> {
        if !self.budget.acquire(self.bytes) {
            return Err(WriterStopped);
        }
        let work = Bundle { number: self.number, chunks: std::mem::take(&mut self.chunks) };
        self.number += 1;
        self.bytes = 0;
        self.sender.send(work).map_err(|_| WriterStopped)
    }
}

/// A worker: tokenizes bundles until the channel closes.
fn encode_all(work: &Mutex<Receiver<Bundle>>, done: &Sender<EncodedBundle>, tokenizer: &Tokenizer) {
    loop {
        let received = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Bundle { number, chunks }) = received else {
            return;
        };
        let bytes = chunks.iter().filter_map(|p| p.text.as_ref()).map(String::len).sum();
        // A panic in a tokenizer must not leave the writer waiting for a bundle that never arrives.
        let events = catch_unwind(AssertUnwindSafe(|| {
            chunks.into_iter().map(|chunk| encode(chunk, tokenizer)).collect()
        }))
        .unwrap_or(Err(Error::ThreadLost { thread: "tokenizer" }));
        let sent = done.send(EncodedBundle { number, bytes, events });
        if sent.is_err() {
            return;
        }
    }
}

fn encode(chunk: TextChunk, tokenizer: &Tokenizer) -> Result<Event> {
    let Some(text) = chunk.text else {
        return Ok(Event::Finished);
    };
    Ok(Event::Ids {
        split: chunk.split,
        ids: tokenizer.encode(&text)?,
        text_bytes: text.len(),
        ends: chunk.ends,
    })
}

/// Writes bundles in the order of their numbers.
fn write_in_order(
    done: Receiver<EncodedBundle>,
    budget: &Budget,
    mut write: impl FnMut(Event) -> Result<()>,
) -> Result<()> {
    let mut waiting = BTreeMap::new();
    let mut next = 0;
    for bundle in done {
        waiting.insert(bundle.number, bundle);
        while let Some(bundle) = waiting.remove(&next) {
            for event in bundle.events? {
                write(event)?;
            }
            budget.release(bundle.bytes);
            next += 1;
        }
    }
    Ok(())
}

/// Bounds the bytes in flight.
#[derive(Default)]
struct Budget {
    state: Mutex<BudgetState>,
    changed: Condvar,
}

#[derive(Default)]
struct BudgetState {
    used: usize,
    closed: bool,
}

impl Budget {
    /// Waits until there is room; false once the budget is closed.
    fn acquire(&self, bytes: usize) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self
            .changed
            .wait_while(state, |s| !s.closed && s.used > 0 && s.used + bytes > BUDGET_BYTES)
            .unwrap_or_else(PoisonError::into_inner);
        state.used += bytes;
        !state.closed
    }

    fn release(&self, bytes: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.used -= bytes;
        self.changed.notify_all();
    }

    fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn budget_can_be_used_up_exactly() {
        let budget = Budget::default();
        let (send, receive) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                for bytes in [1, BUDGET_BYTES - 1, 1] {
                    let _ = send.send(budget.acquire(bytes));
                }
            });
            let wait = |ms| receive.recv_timeout(Duration::from_millis(ms));
            let first_two = [wait(10_000), wait(10_000)];
            let third = wait(50);
            budget.close();
            assert_eq!(first_two, [Ok(true), Ok(true)]);
            assert!(third.is_err(), "one byte more than the budget");
        });
    }
}
