//! Options and limits of a server.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use fox_infer::Sampling;

use crate::access::AccessLog;
use crate::chat::ChatTemplate;

/// Options of a server. Limits on context, queue and KV cache are options of the engine.
#[derive(Clone, Debug, PartialEq)]
pub struct ServeOptions {
    /// Address to listen on. Port 0 takes a free one.
    pub address: SocketAddr,
    /// API key that clients send as `Authorization: Bearer KEY`; the page and `/health` need none.
    pub api_key: Option<String>,
    /// Further names of the model.
    pub aliases: Vec<String>,
    /// Chat template.
    pub chat: ChatTemplate,
    /// Ids that end an answer, besides the tokenizer's marker and the end ids of the model's configuration.
    pub end_ids: Vec<i32>,
    /// Sampling parameters of requests that do not set them; every request has its own seed.
    pub sampling: Sampling,
    /// Whether unknown fields of a request are refused; otherwise a header of the answer names them.
    pub strict: bool,
    /// Sites whose pages may use the server, such as `https://app.example`, or `*`. On loopback they are also
    /// the hosts besides localhost that it answers as.
    pub allow_origins: Vec<String>,
    /// Another server, such as `http://127.0.0.1:8081`, whose model the page shows beside this one's. It must allow
    /// this server's origin.
    pub compare: Option<String>,
    /// Format of the access log; none without one.
    pub access_log: Option<AccessLog>,
    /// Largest body of a request, in bytes.
    pub max_body: usize,
    /// Limit on the bytes of all unfinished bodies; the first 64 KiB of each do not count.
    pub body_bytes: usize,
    /// Limit on the bytes of all answers in flight: log-probabilities, texts and JSON.
    pub answer_bytes: usize,
    /// Largest number of choices of a request: prompts times `n` or `best_of`.
    pub max_choices: usize,
    /// Largest number of alternatives per token.
    pub max_logprobs: usize,
    /// Largest number of tokens for `/inspect`.
    pub max_inspect: usize,
    /// Largest number of connections. A few more are accepted for `/health` and `/metrics` and answer 503 to anything else;
    /// others wait to be accepted.
    pub max_connections: usize,
    /// Time limit from the head of a request to the end of its response.
    pub request_time: Duration,
    /// Time limit for receiving a request, and for a client that does not read.
    pub stall_time: Duration,
    /// Time that running requests get when the server stops.
    pub drain_time: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            address: (Ipv4Addr::LOCALHOST, 8080).into(),
            api_key: None,
            aliases: Vec::new(),
            chat: ChatTemplate::default(),
            end_ids: Vec::new(),
            sampling: Sampling::default(),
            strict: false,
            allow_origins: Vec::new(),
            compare: None,
            access_log: None,
            max_body: 16 << 20,
            body_bytes: 64 << 20,
            answer_bytes: 256 << 20,
            max_choices: 1024,
            max_logprobs: 20,
            max_inspect: 4096,
            max_connections: 1024,
            request_time: Duration::from_secs(600),
            stall_time: Duration::from_secs(30),
            drain_time: Duration::from_secs(30),
        }
    }
}
