//! Samples that RULER wrote: JSON lines with `index`, `input`, `outputs` and `length`.

use std::io::{BufRead as _, BufReader};
use std::path::Path;

use serde_json::{Map, Value};

use super::{Matching, RulerTask};
use crate::{Error, Result};

/// The samples of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct FileSamples {
    /// RULER's name of the task, or that of the file.
    pub task: String,
    /// How answers are compared: `qa` tasks need one of the outputs, all others all of them.
    pub matching: Matching,
    /// The longest `length`, rounded up to a power of two: the setting that the file was written for.
    pub length: usize,
    /// Tokens to generate, as RULER sets them for the task.
    pub max_tokens: usize,
    /// Prompts, each with its answer prefix, and their right answers.
    pub samples: Vec<(String, Vec<String>)>,
}

/// Reads a file; at most `limit` samples.
///
/// RULER writes `TASK/validation.jsonl`: the task is the name of the folder if it is one of RULER's, else that of the file.
///
/// # Errors
/// A file that cannot be read, an empty file, and lines without one of the fields.
pub fn read_file(path: &Path, limit: Option<usize>) -> Result<FileSamples> {
    let file = std::fs::File::open(path).map_err(Error::io("read", path))?;
    let (mut samples, mut longest) = (Vec::new(), 0);
    for (i, line) in BufReader::new(file).lines().enumerate() {
        if limit.is_some_and(|limit| samples.len() >= limit) {
            break;
        }
        let line = line.map_err(Error::io("read", path))?;
        if line.trim().is_empty() {
            continue;
        }
        let bad = |detail: String| Error::BadFile {
            path: path.to_path_buf(),
            detail: format!("line {}: {detail}", i + 1),
        };
        let row: Map<String, Value> = serde_json::from_str(&line)
            .map_err(|e| bad(format!("not a JSON object ({e}); RULER writes one per line")))?;
        let (sample, length) = sample(&row).map_err(bad)?;
        longest = longest.max(length);
        samples.push(sample);
    }
    if samples.is_empty() {
        return Err(Error::Empty { what: path.display().to_string() });
    }
    let name = |part: Option<&std::ffi::OsStr>| part.map(|n| n.to_string_lossy().into_owned());
    let folder = name(path.parent().and_then(Path::file_name));
    let task = folder
        .filter(|name| RulerTask::find(name).is_some())
        .or_else(|| name(path.file_stem()))
        .unwrap_or_default();
    let known = RulerTask::find(&task);
    let matching = match task.starts_with("qa") {
        true => Matching::Part,
        false => Matching::All,
    };
    let max_tokens = known.unwrap_or(RulerTask::NiahSingle1).ruler_tokens();
    Ok(FileSamples { task, matching, length: longest.next_power_of_two(), max_tokens, samples })
}

/// The sample of a line and its length.
fn sample(row: &Map<String, Value>) -> std::result::Result<((String, Vec<String>), usize), String> {
    let field = |name: &str, form: &str| {
        row.get(name).ok_or_else(|| format!("the field `{name}` is missing; RULER writes {form}"))
    };
    let wrong = |name: &str, form: &str| format!("the field `{name}` is not {form}");
    field("index", "the number of the sample")?;
    const TEXT: &str = "the prompt as a text";
    let input = field("input", TEXT)?.as_str().ok_or_else(|| wrong("input", TEXT))?;
    const LIST: &str = "a list of texts with one answer or more";
    let outputs: Option<Vec<String>> = match field("outputs", LIST)? {
        Value::Array(list) => list.iter().map(|o| o.as_str().map(String::from)).collect(),
        _ => None,
    };
    let outputs = outputs.filter(|list| !list.is_empty()).ok_or_else(|| wrong("outputs", LIST))?;
    const COUNT: &str = "a number of tokens";
    // The largest power of two of a 32-bit number is far beyond any context.
    let length = field("length", COUNT)?.as_u64().filter(|n| *n < 1 << 31);
    let length = length.ok_or_else(|| wrong("length", COUNT))? as usize;
    let prefix = match row.get("answer_prefix") {
        None | Some(Value::Null) => "",
        Some(prefix) => prefix.as_str().ok_or_else(|| wrong("answer_prefix", "a text"))?,
    };
    Ok(((format!("{input}{prefix}"), outputs), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"index": 0, "input": "The key is 7. The key", "outputs": ["7"], "length": 900, "answer_prefix": " is"}"#;

    #[test]
    fn reads_samples_with_their_setting() {
        let folder = tempfile::tempdir().unwrap();
        let task = folder.path().join("vt");
        std::fs::create_dir(&task).unwrap();
        let path = task.join("validation.jsonl");
        std::fs::write(&path, format!("{GOOD}\n\n{GOOD}\n{GOOD}\n")).unwrap();
        let file = read_file(&path, Some(2)).unwrap();
        assert_eq!((file.task.as_str(), file.length, file.max_tokens), ("vt", 1024, 30));
        let sample = ("The key is 7. The key is".to_string(), vec!["7".to_string()]);
        assert_eq!((file.matching, file.samples), (Matching::All, vec![sample; 2]));
        let path = folder.path().join("qa_mine.jsonl");
        std::fs::write(&path, GOOD).unwrap();
        let file = read_file(&path, None).unwrap();
        assert_eq!((file.task.as_str(), file.matching), ("qa_mine", Matching::Part));
    }

    #[test]
    fn missing_fields_are_named_with_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("niah.jsonl");
        let said = |second: &str| {
            std::fs::write(&path, format!("{GOOD}\n{second}\n")).unwrap();
            read_file(&path, None).unwrap_err().to_string()
        };
        for field in ["index", "input", "outputs", "length"] {
            let said = said(&GOOD.replace(&format!("\"{field}\""), "\"other\""));
            let expected = format!("line 2: the field `{field}` is missing; RULER writes");
            assert!(said.contains(&expected), "{said}");
        }
        for (from, to, field) in
            [("[\"7\"]", "[]", "outputs"), ("[\"7\"]", "7", "outputs"), ("900", "-1", "length")]
        {
            let said = said(&GOOD.replace(from, to));
            assert!(said.contains(&format!("line 2: the field `{field}` is not")), "{said}");
        }
        assert!(said("[1]").contains("line 2: not a JSON object"));
        std::fs::write(&path, "\n").unwrap();
        assert!(read_file(&path, None).unwrap_err().to_string().ends_with("is empty"));
    }
}
