//! A server in this process, with a tiny random model.
#![allow(clippy::unwrap_used, clippy::expect_used, dead_code)] // every test uses a part of it

pub mod client;

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fox_data::Tokenizer;
use fox_infer::{Engine, EngineOptions};
use fox_model::{Model, ModelConfig};
use fox_serve::{ServeOptions, ServedModel, Server, ShutdownHandle};
use serde_json::Value;

/// A running server; dropping it stops it and waits for its end.
pub struct Running {
    pub address: SocketAddr,
    pub engine: Engine,
    pub stopper: ShutdownHandle,
    thread: Option<JoinHandle<()>>,
}

/// A random FoX (Pro) that knows all bytes.
pub fn model() -> Model {
    model_ending_at(None)
}

/// The same, with an id that ends a document.
pub fn model_ending_at(end: Option<usize>) -> Model {
    let mut config = ModelConfig::fox_pro(32, 2, 2).with_vocab(256);
    config.tokens.eos = end.into_iter().collect();
    Model::init(&config, 7, &fox_cpu::device()).unwrap()
}

pub fn serve_with(engine: EngineOptions, options: ServeOptions) -> Running {
    serve_model(model(), engine, options)
}

pub fn serve_model(model: Model, engine: EngineOptions, options: ServeOptions) -> Running {
    let engine = Engine::start(model, engine).unwrap();
    let tokenizer = Tokenizer::from_name("bytes").unwrap();
    let served = ServedModel { name: "tiny".into(), engine: engine.clone(), tokenizer };
    let options = ServeOptions { address: ([127, 0, 0, 1], 0).into(), ..options };
    let server = Server::bind(served, options).unwrap();
    let (address, stopper) = (server.address().unwrap(), server.shutdown_handle());
    let thread = Some(std::thread::spawn(move || server.run().unwrap()));
    Running { address, engine, stopper, thread }
}

pub fn serve() -> Running {
    serve_with(EngineOptions::default(), ServeOptions::default())
}

impl Running {
    /// A completion that must succeed.
    pub fn complete(&self, body: &Value) -> Value {
        let reply = client::post(self.address, "/v1/completions", body).unwrap();
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// The chunks of a streamed completion; the end marker must follow them.
    pub fn stream(&self, body: &Value) -> Vec<Value> {
        let mut open = client::open_json(self.address, "/v1/completions", body).unwrap();
        assert_eq!(open.head.status, 200);
        let mut chunks = Vec::new();
        while let Some(event) = open.event().unwrap() {
            if event == "[DONE]" {
                assert_eq!(open.event().unwrap(), None);
                return chunks;
            }
            chunks.push(serde_json::from_str(&event).unwrap());
        }
        panic!("no [DONE] after {chunks:?}");
    }

    /// Waits until the server has ended by itself.
    pub fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Waits until something is so.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}
