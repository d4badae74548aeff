//! Lines of the user: messages and commands.

use std::io::{BufRead, Read, stdin};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::output;

/// Bytes of a message; more are refused, so that an endless line cannot fill the memory.
const MAX_BYTES: u64 = 16 << 20;

/// What a line asks for.
#[derive(Debug, PartialEq)]
pub(super) enum Input {
    Message(String),
    Reset,
    Save(PathBuf),
    Help,
    Quit,
    Empty,
    /// A wrong command, and what is wrong with it.
    Invalid(String),
}

impl Input {
    pub(super) fn parse(line: &str) -> Input {
        if line.trim().is_empty() {
            return Input::Empty;
        }
        let Some(command) = line.strip_prefix('/') else {
            return Input::Message(line.to_owned());
        };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name.trim_end(), rest.trim()) {
            ("reset", "") => Input::Reset,
            ("help", "") => Input::Help,
            ("quit" | "exit", "") => Input::Quit,
            ("save", "") => Input::Invalid("/save needs a file, e.g. /save chat.jsonl".into()),
            ("save", file) => Input::Save(PathBuf::from(file)),
            (name @ ("reset" | "help" | "quit" | "exit"), _) => {
                Input::Invalid(format!("/{name} stands alone on its line"))
            }
            (name, _) => {
                Input::Invalid(format!("unknown command /{name}; /help lists the commands"))
            }
        }
    }
}

/// Messages from the standard input.
pub(super) struct Lines {
    /// Whether to print a prompt.
    shows_prompt: bool,
}

impl Lines {
    pub(super) fn new(shows_prompt: bool) -> Lines {
        Lines { shows_prompt }
    }

    /// The next message, of several lines where a backslash ends them; `None` at the end of the input.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        let mut message = String::new();
        let mut prompt = "> ";
        loop {
            if self.shows_prompt && !output::print_while_read(prompt)? {
                return Ok(None);
            }
            let mut bytes = Vec::new();
            let left = MAX_BYTES - message.len() as u64;
            let read = stdin().lock().take(left + 1).read_until(b'\n', &mut bytes);
            if read.context("cannot read standard input")? == 0 {
                return Ok(Some(message).filter(|message| !message.is_empty()));
            }
            if bytes.len() as u64 > left {
                bail!("a message has more than {} MiB; send a shorter one", MAX_BYTES >> 20);
            }
            let Ok(line) = std::str::from_utf8(&bytes) else {
                bail!("the input is not UTF-8 text; convert it first, e.g. with `iconv -t UTF-8`");
            };
            let line = line.trim_end_matches(['\n', '\r']);
            match line.strip_suffix('\\') {
                Some(line) => message.extend([line, "\n"]),
                None => {
                    message.push_str(line);
                    return Ok(Some(message));
                }
            }
            prompt = "  ";
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_messages_and_commands() {
        for (line, want) in [
            ("hello /reset", Input::Message("hello /reset".into())),
            (" /etc/hosts?", Input::Message(" /etc/hosts?".into())),
            ("", Input::Empty),
            ("  ", Input::Empty),
            ("/reset ", Input::Reset),
            ("/help", Input::Help),
            ("/quit", Input::Quit),
            ("/save my chat.jsonl ", Input::Save("my chat.jsonl".into())),
            ("/save", Input::Invalid("/save needs a file, e.g. /save chat.jsonl".into())),
            ("/reset now", Input::Invalid("/reset stands alone on its line".into())),
            ("/what", Input::Invalid("unknown command /what; /help lists the commands".into())),
        ] {
            assert_eq!(Input::parse(line), want, "{line}");
        }
    }
}
