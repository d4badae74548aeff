//! How long a short prompt waits behind long ones, and how evenly running sequences go on meanwhile.
//!
//! `cargo bench -p fox-infer --bench fairness -- [CHUNK] [SEQUENCES]`
//!
//! A random FoX (Pro) of about 3M parameters. STREAMS sequences decode; then three prompts of 30,000 tokens come,
//! and 0.3 s later one of 10 tokens.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a measurement, not a library

use std::time::{Duration, Instant};

use fox_infer::{Completion, Engine, EngineOptions, Event, Request, WeightFormat};
use fox_model::{Model, ModelConfig};

fn ids(seed: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| ((i * 31 + seed * 17 + i * i * 7) % 250) as i32).collect()
}

fn first_token(answer: Completion, asked: Instant) -> Duration {
    for event in answer {
        if let Event::Token(_) = event {
            return asked.elapsed();
        }
    }
    panic!("no token");
}

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .map(|text| text.parse().expect("a number"));
    let chunk = arguments.next().unwrap_or(EngineOptions::default().prefill_chunk);
    let sequences = arguments.next().unwrap_or(4);
    let config = ModelConfig::fox_pro(256, 4, 4).with_vocab(256);
    let count: usize = config.param_specs().iter().map(|spec| spec.count()).sum();
    let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
    let options = EngineOptions {
        prefill_chunk: chunk,
        weights: WeightFormat::F32,
        cache_bytes: 4 << 30,
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options).unwrap();
    println!(
        "{:.1}M parameters, chunks of {chunk} tokens, {sequences} sequences",
        count as f64 / 1e6
    );

    report("sequences alone", &gaps(&engine, sequences, 400));

    let running: Vec<_> = (0..sequences)
        .map(|i| {
            let answer = engine.submit(Request::greedy(ids(i, 20), 20_000)).unwrap();
            std::thread::spawn(move || arrivals(answer))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    let long: Vec<_> = (0..3)
        .map(|i| engine.submit(Request::greedy(ids(100 + i, 30_000), 2)).unwrap())
        .map(|answer| std::thread::spawn(move || first_token(answer, start)))
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    let short = first_token(engine.submit(Request::greedy(ids(200, 10), 2)).unwrap(), asked);
    println!("10 tokens behind 3 x 30,000: first token after {:.3} s", short.as_secs_f64());
    let times: Vec<Duration> = long.into_iter().map(|thread| thread.join().unwrap()).collect();
    let end = Instant::now();
    let last = times.iter().max().unwrap().as_secs_f64();
    println!("the long prompts: {times:.2?}; {:.0} tokens/s", 90_000.0 / last);
    engine.close();
    // Only what came while prompts were read.
    let mut gaps: Vec<f64> = Vec::new();
    for stream in running {
        let times = stream.join().unwrap();
        let during: Vec<_> = times.into_iter().filter(|t| *t > start && *t < end).collect();
        gaps.extend(during.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()));
    }
    report("sequences while prompts are read", &gaps);
}

/// When the tokens of an answer came.
fn arrivals(answer: Completion) -> Vec<Instant> {
    answer.filter(|event| matches!(event, Event::Token(_))).map(|_| Instant::now()).collect()
}

fn gaps(engine: &Engine, sequences: usize, tokens: usize) -> Vec<f64> {
    let all: Vec<_> = (0..sequences)
        .map(|i| {
            let answer = engine.submit(Request::greedy(ids(i, 20), tokens)).unwrap();
            std::thread::spawn(move || arrivals(answer))
        })
        .collect();
    let times = all.into_iter().map(|thread| thread.join().unwrap());
    times
        .flat_map(|t| t.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()).collect::<Vec<_>>())
        .collect()
}

fn report(what: &str, gaps: &[f64]) {
    let mut sorted = gaps.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() {
        return println!("{what}: no tokens");
    }
    let at = |share: f64| 1e3 * sorted[((sorted.len() - 1) as f64 * share) as usize];
    println!(
        "{what}: {} tokens, between two p50 {:.2} ms, p99 {:.2} ms ({:.1} times), most {:.2} ms",
        sorted.len(),
        at(0.5),
        at(0.99),
        at(0.99) / at(0.5),
        at(1.0)
    );
}
