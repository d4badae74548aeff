//! `fox serve`: a model behind HTTP.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use fox_infer::Engine;
use fox_serve::{ServeOptions, Served, Server};

use crate::engine::GenerationArgs;
use crate::{output, signals};

/// Serve a model: OpenAI-compatible completions, and a page to play with
///
/// POST /v1/completions answers as OpenAI's does, with exact log-probabilities for prompts (echo) and answers.
/// GET / is a page that shows what the model writes and what it forgets. Ctrl-C lets the requests that run end; a
/// second one does not wait.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folder, or NAME=FOLDER
    #[arg(value_name = "MODEL")]
    model: String,
    /// Address to listen on; other machines reach the server only if this is not a loopback address
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port; 0 takes any that is free
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY`; better given as FOX_API_KEY in the environment
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Tokens of prompt and answer together, at most
    #[arg(long, value_name = "N", default_value_t = 65536,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_context: u32,
    /// Answers that are written at the same time, at most
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_batch: u32,
    /// Answers that may wait; more get 429
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_queue: u32,
    /// Seconds that a request may take
    #[arg(long, value_name = "S", default_value_t = 600.0)]
    timeout: f64,
    /// Seconds that running requests get when the server stops
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    drain: f64,
    #[command(flatten)]
    run: GenerationArgs,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let serve_options = args.options()?;
    let (opened, tokenizer) = args.run.open(&args.model)?;
    let mut options = args.run.options(args.max_context as usize)?;
    options.max_batch = args.max_batch as usize;
    options.max_queue = args.max_queue as usize;
    let name = opened.name.clone();
    let engine = Engine::start(opened.model, options)?;
    let server = Server::bind(Served { name: opened.name, engine, tokenizer }, serve_options)?;
    let address = server.address()?;
    stop_on_signal(&server)?;
    output::note(&format!(
        "{name} at http://{address} (page) and http://{address}/v1 (API); Ctrl-C ends it"
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
        if key.is_none() && !self.host.is_loopback() {
            output::note(&format!(
                "note: anyone who reaches {} may use this server; see --api-key",
                self.host
            ));
        }
        Ok(ServeOptions {
            address: SocketAddr::new(self.host, self.port),
            api_key: key,
            request_time: seconds("--timeout", self.timeout)?,
            drain_time: seconds("--drain", self.drain)?,
            ..ServeOptions::default()
        })
    }
}

fn seconds(flag: &str, value: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value).with_context(|| format!("{flag} {value}"))
}

/// The first signal drains, the second ends the process.
fn stop_on_signal(server: &Server) -> Result<()> {
    let stopper = server.stopper();
    signals::on_stop(move || {
        output::note("stopping: running requests may end; once more to stop at once");
        stopper.stop();
    })?;
    Ok(())
}
