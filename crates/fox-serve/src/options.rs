//! Options and limits of a server.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::access::AccessLog;
use crate::chat::ChatTemplate;

/// How a server runs. What the engine limits (context, queue, memory) stands in its own options.
#[derive(Clone, Debug, PartialEq)]
pub struct ServeOptions {
    /// Where to listen; loopback unless told otherwise. Port 0 takes any that is free.
    pub address: SocketAddr,
    /// What clients must send as `Authorization: Bearer KEY`, except for the page and `/health`.
    pub api_key: Option<String>,
    /// Other names of the model that requests may use.
    pub aliases: Vec<String>,
    /// How conversations are written for the model.
    pub chat: ChatTemplate,
    /// Whether unknown fields of a request are refused; otherwise a header of the answer names them.
    pub strict: bool,
    /// Sites whose pages may use the server, such as `https://app.example`, or `*`. On loopback they are also
    /// the hosts besides localhost that it answers as.
    pub allow_origins: Vec<String>,
    /// Another server, such as `http://127.0.0.1:8081`, whose model the page shows beside this one's. It must allow
    /// this server's origin.
    pub compare: Option<String>,
    /// Whether every answer gets a line on standard error.
    pub access_log: Option<AccessLog>,
    /// Bytes of a request's body, at most.
    pub max_body: usize,
    /// Bytes of all unfinished bodies together, at most; the first 64 KiB of a body do not count.
    pub body_bytes: usize,
    /// Bytes of all answers that are generated or sent, at most: log-probabilities, texts and JSON.
    pub answer_bytes: usize,
    /// Answers that one request may ask for: prompts times `n` or `best_of`.
    pub max_choices: usize,
    /// Alternatives per token that may be asked for.
    pub max_logprobs: usize,
    /// Tokens of a text that `/inspect` looks at, at most.
    pub max_inspect: usize,
    /// Connections at a time. A few more are let in for `/health` and `/metrics` and told to come back later for
    /// anything else; others wait to be accepted.
    pub max_connections: usize,
    /// From the head of a request to the end of its answer.
    pub request_time: Duration,
    /// For a request to arrive, and for a client that does not read what it is sent.
    pub stall_time: Duration,
    /// From the wish to stop until requests that still run are cut off.
    pub drain_time: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            address: (Ipv4Addr::LOCALHOST, 8080).into(),
            api_key: None,
            aliases: Vec::new(),
            chat: ChatTemplate::default(),
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
