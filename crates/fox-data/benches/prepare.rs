//! Compares `prepare` with the tokenizer library alone on all cores, and the first reading of shards, which checks them,
//! with the second:
//! `cargo bench -p fox-data --bench prepare -- CORPUS [TOKENIZER]`

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use fox_data::{
    Corpus, CorpusOptions, Dataset, HeldOut, PrepareOptions, PreparedDataset, Split, Tokenizer,
    Verify, prepare,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let path = arguments
        .next()
        .ok_or("usage: cargo bench -p fox-data --bench prepare -- CORPUS [TOKENIZER]")?;
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
    let readings = read_twice(&out)?;
    std::fs::remove_dir_all(&out)?;
    if report.index.train.tokens() != alone as u64 {
        return Err("prepare and the library disagree about the number of tokens".into());
    }
    println!("prepare:                  {:8.1} MB/s", speed(prepared));
    println!("{alone} tokens; prepare reaches {:.2} of the library alone", library / prepared);
    let stored = (report.index.train.tokens() * report.index.token_bytes as u64) as f64;
    for (name, seconds) in
        ["shards read once (checked):", "shards read again:"].iter().zip(readings)
    {
        println!("{name:27} {:8.1} MB/s, {:.1} ms", stored / 1e6 / seconds, 1e3 * seconds);
    }
    Ok(())
}

/// Seconds that a first and a second reading of all tokens take.
fn read_twice(folder: &Path) -> fox_data::Result<[f64; 2]> {
    let data = PreparedDataset::open(folder, Split::Train, Verify::Structure)?;
    let mut ids = vec![0; 1 << 16];
    let mut read = || -> fox_data::Result<f64> {
        let begin = Instant::now();
        for document in 0..data.lengths().documents() {
            let len = data.lengths().len_of(document).unwrap_or(0);
            for start in (0..len).step_by(ids.len()) {
                let count = (len - start).min(ids.len() as u64) as usize;
                data.read(document, start, &mut ids[..count])?;
            }
        }
        Ok(begin.elapsed().as_secs_f64())
    };
    Ok([read()?, read()?])
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
