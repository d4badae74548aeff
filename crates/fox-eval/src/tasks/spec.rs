//! Task files: what is asked of a row, and how the answer is judged.
//!
//! ```toml
//! name = "arc_easy"
//! about = "grade-school science questions"
//! metrics = ["acc", "acc_norm"]
//!
//! [multiple_choice]
//! context = "Question: {{ question }}\nAnswer:"
//! continuation = "{{ choices.text }}"
//! answer = "{{ answerKey }}"
//! labels = "{{ choices.label }}"
//! ```
//!
//! The table's name is the kind of the task: `multiple_choice`, `loglikelihood`, `rolling` or `generate`.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::metrics::Metric;
use super::template::Template;
use crate::{Error, Result};

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskSpec {
    /// What it is called, also where its data are looked for.
    pub name: String,
    /// What it asks, in a few words.
    pub about: String,
    /// Its data, where the task file names them.
    pub data: Option<PathBuf>,
    /// What is asked.
    pub ask: Ask,
    /// How answers are judged.
    pub metrics: Vec<Metric>,
    /// Whether the start marker is put in front of every context.
    pub bos: bool,
    /// Text in front of every context: questions with their answers.
    pub examples: String,
    /// The task file's text: results on file belong to exactly this.
    pub source: String,
}

/// What is asked of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Which of several continuations is the most likely.
    MultipleChoice(MultipleChoice),
    /// How likely a continuation is.
    Loglikelihood(Loglikelihood),
    /// How likely a whole text is.
    Rolling(Rolling),
    /// What comes next.
    Generate(Generate),
}

/// One template or several.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Texts")]
pub enum Templates {
    /// A template, whose value may be a list.
    One(Template),
    /// A list of templates.
    Many(Vec<Template>),
}

/// Templates before they are parsed, so that what is wrong with one is said as it is.
#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl TryFrom<Texts> for Templates {
    type Error = String;

    fn try_from(texts: Texts) -> std::result::Result<Self, String> {
        Ok(match texts {
            Texts::One(text) => Templates::One(text.try_into()?),
            Texts::Many(list) => Templates::Many(
                list.into_iter().map(Template::try_from).collect::<std::result::Result<_, _>>()?,
            ),
        })
    }
}

/// Contexts and continuations to choose from. Where one side has several and the other has one, that one is
/// used with each.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultipleChoice {
    /// What stands before a choice.
    pub context: Templates,
    /// The choices.
    pub continuation: Templates,
    /// The right one: its number from 0, or its label.
    pub answer: Template,
    /// The labels of the choices.
    pub labels: Option<Templates>,
    /// Between context and continuation.
    #[serde(default = "space")]
    pub delimiter: String,
}

/// A context and its continuation, the space between them included.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loglikelihood {
    /// What stands before.
    pub context: Template,
    /// What is judged.
    pub continuation: Template,
}

/// A text that is judged from its first token.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rolling {
    /// The text.
    pub text: Template,
    /// The text whose words and bytes are counted; the text itself by default.
    pub counted: Option<Template>,
}

/// A prompt and the answers that are right.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generate {
    /// What stands before the answer.
    pub context: Template,
    /// The right answers; the best score of any counts.
    pub answers: Template,
    /// Names of the classes, for `classification`.
    pub classes: Option<Template>,
    /// Tokens of an answer, at most.
    pub max_tokens: usize,
    /// Texts that end an answer.
    #[serde(default)]
    pub stop: Vec<String>,
    /// Ends an answer behind a token of a line break, which cannot be the first.
    #[serde(default)]
    pub one_line: bool,
    /// Whether only the first line that is said counts.
    #[serde(default)]
    pub first_line: bool,
}

fn space() -> String {
    " ".into()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    #[serde(default)]
    about: String,
    data: Option<PathBuf>,
    metrics: Vec<Metric>,
    #[serde(default)]
    bos: bool,
    multiple_choice: Option<MultipleChoice>,
    loglikelihood: Option<Loglikelihood>,
    rolling: Option<Rolling>,
    generate: Option<Generate>,
}

impl TaskSpec {
    /// Reads a task file. Data that it names lie beside it.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let mut spec = Self::parse(&text, &stem)
            .map_err(|detail| Error::BadFile { path: path.to_path_buf(), detail })?;
        spec.data = spec.data.map(|data| path.with_file_name("").join(data));
        Ok(spec)
    }

    /// Reads the text of a task file; without a `name` the task is called `name`.
    pub fn parse(text: &str, name: &str) -> std::result::Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| one_line(&e))?;
        let asks = [
            file.multiple_choice.map(Ask::MultipleChoice),
            file.loglikelihood.map(Ask::Loglikelihood),
            file.rolling.map(Ask::Rolling),
            file.generate.map(Ask::Generate),
        ];
        let mut asks: Vec<Ask> = asks.into_iter().flatten().collect();
        let (Some(ask), true) = (asks.pop(), asks.is_empty()) else {
            return Err(
                "a task has exactly one of the tables [multiple_choice], [loglikelihood], \
                        [rolling] and [generate]"
                    .into(),
            );
        };
        let allowed = ask.metrics();
        if let Some(wrong) = file.metrics.iter().find(|m| !allowed.contains(m)) {
            let names: Vec<&str> = allowed.iter().map(|m| m.name()).collect();
            return Err(format!(
                "{} is not a metric of {}; use {}",
                wrong.name(),
                ask.kind(),
                names.join(", ")
            ));
        }
        if file.metrics.is_empty() {
            return Err("`metrics` is empty".into());
        }
        Ok(TaskSpec {
            name: file.name.unwrap_or_else(|| name.to_string()),
            about: file.about,
            data: file.data,
            ask,
            metrics: file.metrics,
            bos: file.bos,
            examples: String::new(),
            source: text.to_string(),
        })
    }
}

impl Ask {
    /// The name of its table.
    pub fn kind(&self) -> &'static str {
        match self {
            Ask::MultipleChoice(_) => "multiple_choice",
            Ask::Loglikelihood(_) => "loglikelihood",
            Ask::Rolling(_) => "rolling",
            Ask::Generate(_) => "generate",
        }
    }

    /// The metrics that can judge it.
    pub fn metrics(&self) -> &'static [Metric] {
        match self {
            Ask::MultipleChoice(_) => {
                &[Metric::Acc, Metric::AccNorm, Metric::AccBytes, Metric::ExactMatch]
            }
            Ask::Loglikelihood(_) => &[Metric::Perplexity, Metric::Acc],
            Ask::Rolling(_) => {
                &[Metric::WordPerplexity, Metric::BytePerplexity, Metric::BitsPerByte]
            }
            Ask::Generate(_) => &[
                Metric::ExactMatch,
                Metric::F1,
                Metric::RougeL,
                Metric::Classification,
                Metric::EditSimilarity,
            ],
        }
    }
}

/// What is wrong and on which line, in one line.
fn one_line(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let place = text.lines().next().and_then(|l| l.strip_prefix("TOML parse error at "));
    let message = error.message().replace('\n', " ");
    place.map_or(message.clone(), |place| format!("{place}: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "metrics = ['acc']\n[loglikelihood]\ncontext = '{{ a }}'\ncontinuation = ' {{ b }}'";

    fn said(text: &str) -> String {
        TaskSpec::parse(text, "t").unwrap_err()
    }

    #[test]
    fn task_name_defaults_to_file_name() {
        let spec = TaskSpec::parse(GOOD, "t").unwrap();
        assert_eq!((spec.name.as_str(), spec.ask.kind(), spec.bos), ("t", "loglikelihood", false));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        std::fs::write(&path, format!("data = 'items.jsonl'\n{GOOD}")).unwrap();
        let spec = TaskSpec::from_file(&path).unwrap();
        assert_eq!(spec.name, "mine");
        assert_eq!(spec.data, Some(folder.path().join("items.jsonl")));
    }

    #[test]
    fn rejects_invalid_files_in_one_line() {
        for (text, expected) in [
            ("metrics = ['acc']", "exactly one"),
            (&format!("{GOOD}\n[rolling]\ntext = ''"), "exactly one"),
            (
                &GOOD.replace("'acc'", "'f1'"),
                "f1 is not a metric of loglikelihood; use perplexity, acc",
            ),
            (&GOOD.replace("'acc'", ""), "`metrics` is empty"),
            (&GOOD.replace("'acc'", "'bleu'"), "bleu"),
            (&GOOD.replace("continuation", "cont"), "cont"),
            (&GOOD.replace("{{ a }}", "{{ a"), "is not a Jinja template"),
            (&GOOD.replace("{{ a }}", "{a}"), "write {{ a }} for {a}"),
        ] {
            let said = said(text);
            assert!(said.contains(expected) && !said.contains('\n'), "{said}");
        }
    }
}
