//! The state of a conversation: messages, or the text of a model without a chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use fox_base::durable;
use fox_data::{ChatMessage, Tokenizer};
use fox_infer::{Engine, Event, FinishReason, Refusal, Request, TextDecoder};
use fox_lab::args::subjects::GenerationFiles;
use serde_json::json;

use super::super::generate::advice;
use super::{Args, InterruptState};
use crate::output;

/// Default of the tokens of an answer, with and without a chat template.
const CHAT_TOKENS: usize = 1024;
const TEXT_TOKENS: usize = 128;
/// How soon Ctrl-C stops an answer.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// How an answer ended.
pub(super) enum AnswerEnd {
    Finished,
    /// By Ctrl-C.
    Stopped,
    /// The standard output was closed.
    Unread,
}

/// What was said so far.
enum History {
    Messages(Vec<ChatMessage>),
    Text(String),
}

pub(super) struct Session<'a> {
    engine: Engine,
    tokenizer: Tokenizer,
    files: GenerationFiles,
    args: &'a Args,
    history: History,
    answers: u64,
    interrupts: Arc<InterruptState>,
    /// The file that this session wrote, which it may write again.
    saved: Option<PathBuf>,
    /// Whether the engine has failed.
    is_broken: bool,
}

impl Session<'_> {
    pub(super) fn new(
        engine: Engine,
        tokenizer: Tokenizer,
        files: GenerationFiles,
        args: &Args,
        interrupts: Arc<InterruptState>,
    ) -> Session<'_> {
        let history = History::Text(String::new());
        let (answers, saved, is_broken) = (0, None, false);
        let mut session = Session {
            engine,
            tokenizer,
            files,
            args,
            history,
            answers,
            interrupts,
            saved,
            is_broken,
        };
        session.reset();
        session
    }

    pub(super) fn interrupts(&self) -> &InterruptState {
        &self.interrupts
    }

    /// Whether nothing can be answered any more.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Forgets the conversation.
    pub(super) fn reset(&mut self) {
        self.history = match &self.files.chat.source {
            None => History::Text(String::new()),
            Some(_) => {
                let system = self.args.system.iter().map(|text| message("system", text));
                History::Messages(system.collect())
            }
        };
    }

    /// Writes the conversation to a file.
    pub(super) fn save(&mut self, path: &Path) -> Result<()> {
        if path.exists() && self.saved.as_deref() != Some(path) {
            bail!("{} exists; choose another name", path.display());
        }
        let text = match &self.history {
            History::Messages(messages) => format!("{}\n", json!({ "messages": messages })),
            History::Text(text) => format!("{text}\n"),
        };
        durable::write(path, text.as_bytes())?;
        output::note(&format!("saved to {}", path.display()));
        self.saved = Some(path.to_path_buf());
        Ok(())
    }

    /// Generates and prints the answer to a message, and remembers both.
    pub(super) fn answer(&mut self, text: String) -> Result<AnswerEnd> {
        let (prompt, max_tokens) = match &self.history {
            History::Messages(messages) => {
                let asked = [&messages[..], &[message("user", &text)]].concat();
                let prompt = self.files.chat.render(&asked, true)?;
                (self.tokenizer.encode_marked(&prompt)?, CHAT_TOKENS)
            }
            History::Text(before) => {
                (self.tokenizer.encode_prompt(&continued(before, &text))?, TEXT_TOKENS)
            }
        };
        let max_tokens = self.args.max_tokens.map_or(max_tokens, |count| count as usize);
        let prompt: Vec<i32> = prompt.into_iter().map(|id| id as i32).collect();
        let room = (self.args.max_context as usize).saturating_sub(prompt.len());
        if room == 0 {
            bail!(
                "the conversation has {} tokens, but --max-context is {}; /reset starts a new one",
                prompt.len(),
                self.args.max_context
            );
        }
        let request = Request {
            sampling: self.args.sampling.sampling(&self.files.config, self.answers),
            stop_ids: self.files.end_ids.clone(),
            ..Request::greedy(prompt, max_tokens.min(room))
        };
        self.interrupts.stop.store(false, Ordering::SeqCst);
        self.interrupts.is_answering.store(true, Ordering::SeqCst);
        let answered = self.generate(request);
        self.interrupts.is_answering.store(false, Ordering::SeqCst);
        let (answer, end) = answered?;
        self.answers += 1;
        match &mut self.history {
            History::Messages(messages) => {
                messages.extend([message("user", &text), message("assistant", &answer)]);
            }
            History::Text(before) => *before = continued(before, &text) + &answer,
        }
        Ok(end)
    }

    /// Prints an answer as it is generated, until it ends or is stopped.
    fn generate(&mut self, request: Request) -> Result<(String, AnswerEnd)> {
        let mut decoder = TextDecoder::new(&self.tokenizer, &request.prompt, &[])?;
        let submitted = self.engine.submit(request);
        let (events, _ticket) =
            submitted.map_err(|refusal: Refusal| anyhow!(advice(&refusal)))?.split();
        let mut text = String::new();
        loop {
            if self.interrupts.stop.load(Ordering::SeqCst) {
                output::print_while_read("\n")?;
                return Ok((text, AnswerEnd::Stopped));
            }
            let (delta, finished) = match events.recv_timeout(POLL_EVERY) {
                Err(RecvTimeoutError::Timeout) => continue,
                Ok(Event::Token(scored)) => (decoder.push(scored.id)?, None),
                Ok(Event::Finished(finished)) => (decoder.finish()?, Some(finished.reason)),
                Err(RecvTimeoutError::Disconnected) => {
                    self.is_broken = true;
                    bail!("the engine ended early");
                }
                Ok(_) => continue,
            };
            text.push_str(&delta.text);
            let end = if finished.is_some() { "\n" } else { "" };
            let shown = format!("{}{end}", output::visible(&delta.text));
            if !shown.is_empty() && !output::print_while_read(&shown)? {
                return Ok((text, AnswerEnd::Unread));
            }
            match finished {
                None => {}
                Some(FinishReason::Failed(words)) => {
                    self.is_broken = true;
                    bail!(words);
                }
                Some(_) => return Ok((text, AnswerEnd::Finished)),
            }
        }
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into(), ..ChatMessage::default() }
}

/// A text and the next line of it.
fn continued(before: &str, line: &str) -> String {
    if before.is_empty() { line.to_owned() } else { format!("{before}\n{line}") }
}
