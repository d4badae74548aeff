//! Compares `prepare` with the tokenizer library alone on all cores:
//! `cargo run -p fox-data --release --example prepare_speed -- CORPUS [TOKENIZER]`

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use fox_data::{Corpus, CorpusOptions, HeldOut, PrepareOptions, Tokenizer, prepare};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: prepare_speed CORPUS [TOKENIZER]")?;
    let tokenizer = Tokenizer::from_name(&arguments.next().unwrap_or_else(|| "gpt2".into()))?;
    let threads = std::thread::available_parallelism()?.get();

    let start = Instant::now();
    let corpus = Corpus::open(Path::new(&path), CorpusOptions::default())?;
    let texts = corpus
        .documents()
        .map(|document| Ok(document?.text))
        .collect::<fox_data::Result<Vec<String>>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    let speed = |seconds: f64| bytes as f64 / 1e6 / seconds;
    let reading = start.elapsed().as_secs_f64();
    println!("{} documents, {:.1} MB of text, {threads} threads", texts.len(), bytes as f64 / 1e6);
    println!("reading alone, 1 thread:  {:8.1} MB/s", speed(reading));

    tokenizer.encode("warm")?;
    let start = Instant::now();
    let alone = encode_all(&texts, &tokenizer, threads);
    let library = start.elapsed().as_secs_f64();
    println!("tokenizer library alone:  {:8.1} MB/s", speed(library));
    drop(texts);

    let out = std::env::temp_dir().join(format!("fox-prepare-speed-{}", std::process::id()));
    let options = PrepareOptions {
        held_out: HeldOut::None,
        end_mark: false,
        ..PrepareOptions::new(&path, &out, tokenizer)
    };
    let start = Instant::now();
    let report = prepare(&options, |_| ControlFlow::Continue(()))?;
    let prepared = start.elapsed().as_secs_f64();
    std::fs::remove_dir_all(&out)?;
    if report.index.train.tokens() != alone as u64 {
        return Err("prepare and the library disagree about the number of tokens".into());
    }
    println!("prepare:                  {:8.1} MB/s", speed(prepared));
    println!("{alone} tokens; prepare reaches {:.2} of the library alone", library / prepared);
    Ok(())
}

/// The number of ids, documents shared out longest first.
fn encode_all(texts: &[String], tokenizer: &Tokenizer, threads: usize) -> usize {
    let mut order: Vec<&String> = texts.iter().collect();
    order.sort_by_key(|t| std::cmp::Reverse(t.len()));
    let (next, total) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(text) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let ids = tokenizer.encode(text).map_or(0, |ids| ids.len());
                    total.fetch_add(ids, Ordering::Relaxed);
                }
            });
        }
    });
    total.into_inner()
}
