//! LongBench: its 14 English and code tasks, with the prompts and lengths of the data set's own configuration.
//!
//! Semantics follow `pred.py` and `eval.py` of THUDM/LongBench: the prompt is cut in the middle, the answer is
//! greedy, samsum ends at a line break that cannot come first, and of some tasks only the first line counts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::metrics::Metric;
use super::spec::{Ask, Generate, TaskSpec};
use super::template::Template;
use crate::{Error, Result};

/// The tasks, in the order of the paper's table.
#[rustfmt::skip]
pub const NAMES: [&str; 14] = [
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report",
    "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p",
];

/// The data set's configuration.
#[derive(Clone, Debug)]
pub struct LongBench {
    folder: PathBuf,
    prompts: HashMap<String, String>,
    lengths: HashMap<String, usize>,
}

impl LongBench {
    /// Reads `dataset2prompt.json` and `dataset2maxlen.json` of a folder.
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(LongBench {
            folder: folder.to_path_buf(),
            prompts: read(&folder.join("dataset2prompt.json"))?,
            lengths: read(&folder.join("dataset2maxlen.json"))?,
        })
    }

    /// The task called `name`, which is one of [`NAMES`].
    pub fn task(&self, name: &str) -> Result<TaskSpec> {
        let missing = |file: &str| Error::BadFile {
            path: self.folder.join(file),
            detail: format!("nothing is said about {name}"),
        };
        let prompt = self.prompts.get(name).ok_or_else(|| missing("dataset2prompt.json"))?;
        let max_tokens = *self.lengths.get(name).ok_or_else(|| missing("dataset2maxlen.json"))?;
        let template = |text: &str| {
            Template::try_from(text.to_string()).map_err(|detail| Error::BadFile {
                path: self.folder.join("dataset2prompt.json"),
                detail: format!("{name}: {detail}"),
            })
        };
        let metric = metric(name);
        Ok(TaskSpec {
            name: name.to_string(),
            about: "LongBench".into(),
            data: None,
            examples: String::new(),
            ask: Ask::Generate(Generate {
                context: template(&jinja(prompt))?,
                answers: template("{{ answers }}")?,
                classes: match metric {
                    Metric::Classification => Some(template("{{ all_classes }}")?),
                    _ => None,
                },
                max_tokens,
                stop: Vec::new(),
                one_line: name == "samsum",
                first_line: ["trec", "triviaqa", "samsum"].contains(&name),
            }),
            metrics: vec![metric],
            bos: true,
            source: format!("longbench {name} {max_tokens} {prompt}"),
        })
    }
}

/// The Jinja template of a format string of Python: `{name}` is a column, `{{` and `}}` are braces.
fn jinja(format: &str) -> String {
    let (mut jinja, mut text) = (String::new(), String::new());
    let mut rest = format;
    while let Some(at) = rest.find(['{', '}']) {
        text.push_str(&rest[..at]);
        let (brace, behind) = rest[at..].split_at(1);
        if let Some(behind) = behind.strip_prefix(brace) {
            text.push_str(brace);
            rest = behind;
        } else if let Some((column, behind)) = behind.split_once('}').filter(|_| brace == "{") {
            jinja += &format!("{}{{{{ {column} }}}}", literal(&mut text));
            rest = behind;
        } else {
            text.push_str(brace);
            rest = behind;
        }
    }
    text.push_str(rest);
    jinja + &literal(&mut text)
}

/// Text as an expression, so that nothing in it is Jinja; empties it.
fn literal(text: &mut String) -> String {
    match std::mem::take(text) {
        text if text.is_empty() => text,
        text => format!("{{{{ {} }}}}", serde_json::Value::from(text)),
    }
}

fn metric(name: &str) -> Metric {
    match name {
        "gov_report" | "qmsum" | "multi_news" | "samsum" => Metric::RougeL,
        "trec" => Metric::Classification,
        "lcc" | "repobench-p" => Metric::EditSimilarity,
        _ => Metric::F1,
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&text)
        .map_err(|e| Error::BadFile { path: path.to_path_buf(), detail: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_and_lengths_come_from_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "dataset2prompt.json",
            r#"{"trec": "Say {{{{}}}}:\n{context}\n{input}", "lcc": "{context}"}"#,
        );
        write("dataset2maxlen.json", r#"{"trec": 64}"#);
        let configuration = LongBench::open(folder.path()).unwrap();
        let spec = configuration.task("trec").unwrap();
        let Ask::Generate(ask) = &spec.ask else { panic!("{spec:?}") };
        assert_eq!((ask.max_tokens, ask.first_line, ask.one_line), (64, true, false));
        assert_eq!(spec.metrics, [Metric::Classification]);
        assert!(spec.bos && ask.classes.is_some());
        let row = serde_json::json!({"context": "{{ Q }}", "input": 7});
        assert_eq!(ask.context.text(row.as_object().unwrap()).unwrap(), "Say {{}}:\n{{ Q }}\n7");
        let said = configuration.task("lcc").unwrap_err().to_string();
        assert!(said.ends_with("dataset2maxlen.json: nothing is said about lcc"), "{said}");
        let said = LongBench::open(Path::new("nowhere")).unwrap_err().to_string();
        assert!(said.contains("dataset2prompt.json"), "{said}");
    }

    #[test]
    fn every_task_has_its_metric() {
        let count = |m: Metric| NAMES.iter().filter(|name| metric(name) == m).count();
        let counts = [Metric::F1, Metric::RougeL, Metric::Classification, Metric::EditSimilarity];
        assert_eq!(counts.map(count), [7, 4, 1, 2]);
    }
}
