//! Score file: a header that names the evaluation, then one line per case, from which a stopped evaluation resumes.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

#[derive(Serialize, Deserialize)]
struct Header {
    #[serde(alias = "needle")]
    evaluation: String,
}

#[derive(Serialize)]
struct Line<'a, K, S> {
    #[serde(flatten)]
    key: &'a K,
    #[serde(flatten)]
    score: &'a S,
}

#[derive(Deserialize)]
struct Read<K, S> {
    #[serde(flatten)]
    key: K,
    #[serde(flatten)]
    score: S,
}

/// The scores so far by case, and the file they are appended to.
pub(crate) struct ScoreLog<K, S> {
    scores: BTreeMap<K, S>,
    file: Option<(PathBuf, File)>,
}

impl<K: Ord + Serialize + DeserializeOwned, S: Serialize + DeserializeOwned> ScoreLog<K, S> {
    /// Reads the scores of the evaluation called `identity`, or starts a new file.
    pub(crate) fn open(path: Option<&Path>, identity: &str) -> Result<Self> {
        let Some(path) = path else {
            return Ok(ScoreLog { scores: BTreeMap::new(), file: None });
        };
        if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        }
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(Error::io("read", path)(e)),
        };
        let text = match is_of(path, &text, identity)? {
            true => text,
            // Another model or evaluation: every case is asked again.
            false => {
                fs::write(path, "").map_err(Error::io("write", path))?;
                String::new()
            }
        };
        let scores = read(&text);
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(Error::io("write", path))?;
        let start = if text.is_empty() {
            line(path, &Header { evaluation: identity.into() })?
        } else if text.ends_with('\n') {
            String::new()
        } else {
            // A killed evaluation may leave a partial last line: the next record starts a new line.
            "\n".into()
        };
        file.write_all(start.as_bytes()).map_err(Error::io("write", path))?;
        Ok(ScoreLog { scores, file: Some((path.to_path_buf(), file)) })
    }

    pub(crate) fn get(&self, key: &K) -> Option<&S> {
        self.scores.get(key)
    }

    pub(crate) fn add(&mut self, key: K, score: S) -> Result<()> {
        if let Some((path, file)) = &mut self.file {
            let text = line(path, &Line { key: &key, score: &score })?;
            file.write_all(text.as_bytes()).map_err(Error::io("write", path))?;
        }
        self.scores.insert(key, score);
        Ok(())
    }
}

fn line(path: &Path, value: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string(value)
        .map_err(|e| Error::BadFile { path: path.to_path_buf(), detail: e.to_string() })?;
    Ok(text + "\n")
}

/// Whether a file has scores of the evaluation `identity`; an error if it has no scores at all.
fn is_of(path: &Path, text: &str, identity: &str) -> Result<bool> {
    let Some(first) = text.lines().next() else { return Ok(true) };
    match serde_json::from_str::<Header>(first) {
        Ok(header) => Ok(header.evaluation == identity),
        Err(_) => Err(Error::OtherState {
            path: path.to_path_buf(),
            found: "something else".into(),
            expected: identity.to_string(),
        }),
    }
}

fn read<K: Ord + DeserializeOwned, S: DeserializeOwned>(text: &str) -> BTreeMap<K, S> {
    let lines = text.lines().skip(1);
    // A line that cannot be read was cut by a kill: its case is simply asked again.
    let parsed = lines.filter_map(|l| serde_json::from_str::<Read<K, S>>(l).ok());
    parsed.map(|l| (l.key, l.score)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
    struct Key {
        length: usize,
        case: u64,
    }

    #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
    struct Score {
        found: bool,
    }

    #[test]
    fn partial_lines_and_foreign_scores_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scores.jsonl");
        let open = |identity| ScoreLog::<Key, Score>::open(Some(&path), identity);
        let (one, two) = (Key { length: 64, case: 1 }, Key { length: 64, case: 2 });
        let score = Score { found: true };
        let mut log = open("a").unwrap();
        log.add(one, score.clone()).unwrap();
        log.add(two, score.clone()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 9]).unwrap();

        let mut log = open("a").unwrap();
        assert_eq!((log.get(&one), log.get(&two)), (Some(&score), None));
        log.add(two, score.clone()).unwrap();
        assert_eq!(open("a").unwrap().get(&two), Some(&score));
        assert_eq!(open("b").unwrap().get(&two), None);
        assert_eq!(open("a").unwrap().get(&one), None);
        fs::write(&path, "notes\n").unwrap();
        assert!(matches!(open("b"), Err(Error::OtherState { .. })));
    }
}
