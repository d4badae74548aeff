//! `fox serve`: a model behind HTTP.

use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use fox_infer::{Engine, Sampling};
use fox_serve::{AccessLog, ServeOptions, ServedModel, Server};

use crate::engine::GenerationArgs;
use crate::{output, signals};

/// Serve a model: OpenAI-compatible API and a web page
///
/// POST /v1/completions and /v1/chat/completions answer as OpenAI's do, with exact log-probabilities for prompts
/// (echo) and answers. Conversations use the chat template of the checkpoint; its generation_config.json has the
/// sampling defaults of requests. GET / is a web page that
/// shows generated text, forget gates and attention. Ctrl-C lets running requests finish; a second one exits at once.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folder, or NAME=FOLDER; the pretrained model of the repository by default
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Address or name to listen on; other machines reach the server only if this is not a loopback address
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY`; better given as FOX_API_KEY in the environment
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Another name of the model; may be given several times
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    /// Site whose pages may use the server, e.g. https://app.example, or *; may be given several times
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    allow_origin: Vec<String>,
    /// Server whose model the page shows beside this one's, e.g. http://127.0.0.1:8081; it needs --allow-origin with
    /// this server's address
    #[arg(long, value_name = "ORIGIN", value_parser = parse_server)]
    compare: Option<String>,
    /// Refuse requests with unknown fields instead of naming these in a response header
    #[arg(long)]
    strict: bool,
    /// Log every response to standard error
    #[arg(long, value_enum, value_name = "FORM")]
    access_log: Option<LogForm>,
    /// Largest number of tokens of prompt and answer together
    #[arg(long, value_name = "N", default_value_t = 65536,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_context: u32,
    /// Largest decode batch
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_batch: u32,
    /// Capacity of the request queue; more get 429
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_queue: u32,
    /// Memory for answers in flight (log-probabilities, texts, JSON), in GiB; more get 413 or 429
    #[arg(long, value_name = "GIB", default_value_t = 0.25, allow_negative_numbers = true)]
    answer_memory: f64,
    /// Time limit of a request, in seconds
    #[arg(long, value_name = "S", default_value_t = 600.0, allow_negative_numbers = true)]
    timeout: f64,
    /// Time that running requests get when the server stops, in seconds
    #[arg(long, value_name = "S", default_value_t = 30.0, allow_negative_numbers = true)]
    drain: f64,
    #[command(flatten)]
    run: GenerationArgs,
}

/// Formats of the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogForm {
    /// Words between spaces
    Text,
    /// A JSON object
    Json,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut serve_options = args.options()?;
    let (opened, tokenizer) = args.run.open(args.model.as_deref())?;
    let files = opened.generation(&tokenizer)?;
    serve_options.sampling = files.config.sampling(Sampling::default());
    serve_options.chat = files.chat;
    serve_options.end_ids = files.end_ids;
    let mut options = args.run.options(args.max_context as usize, opened.model.device())?;
    options.max_batch = args.max_batch as usize;
    options.max_queue = args.max_queue as usize;
    let name = opened.name.clone();
    let engine = Engine::start(opened.model, options)?;
    let cache = output::bytes(engine.options().cache_bytes as f64);
    let bound = Server::bind(ServedModel { name: opened.name, engine, tokenizer }, serve_options);
    let server = bound.map_err(|error| match error {
        fox_serve::Error::Bind { .. } => anyhow!("{error}; choose another with --host and --port"),
        other => other.into(),
    })?;
    let address = server.address()?;
    stop_on_signal(&server)?;
    output::note(&format!(
        "{name} at http://{address} (page) and http://{address}/v1 (API), {cache} for KV caches; Ctrl-C stops it"
    ));
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn options(&self) -> Result<ServeOptions> {
        let key = self.api_key.clone().or_else(|| std::env::var("FOX_API_KEY").ok());
        if key.as_deref() == Some("") {
            bail!("the API key is empty; leave it out to serve without one");
        }
        let address = resolve(&self.host, self.port)?;
        if key.is_none() && !address.ip().is_loopback() {
            output::note(&format!(
                "note: anyone who reaches {} may use this server; see --api-key",
                self.host
            ));
        }
        Ok(ServeOptions {
            address,
            api_key: key,
            aliases: self.alias.clone(),
            allow_origins: self.allow_origin.clone(),
            compare: self.compare.clone(),
            strict: self.strict,
            access_log: self.access_log.map(|form| match form {
                LogForm::Text => AccessLog::Text,
                LogForm::Json => AccessLog::Json,
            }),
            request_time: match seconds("--timeout", self.timeout)? {
                Duration::ZERO => {
                    bail!("--timeout 0 leaves no time to answer; give seconds above 0")
                }
                time => time,
            },
            drain_time: seconds("--drain", self.drain)?,
            answer_bytes: match self.answer_memory {
                size if size > 0.0 && size < 1e6 => (size * (1u64 << 30) as f64) as usize,
                size => bail!("--answer-memory must be a size in GiB, not {size}"),
            },
            ..ServeOptions::default()
        })
    }
}

/// The address of a name, IPv4 where there are both.
fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let hint = "give an address of this machine with --host";
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = (host, port).to_socket_addrs();
    let found: Vec<SocketAddr> =
        found.with_context(|| format!("cannot find the host {host}; {hint}"))?.collect();
    let address = found.iter().find(|address| address.is_ipv4()).or(found.first());
    address.copied().with_context(|| format!("the host {host} has no address; {hint}"))
}

fn parse_origin(text: &str) -> Result<String, String> {
    let is_origin = |text: &str| {
        let host = text.split_once("://").map(|(_, host)| host);
        host.is_some_and(|host| !host.is_empty() && !host.contains('/'))
    };
    match text.trim_end_matches('/') {
        origin if origin == "*" || is_origin(origin) => Ok(origin.to_string()),
        _ => Err("a scheme and a host, e.g. https://app.example, or *".into()),
    }
}

/// An origin that stands for one server.
fn parse_server(text: &str) -> Result<String, String> {
    let is_plain =
        |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || ":/.-_[]".contains(c));
    match parse_origin(text) {
        Ok(origin) if origin.starts_with("http") && is_plain(&origin) => Ok(origin),
        _ => Err("the address of a server, e.g. http://127.0.0.1:8081".into()),
    }
}

fn seconds(flag: &str, value: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(value) {
        Ok(time) => Ok(time),
        Err(_) => bail!("{flag} must be a number of seconds, not {value}"),
    }
}

/// The first signal drains, the second ends the process.
fn stop_on_signal(server: &Server) -> Result<()> {
    let stopper = server.shutdown_handle();
    signals::on_stop(move || {
        output::note("stopping: running requests may finish; interrupt again to exit at once");
        stopper.stop();
    })?;
    Ok(())
}
