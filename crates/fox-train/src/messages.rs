//! Conversations to tune on: JSON lines of messages, of which only the answers have a loss.
//!
//! ```text
//! {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
//! ```
//!
//! A chat template makes text of a conversation, the same that a server renders prompts with. The prompt of an answer is
//! the conversation before it, rendered with the generation prompt; what an answer adds to it has a loss, the end of its
//! turn included, so that a model learns where to stop. Every conversation is a document as long as a sequence: a longer
//! one is cut, a shorter one is filled up with tokens without a loss.

use std::fs;
use std::path::{Path, PathBuf};

use fox_data::{
    ChatError, ChatMessage, ChatRenderer, ChatTemplate, Dataset, DocumentLengths, Tokenizer,
};
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
    /// A Jinja chat template, or the text of one message with `{role}` and `{content}`. Without it, the template of the
    /// initial checkpoint; without that, `<|ROLE|>`, a line break and the content, with the end marker after an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The role whose messages are answers.
    #[serde(default = "usual_answers")]
    pub answers: String,
}

/// The template where neither the recipe nor a checkpoint has one; `ANSWERS` stands for the role of answers.
const DEFAULT_SOURCE: &str = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ '\\n' }}\
     {{ message.content }}{% if message.role == ANSWERS %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}\
     {% if add_generation_prompt %}<|{{ ANSWERS }}|>{{ '\\n' }}{% endif %}";

fn usual_answers() -> String {
    "assistant".into()
}

impl MessagesRecipe {
    /// The chat template of the run. `origin` is the recipe, for messages; `init` the folder of the initial checkpoint.
    ///
    /// # Errors
    /// A template that does not compile, or a checkpoint whose template cannot be read.
    pub fn chat_template(
        &self,
        origin: &str,
        init: Option<&Path>,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTemplate> {
        let mut template = match init {
            Some(folder) => ChatTemplate::load(folder, tokenizer)?,
            None => ChatTemplate::without_source(tokenizer),
        };
        if let Some(text) = &self.template {
            template.source = Some(match text.contains("{{") || text.contains("{%") {
                true => text.clone(),
                false => self.source_of_message(origin, text)?,
            });
        }
        template.source.get_or_insert_with(|| self.default_source());
        template.check().map_err(|error| self.bad(origin, "template", error))?;
        Ok(template)
    }

    /// Jinja for a message as `{role}` and `{content}`.
    fn source_of_message(&self, origin: &str, text: &str) -> Result<String> {
        let Some((head, tail)) =
            text.split_once("{content}").filter(|(_, b)| !b.contains("{content}"))
        else {
            return Err(self.bad(origin, "template", "must have {content} once"));
        };
        let of_role = |text: &str, role: &str| {
            let literals = text.split("{role}").map(literal);
            literals.collect::<Vec<_>>().join(role)
        };
        let (role, answers) = ("{{ message.role }}", literal(&self.answers));
        Ok(format!(
            "{{{{ bos_token }}}}{{% for message in messages %}}{}{{{{ message.content }}}}{}{{% endfor %}}\
             {{% if add_generation_prompt %}}{}{{% endif %}}",
            of_role(head, role),
            of_role(tail, role),
            of_role(head, &answers)
        ))
    }

    fn default_source(&self) -> String {
        DEFAULT_SOURCE
            .replace("ANSWERS", &serde_json::Value::from(self.answers.as_str()).to_string())
    }

    fn bad(&self, origin: &str, key: &str, detail: impl ToString) -> Error {
        Error::value(origin, &format!("data.messages.{key}"), detail.to_string())
    }
}

/// An expression of Jinja that prints a text.
fn literal(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!("{{{{ {} }}}}", serde_json::Value::from(text)),
    }
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
    /// The first token of every conversation, which is the first input of a sequence.
    first: u32,
    identity: String,
}

/// How conversations become documents.
struct Encoder<'a> {
    origin: &'a str,
    recipe: &'a MessagesRecipe,
    file: &'a Path,
    tokenizer: &'a Tokenizer,
    length: usize,
}

impl MessagesDataset {
    /// Reads the conversations of `file`, each in `length` tokens. `origin` is the recipe, for messages.
    ///
    /// # Errors
    /// A file that cannot be read, lines that are not conversations, and conversations that the template refuses.
    pub fn open(
        origin: &str,
        recipe: &MessagesRecipe,
        file: &Path,
        (tokenizer, template): (&Tokenizer, &ChatTemplate),
        length: usize,
    ) -> Result<MessagesDataset> {
        let text = fs::read_to_string(file).map_err(Error::io("read", file))?;
        let encoder = Encoder { origin, recipe, file, tokenizer, length };
        let encoded = template.with_renderer(|renderer| Ok(encoder.documents(renderer, &text)));
        let (first, documents) =
            encoded.map_err(|error| recipe.bad(origin, "template", error))??;
        let Some(first) = first else {
            let detail = format!(
                "is {}, where no message of the role \"{}\" begins within {length} tokens",
                file.display(),
                recipe.answers
            );
            return Err(recipe.bad(origin, "path", detail));
        };
        let lengths =
            DocumentLengths::Uniform { documents: documents.len() as u64, len: length as u64 };
        let identity = identity(&documents, Some(first).filter(|id| *id != tokenizer.bos()));
        Ok(MessagesDataset { documents, lengths, tokenizer: tokenizer.clone(), first, identity })
    }
}

impl Encoder<'_> {
    /// The documents of a file of conversations, and their common first token.
    fn documents(
        &self,
        renderer: &ChatRenderer<'_>,
        text: &str,
    ) -> Result<(Option<u32>, Vec<Document>)> {
        let (mut common, mut documents) = (None, Vec::new());
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = || format!("line {} of {}", i + 1, self.file.display());
            let conversation: Conversation = serde_json::from_str(line).map_err(|e| {
                let lacks = "has no list `messages` of role and content in";
                self.recipe.bad(self.origin, "path", format!("{lacks} {}: {e}", place()))
            })?;
            let segments = self.segments(renderer, conversation).map_err(|words| {
                self.recipe.bad(
                    self.origin,
                    "template",
                    format!("cannot write {}: {words}", place()),
                )
            })?;
            let Some((first, document)) = self.document(&segments)? else { continue };
            if *common.get_or_insert(first) != first {
                let detail = format!(
                    "begins {} with another token than the conversations before; put {{{{ bos_token }}}} in front",
                    place()
                );
                return Err(self.recipe.bad(self.origin, "template", detail));
            }
            documents.push(document);
        }
        Ok((common, documents))
    }

    /// The text of a conversation in segments, and which of them are answers.
    fn segments(
        &self,
        renderer: &ChatRenderer<'_>,
        conversation: Conversation,
    ) -> std::result::Result<Vec<(String, bool)>, SegmentError> {
        let message =
            |Message { role, content }| ChatMessage { role, content, ..ChatMessage::default() };
        let messages: Vec<ChatMessage> = conversation.messages.into_iter().map(message).collect();
        let is_answer = |message: &ChatMessage| message.role == self.recipe.answers;
        // What follows the last answer has no loss, and is not needed.
        let count = messages.iter().rposition(is_answer).map_or(0, |last| last + 1);
        let messages = &messages[..count];
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let whole = renderer.render(messages, false)?;
        let (mut segments, mut at) = (Vec::new(), 0);
        for i in (0..count).filter(|i| is_answer(&messages[*i])) {
            let prompt = renderer.render(&messages[..i], true)?;
            let answered = renderer.render(&messages[..=i], false)?;
            let appends = answered.starts_with(&prompt) && whole.starts_with(&answered);
            if !appends || prompt.len() < at {
                return Err(SegmentError::NotAppended { message: i });
            }
            segments.push((whole[at..prompt.len()].to_owned(), false));
            segments.push((whole[prompt.len()..answered.len()].to_owned(), true));
            at = answered.len();
        }
        Ok(segments)
    }

    /// The first token, and the document of the tokens behind it; `None` where no answer is within the length, which
    /// would teach nothing.
    fn document(&self, segments: &[(String, bool)]) -> Result<Option<(u32, Document)>> {
        let (mut tokens, mut labelled) = (Vec::new(), Vec::new());
        for (text, is_answer) in segments {
            tokens.append(&mut self.tokenizer.encode_marked(text)?);
            labelled.resize(tokens.len(), *is_answer);
        }
        if tokens.is_empty() {
            return Ok(None);
        }
        let first = tokens.remove(0);
        labelled.remove(0);
        tokens.resize(self.length, self.tokenizer.bos());
        labelled.resize(self.length, false);
        Ok(labelled.contains(&true).then_some((first, (tokens, labelled))))
    }
}

/// Why a conversation has no text with answers.
#[derive(Debug, thiserror::Error)]
enum SegmentError {
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error(
        "message {message} does not continue the prompt before it; use a template that only appends"
    )]
    NotAppended { message: usize },
}

/// `first` is the first token, where it is not the tokenizer's marker.
fn identity(documents: &[Document], first: Option<u32>) -> String {
    let mut bytes = Vec::new();
    for (tokens, labelled) in documents {
        bytes.extend(tokens.iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(labelled.iter().map(|answer| u8::from(*answer)));
    }
    bytes.extend(first.iter().flat_map(|id| id.to_le_bytes()));
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
        self.first
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

    fn recipe(template: Option<&str>) -> MessagesRecipe {
        MessagesRecipe {
            path: PathBuf::new(),
            heldout: None,
            template: template.map(str::to_owned),
            answers: usual_answers(),
        }
    }

    fn open(text: &str, template: Option<&str>, length: usize) -> Result<MessagesDataset> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chats.jsonl");
        fs::write(&path, text).unwrap();
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let recipe = recipe(template);
        let chat = recipe.chat_template("test.toml", None, &tokenizer)?;
        MessagesDataset::open("test.toml", &recipe, &path, (&tokenizer, &chat), length)
    }

    /// Tokens of the first document, markers as `^`, and the positions of answers.
    fn read(data: &MessagesDataset, length: usize) -> (String, Vec<usize>) {
        let (mut tokens, mut labelled) = (vec![0; length], vec![false; length]);
        data.read_labelled(0, 0, &mut tokens, &mut labelled).unwrap();
        let text = tokens.iter().map(|id| if *id == 255 { '^' } else { *id as u8 as char });
        (text.collect(), (0..length).filter(|i| labelled[*i]).collect())
    }

    const CHAT: &str = r#"{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "xy"}]}"#;

    #[test]
    fn only_answers_have_a_loss() {
        let data = open(CHAT, Some("{role}:{content};"), 24).unwrap();
        assert_eq!(read(&data, 24), ("user:ab;assistant:xy;^^^".into(), vec![18, 19, 20]));
        assert_eq!(data.bos(), 255);
        // As before templates were Jinja: runs of that time resume.
        assert_eq!(data.identity(), "messages-v1 f17c357ab6a099f4");
    }

    #[test]
    fn answers_end_with_the_marker() {
        let data = open(CHAT, None, 34).unwrap();
        let text = "<|user|>\nab\n<|assistant|>\nxy^\n^^^^";
        assert_eq!(read(&data, 34), (text.into(), vec![26, 27, 28, 29]));
    }

    #[test]
    fn jinja_templates_split_at_every_answer() {
        let chatml = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if m.role == 'assistant' %}\
                      {{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let chat = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " x "},
            {"role": "user", "content": "b"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "c"}]}"#;
        let data = open(&chat.replace('\n', " "), Some(chatml), 48).unwrap();
        let text = "user>a<assistant>x^<user>b<assistant>y^";
        // The first token is the first input of a sequence, in place of the marker.
        assert_eq!(data.bos(), u32::from(b'<'));
        assert_eq!(read(&data, 48), (format!("{text:^<48}"), vec![17, 18, 37, 38]));
        let rewrites = "{{ bos_token }}{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
        let error = open(&chat.replace('\n', " "), Some(rewrites), 48).unwrap_err().to_string();
        assert!(error.contains("use a template that only appends"), "{error}");
        let error = open(CHAT, Some("{{ x"), 48).unwrap_err().to_string();
        assert!(
            error.contains("`data.messages.template`") && error.contains("syntax error"),
            "{error}"
        );
    }

    #[test]
    fn skips_conversations_without_answers() {
        let silent = r#"{"messages": [{"role": "user", "content": "alone"}]}"#;
        let data = open(&format!("{silent}\n\n{CHAT}\n"), Some("{role}:{content};"), 24).unwrap();
        assert_eq!(data.lengths().documents(), 1);
        let error = open(CHAT, Some("{role}:{content};"), 18).unwrap_err().to_string();
        assert!(
            error.ends_with("no message of the role \"assistant\" begins within 18 tokens"),
            "{error}"
        );
    }

    #[test]
    fn names_unreadable_messages() {
        let error = open(CHAT, Some("{role}"), 24).unwrap_err().to_string();
        assert_eq!(error, "test.toml: `data.messages.template` must have {content} once");
        let text = format!("{CHAT}\n{{\"text\": 1}}");
        let error = open(&text, Some("{content}"), 24).unwrap_err().to_string();
        assert!(error.contains("in line 2 of ") && !error.contains('\n'), "{error}");
    }
}
