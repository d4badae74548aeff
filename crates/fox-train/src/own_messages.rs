//! Defaults for training on a user's conversations: JSON lines with `messages`, as [`MessagesRecipe`] reads them.
//!
//! [`MessagesRecipe`]: crate::messages::MessagesRecipe

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use fox_base::durable;
use serde_json::Value;

use crate::own_text::{self, RecipeChoice};
use crate::recipe;
use crate::{Error, Result};

/// One conversation in so many is held out.
const HELD_OUT: usize = 20;
/// Tokens of a message beside its content and its role: markers and line breaks.
const AROUND: usize = 8;
/// The shortest sequences.
const SHORTEST: usize = 64;
/// Fraction of the conversations that fit into a sequence; longer ones are cut.
const WHOLE: f64 = 0.95;
/// Files of the conversations in the folder of a run.
const TRAIN: &str = "train.jsonl";
const HELDOUT: &str = "heldout.jsonl";

/// Whether a file holds conversations: JSON lines, of which the first has a list `messages`.
pub fn is_conversations(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "jsonl") && first_has_messages(path)
}

fn first_has_messages(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let mut lines = BufReader::new(file).lines().map_while(|line| line.ok());
    let first = lines.find(|line| !line.trim().is_empty());
    let value = first.and_then(|line| serde_json::from_str::<Value>(&line).ok());
    value.is_some_and(|value| value["messages"].is_array())
}

/// Conversations, divided into those to train on and those held out.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnConversations {
    /// To train on.
    pub path: PathBuf,
    /// To evaluate on; none where there are few.
    pub heldout: Option<PathBuf>,
    /// Approximate tokens of each of those to train on, as bytes.
    sizes: Vec<usize>,
}

impl OwnConversations {
    /// Reads the conversations of a file, all of which are trained on.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(file: &Path) -> Result<OwnConversations> {
        let text = fs::read_to_string(file).map_err(Error::io("read", file))?;
        let sizes = lines(&text).map(|line| size(file, line)).collect::<Result<_>>()?;
        Ok(OwnConversations { path: file.to_path_buf(), heldout: None, sizes })
    }

    /// Divides the conversations of a file into two files in `folder`: every twentieth is held out.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn divide(file: &Path, folder: &Path) -> Result<OwnConversations> {
        let text = fs::read_to_string(file).map_err(Error::io("read", file))?;
        let (mut train, mut heldout, mut sizes) = (String::new(), String::new(), Vec::new());
        for (i, line) in lines(&text).enumerate() {
            let tokens = size(file, line)?;
            let part = match i % HELD_OUT == HELD_OUT - 1 {
                true => &mut heldout,
                false => {
                    sizes.push(tokens);
                    &mut train
                }
            };
            *part += line.1;
            part.push('\n');
        }
        durable::create_folder(folder)?;
        let write = |name: &str, text: String| -> Result<PathBuf> {
            let path = folder.join(name);
            if fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
                durable::write(&path, text.as_bytes())?;
            }
            Ok(path)
        };
        let path = write(TRAIN, train)?;
        let heldout = match heldout.is_empty() {
            true => None,
            false => Some(write(HELDOUT, heldout)?),
        };
        Ok(OwnConversations { path, heldout, sizes })
    }

    /// Number of conversations to train on.
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Overrides that name the files.
    pub fn overrides(&self) -> Vec<String> {
        let set = |key: &str, path: &Path| {
            format!("data.messages.{key}={}", toml::Value::from(path.display().to_string()))
        };
        let heldout = self.heldout.as_ref().map(|path| set("heldout", path));
        std::iter::once(set("path", &self.path)).chain(heldout).collect()
    }

    /// Chooses a recipe by the number of tokens and the device. Sequences have the length of the conversations.
    ///
    /// # Errors
    /// A built-in recipe that cannot be read.
    pub fn choose(&self, on_gpu: bool) -> Result<RecipeChoice> {
        let mut sizes = self.sizes.clone();
        sizes.sort_unstable();
        let at = (sizes.len() as f64 * WHOLE) as usize;
        let long = sizes.get(at).or(sizes.last()).copied().unwrap_or(SHORTEST);
        // Every conversation takes a sequence.
        let padded = |length: usize| (sizes.len() * length) as u64;
        let mut length = long.next_power_of_two().max(SHORTEST);
        let (name, limit) = own_text::recipe_for(padded(length), on_gpu);
        let usual = recipe::load(name, &[])?;
        length = length.min(usual.data.sequence_length);
        let tokens = padded(length);
        let mut overrides = vec!["data.tokenizer=bytes".to_string()];
        overrides.push(format!("data.sequence_length={length}"));
        overrides.extend(own_text::budget(&usual, tokens, limit, length as u64));
        Ok(RecipeChoice { name, overrides, tokens })
    }
}

/// The lines that are not empty, with their numbers from 1.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    numbered.filter(|(_, line)| !line.trim().is_empty())
}

/// Approximate tokens of a conversation as bytes.
fn size(file: &Path, (number, line): (usize, &str)) -> Result<usize> {
    let value = serde_json::from_str::<Value>(line).unwrap_or_default();
    let Some(messages) = value["messages"].as_array() else {
        return Err(Error::NotAConversation { path: file.to_path_buf(), line: number });
    };
    let text = |message: &Value, key: &str| message[key].as_str().map_or(0, str::len);
    Ok(messages.iter().map(|m| text(m, "role") + text(m, "content") + AROUND).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &Path, conversations: usize) -> PathBuf {
        let line = |i| {
            let user = format!(r#"{{"role": "user", "content": "What is {i} + {i}?"}}"#);
            let answer = format!(r#"{{"role": "assistant", "content": "{}"}}"#, 2 * i);
            format!("{{\"messages\": [{user}, {answer}]}}\n")
        };
        let path = folder.join("chats.jsonl");
        fs::write(&path, (0..conversations).map(line).collect::<String>()).unwrap();
        path
    }

    #[test]
    fn finds_conversations_by_their_first_line() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_conversations(&file(dir.path(), 3)));
        let other = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            is_conversations(&path)
        };
        assert!(other("a.jsonl", "\n{\"messages\": []}\n"));
        assert!(!other("b.jsonl", "{\"text\": \"a\"}\n"));
        assert!(!other("c.jsonl", "not JSON\n") && !other("d.jsonl", ""));
        assert!(!other("e.txt", "{\"messages\": []}\n"));
        assert!(!is_conversations(&dir.path().join("missing.jsonl")));
    }

    #[test]
    fn every_twentieth_conversation_is_held_out() {
        let dir = tempfile::tempdir().unwrap();
        let (path, data) = (file(dir.path(), 45), dir.path().join("data"));
        let own = OwnConversations::divide(&path, &data).unwrap();
        assert_eq!(own.count(), 43);
        let held = fs::read_to_string(own.heldout.as_ref().unwrap()).unwrap();
        assert_eq!(held.lines().count(), 2);
        assert!(held.contains("What is 19 + 19?") && held.contains("What is 39 + 39?"), "{held}");
        assert!(!fs::read_to_string(&own.path).unwrap().contains("What is 19 + 19?"));
        let wrong = dir.path().join("wrong.jsonl");
        fs::write(&wrong, "{\"messages\": []}\n\n{\"text\": \"a\"}\n").unwrap();
        let error = OwnConversations::divide(&wrong, &dir.path().join("none")).unwrap_err();
        assert!(error.to_string().contains("wrong.jsonl line 3 has no list `messages`"), "{error}");
        assert!(!dir.path().join("none").exists());
        let few = OwnConversations::divide(&file(dir.path(), 19), &data).unwrap();
        assert_eq!((few.count(), few.heldout), (19, None));
    }

    #[test]
    fn recipe_choice_follows_the_conversations() {
        let dir = tempfile::tempdir().unwrap();
        let own = OwnConversations::read(&file(dir.path(), 500)).unwrap();
        let choice = own.choose(false).unwrap();
        assert_eq!((choice.name, choice.tokens), ("tiny-fox-pro", 500 * 64));
        let set = [own.overrides(), choice.overrides].concat();
        let recipe = recipe::load(choice.name, &set).unwrap();
        assert_eq!((recipe.data.sequence_length, recipe.training.tokens), (64, 320_000));
        assert_eq!(recipe.data.messages.unwrap().path, dir.path().join("chats.jsonl"));
    }
}
