//! Conversations to tune on: JSON lines of messages, of which only the answers have a loss.
//!
//! ```text
//! {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
//! ```
//!
//! A template makes text of a message. Of an answer, everything from its content on has a loss, what follows the content
//! included, so that a model learns where to stop. Every conversation is a document as long as a sequence: a longer one
//! is cut, a shorter one is filled up with tokens without a loss.

use std::fs;
use std::path::{Path, PathBuf};

use fox_data::{Dataset, DocumentLengths, Tokenizer};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The table `[data.messages]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessagesRecipe {
    /// JSON lines to train on.
    pub path: PathBuf,
    /// JSON lines to evaluate on; no evaluation without them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heldout: Option<PathBuf>,
    /// Text of a message, with `{role}` and `{content}`.
    #[serde(default = "usual_template")]
    pub template: String,
    /// The role whose messages are answers.
    #[serde(default = "usual_answers")]
    pub answers: String,
}

fn usual_template() -> String {
    "<|{role}|>\n{content}\n".into()
}

fn usual_answers() -> String {
    "assistant".into()
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

/// Tokens of a conversation, and which of them are answers.
type Document = (Vec<u32>, Vec<bool>);

/// Conversations as documents of one length.
#[derive(Debug)]
pub struct MessagesDataset {
    documents: Vec<Document>,
    lengths: DocumentLengths,
    tokenizer: Tokenizer,
    identity: String,
}

impl MessagesDataset {
    /// Reads the conversations of `file`, each in `length` tokens. `origin` is the recipe, for messages.
    pub fn open(
        origin: &str,
        recipe: &MessagesRecipe,
        file: &Path,
        tokenizer: &Tokenizer,
        length: usize,
    ) -> Result<MessagesDataset> {
        let bad = |key: &str, detail: String| {
            Err(Error::value(origin, &format!("data.messages.{key}"), detail))
        };
        let mut halves = recipe.template.split("{content}");
        let (Some(head), Some(tail), None) = (halves.next(), halves.next(), halves.next()) else {
            return bad("template", "must have {content} once".into());
        };
        let text = fs::read_to_string(file).map_err(Error::io("read", file))?;
        let mut documents = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let conversation: Conversation = match serde_json::from_str(line) {
                Ok(conversation) => conversation,
                Err(e) => {
                    let place = format!("line {} of {}", i + 1, file.display());
                    return bad(
                        "path",
                        format!("has no list `messages` of role and content in {place}: {e}"),
                    );
                }
            };
            let document =
                document(&conversation, (head, tail), &recipe.answers, tokenizer, length)?;
            // A conversation whose answers are cut off teaches nothing.
            documents.extend(Some(document).filter(|(_, answers)| answers.contains(&true)));
        }
        if documents.is_empty() {
            let detail = format!(
                "is {}, where no message of the role \"{}\" begins within {length} tokens",
                file.display(),
                recipe.answers
            );
            return bad("path", detail);
        }
        let lengths =
            DocumentLengths::Uniform { documents: documents.len() as u64, len: length as u64 };
        let identity = identity(&documents);
        Ok(MessagesDataset { documents, lengths, tokenizer: tokenizer.clone(), identity })
    }
}

fn document(
    conversation: &Conversation,
    (head, tail): (&str, &str),
    answers: &str,
    tokenizer: &Tokenizer,
    length: usize,
) -> Result<Document> {
    let (mut tokens, mut labelled) = (Vec::new(), Vec::new());
    for Message { role, content } in &conversation.messages {
        let before = tokenizer.encode(&head.replace("{role}", role))?;
        let after = tokenizer.encode(&format!("{content}{}", tail.replace("{role}", role)))?;
        labelled.resize(labelled.len() + before.len(), false);
        labelled.resize(labelled.len() + after.len(), role == answers);
        tokens.extend(before.into_iter().chain(after));
    }
    tokens.resize(length, tokenizer.bos());
    labelled.resize(length, false);
    Ok((tokens, labelled))
}

fn identity(documents: &[Document]) -> String {
    let mut bytes = Vec::new();
    for (tokens, labelled) in documents {
        bytes.extend(tokens.iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(labelled.iter().map(|answer| u8::from(*answer)));
    }
    format!("messages-v1 {:016x}", twox_hash::XxHash3_64::oneshot(&bytes))
}

impl Dataset for MessagesDataset {
    fn lengths(&self) -> &DocumentLengths {
        &self.lengths
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> fox_data::Result<()> {
        let mut labelled = vec![false; out.len()];
        self.read_labelled(document, start, out, &mut labelled)
    }

    fn read_labelled(
        &self,
        document: u64,
        start: u64,
        out: &mut [u32],
        labelled: &mut [bool],
    ) -> fox_data::Result<()> {
        let documents = self.documents.len() as u64;
        let Some((tokens, answers)) = self.documents.get(document as usize) else {
            return Err(fox_data::Error::NoSuchDocument { document, documents });
        };
        let (from, to) = (start as usize, start as usize + out.len());
        let (Some(tokens), Some(answers)) = (tokens.get(from..to), answers.get(from..to)) else {
            let (len, document_len) = (out.len(), tokens.len() as u64);
            return Err(fox_data::Error::OutsideDocument { document, start, len, document_len });
        };
        out.copy_from_slice(tokens);
        labelled.copy_from_slice(answers);
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn bos(&self) -> u32 {
        self.tokenizer.bos()
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn tokenizer_identity(&self) -> String {
        self.tokenizer.identity().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str, template: &str, length: usize) -> Result<MessagesDataset> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chats.jsonl");
        fs::write(&path, text).unwrap();
        let recipe = MessagesRecipe {
            path: path.clone(),
            heldout: None,
            template: template.into(),
            answers: usual_answers(),
        };
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        MessagesDataset::open("test.toml", &recipe, &path, &tokenizer, length)
    }

    const CHAT: &str = r#"{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "xy"}]}"#;

    #[test]
    fn only_answers_have_a_loss() {
        let data = open(CHAT, "{role}:{content};", 24).unwrap();
        let (mut tokens, mut labelled) = (vec![0; 24], vec![false; 24]);
        data.read_labelled(0, 0, &mut tokens, &mut labelled).unwrap();
        let text: Vec<u8> = tokens[..21].iter().map(|id| *id as u8).collect();
        assert_eq!(text, b"user:ab;assistant:xy;");
        let answers: Vec<usize> = (0..24).filter(|i| labelled[*i]).collect();
        assert_eq!(answers, [18, 19, 20]);
        assert_eq!(tokens[21..], [data.bos(); 3]);
    }

    #[test]
    fn skips_conversations_without_answers() {
        let silent = r#"{"messages": [{"role": "user", "content": "alone"}]}"#;
        let data = open(&format!("{silent}\n\n{CHAT}\n"), "{role}:{content};", 24).unwrap();
        assert_eq!(data.lengths().documents(), 1);
        let error = open(CHAT, "{role}:{content};", 18).unwrap_err().to_string();
        assert!(
            error.ends_with("no message of the role \"assistant\" begins within 18 tokens"),
            "{error}"
        );
    }

    #[test]
    fn names_unreadable_messages() {
        let error = open(CHAT, "{role}", 24).unwrap_err().to_string();
        assert_eq!(error, "test.toml: `data.messages.template` must have {content} once");
        let error =
            open(&format!("{CHAT}\n{{\"text\": 1}}"), "{content}", 24).unwrap_err().to_string();
        assert!(error.contains("in line 2 of ") && !error.contains('\n'), "{error}");
    }
}
