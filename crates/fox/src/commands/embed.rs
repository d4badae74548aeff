//! `fox embed`: vectors of texts.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use fox_data::{Corpus, CorpusOptions, Tokenizer};
use fox_model::{ForwardOptions, Pooling};
use serde_json::json;

use super::eval::subjects::Opened;
use crate::device::DeviceArgs;
use crate::output;

/// Compute the vector of each text, as JSON lines
///
/// The states of a text's tokens after the last block are pooled into one vector. A line has the number of the text, its
/// tokens, whether it was cut to --length, and the vector. Each text is computed by itself, so its vector has the same
/// bits whatever the other texts are. MODEL is best an encoder, e.g. a run of `fox train fox-encoder-26m`; of a causal
/// model use --pool last or mean.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folder
    #[arg(value_name = "MODEL")]
    model: String,
    /// A text; may be given several times
    #[arg(long, value_name = "WORDS")]
    text: Vec<String>,
    /// Texts: a file, a folder of files, or JSON lines with a field "text"
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// How the states of the tokens become one vector
    #[arg(long, value_enum, default_value_t = Pool::Mean)]
    pool: Pool,
    /// Scale every vector to length 1
    #[arg(long)]
    normalize: bool,
    /// Tokens of a text, at most; the rest is cut off
    #[arg(long, value_name = "N", default_value_t = 8192,
          value_parser = clap::value_parser!(u32).range(1..))]
    length: u32,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Names of the poolings.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Pool {
    /// The mean of all tokens
    Mean,
    /// The largest value of every channel
    Max,
    /// The first token
    First,
    /// The last token
    Last,
}

impl From<Pool> for Pooling {
    fn from(pool: Pool) -> Self {
        match pool {
            Pool::Mean => Pooling::Mean,
            Pool::Max => Pooling::Max,
            Pool::First => Pooling::First,
            Pool::Last => Pooling::Last,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.text.is_empty() && args.file.is_none() {
        bail!("there is nothing to embed; give a text with --text, or texts with --file");
    }
    let device = args.device.open()?;
    let opened = Opened::new(&args.model, &device)?;
    let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
    opened.subject(None).check_vocabulary("tokenizer", tokenizer.vocab_size())?;
    let mut number = 0;
    for text in &args.text {
        let line = vector_line(args, &opened, &tokenizer, number, text)
            .with_context(|| format!("--text \"{}\"", shortened(text)))?;
        if !output::print_while_read(&line)? {
            return Ok(ExitCode::SUCCESS);
        }
        number += 1;
    }
    if let Some(path) = &args.file {
        for document in Corpus::open(path, CorpusOptions::default())?.documents() {
            let line = vector_line(args, &opened, &tokenizer, number, &document?.text)
                .with_context(|| format!("text {number} of {}", path.display()))?;
            if !output::print_while_read(&line)? {
                break;
            }
            number += 1;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The line of a text.
fn vector_line(
    args: &Args,
    opened: &Opened,
    tokenizer: &Tokenizer,
    number: usize,
    text: &str,
) -> Result<String> {
    let mut tokens: Vec<i32> = tokenizer.encode(text)?.into_iter().map(|id| id as i32).collect();
    let cut = tokens.len() > args.length as usize;
    tokens.truncate(args.length as usize);
    let start = (!opened.model.config().is_encoder()).then_some(tokenizer.bos() as i32);
    let options = ForwardOptions { pruning: opened.pruning(), ..ForwardOptions::default() };
    let mut vector = opened.model.embed(start, &tokens, args.pool.into(), &options)?;
    if vector.iter().any(|x| !x.is_finite()) {
        bail!("the model computes a vector that is not finite; its weights are damaged");
    }
    if args.normalize {
        let norm = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let scale = if norm > 0.0 { 1.0 / norm } else { 0.0 };
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32);
    }
    let line = json!({ "index": number, "tokens": tokens.len(), "cut": cut, "embedding": vector });
    Ok(format!("{line}\n"))
}

/// The beginning of a text, for messages.
fn shortened(text: &str) -> String {
    let mut start: String = text.chars().take(40).collect();
    if start.len() < text.len() {
        start.push_str("...");
    }
    start
}
