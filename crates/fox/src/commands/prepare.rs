//! `fox prepare`: from text to token shards.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, bail};
use fox_data::{
    HeldOut, PrepareOptions, PrepareProgress, PrepareReport, Replace, Tokenizer, prepare,
};
use serde_json::json;

use crate::device::parse_threads;
use crate::progress::Bar;
use crate::{output, signals};

/// Turn text into token shards for training
///
/// CORPUS is a text file (any UTF-8 file), JSON lines, either of them compressed (.zst, .gz), or a folder of such files.
/// The shards are the same for any number of threads. The same command resumes a stopped preparation; one that is
/// complete is compared with the corpus, document by document, and prepared again where the corpus has changed.
#[derive(clap::Args)]
pub struct Args {
    /// File or folder of text
    #[arg(value_name = "CORPUS")]
    corpus: PathBuf,
    /// Folder for the shards
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// bytes, gpt2, json-gpt2, or the file or folder of a tokenizer
    #[arg(long, default_value = "gpt2", value_name = "NAME")]
    tokenizer: String,
    /// Field of a JSON object that holds the text
    #[arg(long, default_value = "text", value_name = "NAME")]
    field: String,
    /// Separator of the documents of a plain text file; without it a file is one document
    #[arg(long, value_name = "TEXT")]
    separator: Option<String>,
    /// Fraction of the documents to hold out for evaluation, selected by the hash of their text
    #[arg(
        long,
        default_value_t = 0.01,
        value_name = "FRACTION",
        allow_negative_numbers = true,
        conflicts_with = "heldout_corpus"
    )]
    heldout: f64,
    /// Hold out this fraction of every document instead, at its end: for a corpus of few documents
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true,
          conflicts_with_all = ["heldout", "heldout_corpus"])]
    heldout_ends: Option<f64>,
    /// Another corpus to hold out, instead of a fraction of this one
    #[arg(long, value_name = "CORPUS")]
    heldout_corpus: Option<PathBuf>,
    /// Seed of the selection of held-out documents
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Tokens per shard
    #[arg(long, default_value_t = 1 << 24, value_name = "N")]
    shard_tokens: u64,
    /// Do not mark the end of each document
    #[arg(long)]
    no_end_mark: bool,
    /// Threads; all cores by default
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    fn options(&self) -> Result<PrepareOptions> {
        let tokenizer = Tokenizer::from_name(&self.tokenizer)?;
        let mut options = PrepareOptions::new(&self.corpus, &self.out, tokenizer);
        options.corpus_options.text_field = self.field.clone();
        options.corpus_options.separator = self.separator.clone();
        options.held_out = match (&self.heldout_corpus, self.heldout_ends) {
            (Some(path), _) => HeldOut::Path(path.clone()),
            (None, Some(fraction)) => HeldOut::Ends { fraction },
            (None, None) if self.heldout == 0.0 => HeldOut::None,
            (None, None) => HeldOut::Fraction { fraction: self.heldout, seed: self.seed },
        };
        options.shard_tokens = self.shard_tokens;
        options.end_mark = !self.no_end_mark;
        // 0 means all cores.
        options.threads = self.threads.unwrap_or(0);
        options.replace = Replace::ChangedCorpus;
        Ok(options)
    }
}

/// Prepares with a progress bar. Being stopped is an error.
pub fn prepare_with_bar(options: &PrepareOptions, stop: &AtomicBool) -> Result<PrepareReport> {
    let bar = Bar::of_bytes(&format!("preparing {}", options.corpus.display()));
    let report = prepare(options, |progress: &PrepareProgress| {
        bar.set_bytes(progress.bytes_read, progress.bytes_total, || {
            let (documents, tokens) =
                (output::grouped(progress.documents), output::grouped(progress.tokens));
            format!("{documents} documents, {tokens} tokens")
        });
        match stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    bar.finish();
    let report = report?;
    if stop.load(Ordering::Relaxed) {
        bail!(
            "stopped; run the same command again to resume after {} finished shards",
            report.progress.shards
        );
    }
    Ok(report)
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let options = args.options()?;
    let stop = signals::on_stop(|| output::note("\nstopping; finished shards stay"))?;
    let start = Instant::now();
    let report = prepare_with_bar(&options, &stop)?;
    let seconds = start.elapsed().as_secs_f64();
    let (index, done) = (&report.index, &report.progress);
    if report.replaced {
        output::note("note: the corpus has changed, so it was prepared again");
    }
    if done.empty_documents > 0 {
        let count = output::grouped(done.empty_documents);
        output::note(&format!("note: empty documents are left out ({count})"));
    }
    if report.shared_documents > 0 {
        output::note(&format!(
            "note: {} of {} held-out documents are also trained on; a loss on them says little about new text",
            output::grouped(report.shared_documents),
            output::grouped(index.heldout.documents()),
        ));
    }
    let rate = done.text_bytes as f64 / seconds / 1e6;
    if args.json {
        let report = json!({
            "out": args.out, "tokenizer": index.tokenizer, "vocab_size": index.vocab_size,
            "train_documents": index.train.documents(), "train_tokens": index.train.tokens(),
            "heldout_documents": index.heldout.documents(), "heldout_tokens": index.heldout.tokens(),
            "empty_documents": done.empty_documents, "shared_documents": report.shared_documents,
            "shards_kept": done.shards_kept, "seconds": seconds, "text_mb_per_s": rate,
            "already_complete": report.already_complete,
        });
        output::print(&format!("{report:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let split = |name: &str, documents: u64, tokens: u64| {
        vec![
            name.to_string(),
            format!("{} documents", output::grouped(documents)),
            format!("{} tokens", output::grouped(tokens)),
        ]
    };
    let how = match report.already_complete {
        true => "was complete already".to_string(),
        false => format!("{seconds:.1} s, {rate:.1} MB of text per second"),
    };
    output::print(&format!(
        "{} with tokenizer {}: {how}\n{}",
        args.out.display(),
        index.tokenizer,
        output::table(&[
            split("train", index.train.documents(), index.train.tokens()),
            split("held out", index.heldout.documents(), index.heldout.tokens()),
        ]),
    ))?;
    Ok(ExitCode::SUCCESS)
}
