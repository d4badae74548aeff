//! `fox generate`: a model continues a text.

use std::io::{IsTerminal, Read, stderr, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fox_infer::{
    Engine, Event, FinishReason, Finished, Refusal, Request, ScoredToken, TextDecoder,
};
use serde_json::json;

use crate::engine::GenerationArgs;
use crate::sampling::SamplingArgs;
use crate::{output, signals};

/// Continue a text
///
/// The text goes to standard output as it is generated; speed, bytes of the KV cache and the fraction evicted go to
/// standard error at the end, also after Ctrl-C. The same command gives the same text; another --seed another one.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folder; the pretrained model of the repository by default
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Text to continue; without it, --prompt and --file, standard input
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "file"])]
    text: Option<String>,
    /// The same as a flag, also without MODEL
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// File whose text to continue
    #[arg(long, short, value_name = "PATH", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Tokens to generate, at most
    #[arg(long, short, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Continuations; they share the KV cache of the prompt
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    n: u32,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after the end marker
    #[arg(long)]
    ignore_end: bool,
    #[command(flatten)]
    run: GenerationArgs,
    /// Print JSON: text, ids and log-probabilities, usage, cache
    #[arg(long)]
    json: bool,
}

/// One continuation.
#[derive(Default)]
struct Answer {
    text: String,
    tokens: Vec<ScoredToken>,
    stopped: bool,
    /// Whether standard output was closed.
    is_unread: bool,
    finished: Option<Finished>,
    /// Time from the request to the last printed text.
    elapsed: Duration,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (model, prompt) = args.model_and_prompt();
    let (opened, tokenizer) = args.run.open(model)?;
    let ids = tokenizer.encode_prompt(&args.text(prompt)?)?;
    let prompt: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
    let files = opened.generation(&tokenizer)?;
    let stop_ids = if args.ignore_end { Vec::new() } else { files.end_ids };
    let max_context = prompt.len() + args.max_tokens as usize;
    let mut options = args.run.options(max_context, opened.model.device())?;
    // A cached prompt would keep pages that are evicted otherwise.
    options.share_prefixes = args.n > 1;
    let engine = Engine::start(opened.model, options)?;
    // A signal, or a closed standard output, interrupts generation.
    let (stopped, unread) = (engine.clone(), engine.clone());
    let stop = signals::on_stop(move || stopped.interrupt())?;
    let is_closed = Arc::new(AtomicBool::new(false));
    let closed = is_closed.clone();
    output::on_closed(move || {
        closed.store(true, Ordering::Relaxed);
        unread.interrupt();
    });
    let mut answers = Vec::new();
    for i in 0..args.n {
        let request = Request {
            prompt: prompt.clone(),
            max_tokens: args.max_tokens as usize,
            sampling: args.sampling.sampling(&files.config, u64::from(i)),
            stop_ids: stop_ids.clone(),
            ..Request::greedy(Vec::new(), 0)
        };
        let submitted = Instant::now();
        let completion = match engine.submit(request) {
            // The signal may arrive before the first request.
            Err(Refusal::Closed)
                if stop.load(Ordering::Relaxed) || is_closed.load(Ordering::Relaxed) =>
            {
                break;
            }
            other => other.map_err(|refusal| anyhow::anyhow!(advice(&refusal)))?,
        };
        let decoder = TextDecoder::new(&tokenizer, &prompt, &args.stop)?;
        answers.push((completion, decoder, submitted));
    }
    let mut texts = Vec::new();
    for (i, (completion, decoder, submitted)) in answers.into_iter().enumerate() {
        if !args.json && args.n > 1 {
            output::print(&format!("{}--- {} ---\n", if i > 0 { "\n" } else { "" }, i + 1))?;
        }
        let mut answer = read(completion, decoder, !args.json)?;
        answer.elapsed = submitted.elapsed();
        // Either a failed print or the watch on standard output notices first.
        if answer.is_unread || is_closed.load(Ordering::Relaxed) {
            return Ok(ExitCode::SUCCESS);
        }
        texts.push(answer);
    }
    if args.json {
        output::print(&format!("{:#}\n", report(args, &opened.name, &prompt, &texts)))?;
    } else {
        output::print("\n")?;
        texts.iter().filter_map(summary).for_each(|line| output::note(&line));
    }
    let failed = |answer: &Answer| match &answer.finished {
        Some(Finished { reason: FinishReason::Failed(words), .. }) => Some(words.clone()),
        None if !answer.stopped => Some("the engine ended early".into()),
        _ => None,
    };
    match texts.iter().find_map(failed) {
        Some(words) => bail!(words),
        None if stop.load(Ordering::Relaxed) => Ok(ExitCode::from(signals::INTERRUPTED as u8)),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// A refusal that names the flag to change.
pub(super) fn advice(refusal: &Refusal) -> String {
    let words = refusal.to_string();
    match refusal {
        Refusal::Parameter { parameter, rule } => {
            format!("--{} {rule}", parameter.replace('_', "-"))
        }
        Refusal::NeverFits { needed, budget } => {
            format!("the request needs {needed} bytes of cache, but --cache allows {budget}")
        }
        Refusal::UnknownToken { .. } => {
            format!("{words}; use the model's own tokenizer (--tokenizer)")
        }
        Refusal::TooLong { .. } => format!("{words}; ask for fewer with --max-tokens"),
        _ => words,
    }
}

impl Args {
    /// The model and the prompt. A single argument of several words that does not exist as a path is the prompt.
    fn model_and_prompt(&self) -> (Option<&str>, Option<&str>) {
        let (model, text) = (self.model.as_deref(), self.text.as_deref());
        let alone = text.is_none() && self.prompt.is_none() && self.file.is_none();
        let is_prompt =
            |text: &str| text.contains(char::is_whitespace) && !Path::new(text).exists();
        match model.filter(|model| alone && is_prompt(model)) {
            Some(prompt) => (None, Some(prompt)),
            None => (model, text.or(self.prompt.as_deref())),
        }
    }

    fn text(&self, prompt: Option<&str>) -> Result<String> {
        match (prompt, &self.file) {
            (Some(text), _) => Ok(text.to_string()),
            (None, Some(path)) => std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display())),
            (None, None) => {
                if stdin().is_terminal() && stderr().is_terminal() {
                    output::note("reading the prompt from the terminal; end it with Ctrl-D");
                }
                let mut text = String::new();
                stdin().read_to_string(&mut text).context("cannot read standard input")?;
                Ok(text)
            }
        }
    }
}

/// Reads an answer to its end, printing it as it is generated when `live`; ends early when standard output is closed.
fn read(
    events: impl Iterator<Item = Event>,
    mut decoder: TextDecoder,
    live: bool,
) -> Result<Answer> {
    let mut answer = Answer::default();
    for event in events {
        let delta = match event {
            Event::Token(scored) => {
                let delta = decoder.push(scored.id)?;
                answer.tokens.push(scored);
                delta
            }
            Event::Finished(finished) => {
                answer.finished = Some(*finished);
                decoder.finish()?
            }
            _ => continue,
        };
        if live && !delta.text.is_empty() && !output::print_while_read(&delta.text)? {
            answer.is_unread = true;
            break;
        }
        answer.text.push_str(&delta.text);
        answer.stopped |= delta.stopped;
        // Stop strings are not known to the engine: dropping the events cancels the request.
        if delta.stopped || answer.finished.is_some() {
            break;
        }
    }
    Ok(answer)
}

/// Speed and memory in a line.
fn summary(answer: &Answer) -> Option<String> {
    let finished = answer.finished.as_ref()?;
    let (usage, cache) = (&finished.usage, &finished.cache);
    Some(format!(
        "{} tokens, {:.1} tokens/s; prompt of {} tokens in {:.2} s; cache {}, {:.1}% evicted",
        usage.generated_tokens,
        answer.speed(finished),
        usage.prompt_tokens,
        usage.prefill_s,
        output::bytes(cache.bytes as f64),
        100.0 * cache.evicted_fraction(),
    ))
}

impl Answer {
    /// Tokens per second after the first, which comes with the prefill, until the last text is printed.
    fn speed(&self, finished: &Finished) -> f64 {
        let usage = &finished.usage;
        let decode_s = self.elapsed.as_secs_f64() - usage.queue_s - usage.prefill_s;
        usage.generated_tokens.saturating_sub(1) as f64 / decode_s.max(1e-9)
    }
}

fn report(args: &Args, model: &str, prompt: &[i32], answers: &[Answer]) -> serde_json::Value {
    let choice = |answer: &Answer| {
        let reason = answer.finished.as_ref().map(|finished| json!(finished.reason));
        json!({
            "text": answer.text,
            "ids": answer.tokens.iter().map(|t| t.id).collect::<Vec<_>>(),
            "logprobs": answer.tokens.iter().map(|t| t.logprob).collect::<Vec<_>>(),
            "finish_reason": if answer.stopped { json!("stop") } else { json!(reason) },
            "usage": answer.finished.as_ref().map(|finished| json!(finished.usage)),
            "tokens_per_s": answer.finished.as_ref().map(|finished| answer.speed(finished)),
            "cache": answer.finished.as_ref().map(|finished| json!({
                "tokens": finished.cache.tokens,
                "bytes": finished.cache.bytes,
                "full_bytes": finished.cache.full_bytes,
                "evicted_fraction": finished.cache.evicted_fraction(),
                "page_tokens": finished.cache.page_tokens,
                "evicted_pages": finished.cache.evicted_pages,
            })),
        })
    };
    json!({
        "model": model,
        "prompt_ids": prompt,
        "seed": args.sampling.seed,
        "choices": answers.iter().map(choice).collect::<Vec<_>>(),
    })
}
