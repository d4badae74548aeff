//! A storm of clients against a server in this process.
//!
//! `cargo bench -p fox-serve --bench load -- [SECONDS] [WIDTH] [LAYERS]`
//!
//! The model is random, FoX (Pro) of width 512 and 8 layers by default. First one client, then 32 of them,
//! to see what batching gives; then 64 for a minute (or SECONDS): prompts and answers of random lengths, streamed or
//! not, clients that leave in the middle, that read slowly, that send nonsense or too much. Fails, and says why, on any
//! answer that was not meant, on requests that are left, when memory grows, and when batching gains too little.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test in all but name

#[allow(dead_code)] // the tests use the rest
#[path = "../tests/common/client.rs"]
mod client;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fox_data::Tokenizer;
use fox_infer::{Engine, EngineOptions};
use fox_model::{Model, ModelConfig};
use fox_serve::{ServeOptions, ServedModel, Server};
use fox_tensor::cases::Rng;
use serde_json::{Value, json};

const CLIENTS: usize = 64;
/// What 32 clients get at least, in tokens of one; of the default model on a quiet machine.
const GAIN: f64 = 3.0;

/// What happened, by kind of client and outcome, and whether it was meant to.
type Tally = Mutex<BTreeMap<(&'static str, String, bool), usize>>;

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .map(|text| text.parse().expect("a number"));
    let seconds = arguments.next().unwrap_or(60);
    let (width, layers) = (arguments.next().unwrap_or(512), arguments.next().unwrap_or(8));
    let config = ModelConfig::fox_pro(width, layers, width / 64).with_vocab(256);
    let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
    let options = EngineOptions { max_batch: 32, max_queue: 24, ..EngineOptions::default() };
    let engine = Engine::start(model, options).unwrap();
    let tokenizer = Tokenizer::from_name("bytes").unwrap();
    let served = ServedModel { name: "storm".into(), engine: engine.clone(), tokenizer };
    let address = ([127, 0, 0, 1], 0).into();
    let stall_time = Duration::from_secs(5);
    let options = ServeOptions { address, stall_time, ..ServeOptions::default() };
    let server = Server::bind(served, options).unwrap();
    let (address, stopper) = (server.address().unwrap(), server.shutdown_handle());
    let thread = std::thread::spawn(move || server.run().unwrap());

    let count: usize = config.param_specs().iter().map(|spec| spec.count()).sum();
    println!("{:.1}M parameters", count as f64 / 1e6);
    let calm = Duration::from_secs(10.min(seconds as u64));
    let one = throughput(&engine, address, 1, calm);
    let many = throughput(&engine, address, 32, calm);
    println!(
        "1 client: {one:.0} tokens/s; 32 clients: {many:.0} tokens/s, {:.1} times",
        many / one
    );

    let tally = Tally::default();
    let memory = storm(&engine, address, Duration::from_secs(seconds as u64), &tally);
    let mut problems = Vec::new();
    for ((kind, outcome, meant), count) in tally.lock().unwrap().iter() {
        println!("{kind:<10} {outcome:<40} {count:>6}{}", if *meant { "" } else { "  NOT MEANT" });
        if !meant {
            problems.push(format!("{kind}: {outcome}"));
        }
    }
    stopper.stop();
    thread.join().unwrap();
    let stats = engine.stats();
    println!(
        "finished {}, cancelled {}, left {}; cache at most {} of {} bytes, {} at the end",
        stats.finished,
        stats.cancelled,
        stats.running + stats.queued,
        stats.peak_cache_bytes,
        stats.cache_budget,
        stats.cache_bytes
    );
    let (middle, end) = (memory[memory.len() / 2], memory[memory.len() - 1]);
    println!("memory {middle:.0} MiB at half time, {end:.0} MiB at the end");
    if end > 1.1 * middle {
        problems.push(format!("memory grew by {:.0} MiB", end - middle));
    }
    if stats.running + stats.queued > 0 {
        problems.push(format!("{} requests are left", stats.running + stats.queued));
    }
    if many < GAIN * one {
        problems.push(format!("32 clients get less than {GAIN} times the tokens of one"));
    }
    problems.iter().for_each(|problem| println!("FAIL: {problem}"));
    if problems.is_empty() {
        println!("PASS");
    }
    std::process::exit(i32::from(!problems.is_empty()));
}

/// Tokens per second of clients that all ask for 128 tokens, again and again.
fn throughput(engine: &Engine, address: SocketAddr, clients: usize, time: Duration) -> f64 {
    let before = engine.stats().generated_tokens;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for i in 0..clients {
            scope.spawn(move || {
                let mut rng = Rng::new(i as u64);
                while start.elapsed() < time {
                    let body = json!({ "prompt": prompt(&mut rng, 32), "max_tokens": 128, "ignore_eos": true });
                    let status = client::post(address, "/v1/completions", &body).unwrap().status;
                    // More may ask than may run and wait.
                    assert!(status == 200 || status == 429, "{status}");
                }
            });
        }
    });
    (engine.stats().generated_tokens - before) as f64 / start.elapsed().as_secs_f64()
}

/// Lets all clients loose; memory in MiB at twenty moments.
fn storm(engine: &Engine, address: SocketAddr, time: Duration, tally: &Tally) -> Vec<f64> {
    let over = AtomicBool::new(false);
    let before = engine.stats().generated_tokens;
    let mut memory = Vec::new();
    std::thread::scope(|scope| {
        for i in 0..CLIENTS {
            let over = &over;
            scope.spawn(move || {
                let mut rng = Rng::new(1000 + i as u64);
                while !over.load(Ordering::Relaxed) {
                    let (kind, result) = one_request(address, &mut rng);
                    let (outcome, meant) = match result {
                        Ok((outcome, meant)) => (outcome, meant),
                        Err(error) => (error.to_string(), false),
                    };
                    *tally.lock().unwrap().entry((kind, outcome, meant)).or_default() += 1;
                }
            });
        }
        for i in 1..=20 {
            std::thread::sleep(time / 20);
            memory.push(resident_mib());
            let stats = engine.stats();
            let speed = (stats.generated_tokens - before) as f64 / (time * i / 20).as_secs_f64();
            println!(
                "{:>5.1} s  memory {:.0} MiB, cache {:.1} MiB, running {}, waiting {}, {speed:.0} tokens/s so far",
                (time * i / 20).as_secs_f64(),
                memory[memory.len() - 1],
                stats.cache_bytes as f64 / (1 << 20) as f64,
                stats.running,
                stats.queued
            );
        }
        over.store(true, Ordering::Relaxed);
    });
    memory
}

/// One client's next idea: what kind it was, how it went, and whether that was meant.
fn one_request(
    address: SocketAddr,
    rng: &mut Rng,
) -> (&'static str, std::io::Result<(String, bool)>) {
    match rng.between(0, 9) {
        0 => ("leaves", leave(address, rng)),
        1 => ("slow", read_slowly(address, rng)),
        2 => ("malformed", malformed(address, rng)),
        3..=5 => ("stream", stream(address, rng)),
        _ => ("whole", whole(address, rng)),
    }
}

fn prompt(rng: &mut Rng, most: usize) -> Vec<usize> {
    (0..rng.between(1, most)).map(|_| rng.between(0, 254)).collect()
}

fn request(rng: &mut Rng, max_tokens: usize, stream: bool) -> Value {
    let mut body = json!({ "prompt": prompt(rng, 400), "max_tokens": rng.between(0, max_tokens),
        "temperature": 0.8, "stream": stream, "echo": rng.chance(0.2) });
    if rng.chance(0.3) {
        body["logprobs"] = json!(rng.between(0, 5));
    }
    if rng.chance(0.1) {
        body["n"] = json!(2);
    }
    body
}

/// A status in words; 200 and 429 are expected. A client that got 429 waits for `Retry-After`.
fn judged(status: u16, whole: bool) -> (String, bool) {
    if status == 429 {
        std::thread::sleep(Duration::from_secs(1));
    }
    let end = if whole { "" } else { ", cut off" };
    (format!("{status}{end}"), whole && matches!(status, 200 | 429))
}

fn whole(address: SocketAddr, rng: &mut Rng) -> std::io::Result<(String, bool)> {
    let reply = client::post(address, "/v1/completions", &request(rng, 128, false))?;
    let json = reply.json();
    Ok(judged(reply.status, reply.status == 429 || json["choices"][0]["finish_reason"].is_string()))
}

fn stream(address: SocketAddr, rng: &mut Rng) -> std::io::Result<(String, bool)> {
    let mut open = client::open_json(address, "/v1/completions", &request(rng, 128, true))?;
    if open.head.status != 200 {
        return Ok(judged(open.head.status, true));
    }
    let mut last = String::new();
    while let Some(event) = open.event()? {
        last = event;
    }
    Ok(judged(200, last == "[DONE]"))
}

fn leave(address: SocketAddr, rng: &mut Rng) -> std::io::Result<(String, bool)> {
    let is_stream = rng.chance(0.5);
    if !is_stream {
        // Gone before anything came back.
        let body = request(rng, 3000, false).to_string();
        let mut socket = std::net::TcpStream::connect(address)?;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        std::io::Write::write_all(&mut socket, head.as_bytes())?;
        std::thread::sleep(Duration::from_millis(rng.between(0, 200) as u64));
        return Ok(("left before the answer".into(), true));
    }
    let mut open = client::open_json(address, "/v1/completions", &request(rng, 3000, true))?;
    if open.head.status != 200 {
        return Ok(judged(open.head.status, true));
    }
    for _ in 0..rng.between(0, 20) {
        open.event()?;
    }
    Ok(("left in the middle".into(), true))
}

fn read_slowly(address: SocketAddr, rng: &mut Rng) -> std::io::Result<(String, bool)> {
    let mut open = client::open_json(address, "/v1/completions", &request(rng, 64, true))?;
    if open.head.status != 200 {
        return Ok(judged(open.head.status, true));
    }
    let mut last = String::new();
    while let Some(event) = open.event()? {
        last = event;
        std::thread::sleep(Duration::from_millis(rng.between(0, 100) as u64));
    }
    Ok(judged(200, last == "[DONE]"))
}

fn malformed(address: SocketAddr, rng: &mut Rng) -> std::io::Result<(String, bool)> {
    let (body, want) = rng.pick(&[
        (r#"{"prompt": "#, 400),
        (r#"{"prompt": [1, 900]}"#, 400),
        (r#"{"prompt": "a", "temperature": -1}"#, 400),
        (r#"{"prompt": "a", "max_tokens": 99999999}"#, 400),
        (r#"{"prompt": "a", "model": "other"}"#, 404),
        (r#"{"prompt": "a", "suffix": "b"}"#, 400),
    ]);
    let kind = [("content-type", "application/json")];
    let reply =
        client::open(address, ("POST", "/v1/completions"), &kind, body.as_bytes())?.finish()?;
    Ok((format!("{}, {want} expected", reply.status), reply.status == want))
}

/// Memory of this process, clients included.
fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kilobytes.unwrap_or(0.0) / 1024.0
}
