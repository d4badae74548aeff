//! `fox chat`: a conversation with a model in the terminal.

mod input;
mod session;

use std::io::{IsTerminal, stdin, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use fox_infer::{Engine, Request};

use super::generate::advice;
use crate::engine::GenerationArgs;
use crate::sampling::SamplingArgs;
use crate::{output, signals};
use input::{Input, Lines};
use session::{AnswerEnd, Session};

/// Talk to a model in the terminal
///
/// Every line is a message; a line that ends with a backslash continues on the next one. The conversation is
/// remembered until /reset. A model without a chat template continues what you type as plain text. Ctrl-C stops an
/// answer; Ctrl-D or /quit leaves. Messages may also come through a pipe.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folder, or ORG/NAME in the Hugging Face cache; the pretrained model of the repository by
    /// default
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of an answer, at most; by default 1024, or 128 without a chat template
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Largest number of tokens of the conversation
    #[arg(long, value_name = "N", default_value_t = 65536,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_context: u32,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    run: GenerationArgs,
}

const HELP: &str = "\
/reset      forget the conversation
/save FILE  write the conversation: JSON lines, or plain text without a template
/help       this list
/quit       leave, as Ctrl-D does
A message that starts with a slash is written with a space in front of it.";

/// What Ctrl-C does depends on these.
#[derive(Default)]
struct InterruptState {
    /// An answer is being generated.
    is_answering: AtomicBool,
    /// The answer should stop.
    stop: AtomicBool,
    /// Ctrl-C was pressed since the last line while no answer was generated.
    is_leaving: AtomicBool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (opened, tokenizer) = args.run.open(args.model.as_deref())?;
    let files = opened.generation(&tokenizer)?;
    files.chat.check()?;
    let has_template = files.chat.source.is_some();
    if args.system.is_some() && !has_template {
        bail!(
            "{} has no chat template, so it has no system message; leave --system out",
            opened.name
        );
    }
    let options = args.run.options(args.max_context as usize, opened.model.device())?;
    let name = opened.name.clone();
    let engine = Engine::start(opened.model, options)?;
    // Wrong sampling arguments are refused before anything is typed.
    let sampling = args.sampling.sampling(&files.config, 0);
    let probe = Request { sampling, ..Request::greedy(vec![0], 1) };
    engine.check(&probe).map_err(|refusal| anyhow::anyhow!(advice(&refusal)))?;
    let state = Arc::new(InterruptState::default());
    let mut session = Session::new(engine, tokenizer, files, args, state.clone());
    if !has_template {
        output::note(&format!(
            "{name} has no chat template: it continues what you type as plain text"
        ));
    }
    let is_terminal = stdin().is_terminal();
    if is_terminal {
        output::note(&format!(
            "{name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves"
        ));
    }
    signals::on_interrupt(move || {
        if state.is_answering.load(Ordering::SeqCst) {
            state.stop.store(true, Ordering::SeqCst);
        } else if state.is_leaving.swap(true, Ordering::SeqCst) {
            signals::exit_interrupted();
        } else {
            output::note("\nCtrl-C again, Ctrl-D or /quit leaves; the conversation is not saved");
        }
    })?;
    let mut lines = Lines::new(is_terminal && stdout().is_terminal());
    while let Some(line) = lines.next()? {
        session.interrupts().is_leaving.store(false, Ordering::SeqCst);
        let done = match Input::parse(&line) {
            Input::Empty => Ok(AnswerEnd::Finished),
            Input::Quit => break,
            Input::Help => output::print(&format!("{HELP}\n"))
                .map(|()| AnswerEnd::Finished)
                .map_err(Into::into),
            Input::Reset => {
                session.reset();
                Ok(AnswerEnd::Finished)
            }
            Input::Save(path) => session.save(&path).map(|()| AnswerEnd::Finished),
            Input::Invalid(words) => Err(anyhow::anyhow!(words)),
            Input::Message(text) => session.answer(text),
        };
        match done {
            Ok(AnswerEnd::Unread) => break,
            Ok(AnswerEnd::Stopped) => output::note("(stopped)"),
            Ok(AnswerEnd::Finished) => {}
            // A message can be typed again at a terminal, but a script ends.
            Err(error) if is_terminal && !session.is_broken() => {
                output::note(&output::error_message(&error));
            }
            Err(error) => return Err(error),
        }
    }
    if is_terminal {
        output::note("");
    }
    Ok(ExitCode::SUCCESS)
}
