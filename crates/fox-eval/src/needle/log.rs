//! Score file, one line per case, from which a stopped test resumes.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Score;
use crate::{Error, Result};

/// Which case of which cell: length, index of the depth, number of the case.
pub(super) type Key = (usize, usize, u64);

#[derive(Serialize, Deserialize)]
struct Header {
    needle: String,
}

#[derive(Serialize, Deserialize)]
struct Line {
    length: usize,
    depth: usize,
    case: u64,
    #[serde(flatten)]
    score: Score,
}

/// The scores so far, and the file they are appended to.
pub(super) struct ScoreLog {
    scores: BTreeMap<Key, Score>,
    file: Option<(PathBuf, File)>,
}

impl ScoreLog {
    /// Reads the scores of the test called `identity`, or starts a new file.
    pub(super) fn open(path: Option<&Path>, identity: &str) -> Result<Self> {
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
        let scores = read(path, &text, identity)?;
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(Error::io("write", path))?;
        let start = if text.is_empty() {
            line(path, &Header { needle: identity.into() })?
        } else if text.ends_with('\n') {
            String::new()
        } else {
            // A killed test may leave a partial last line: the next record starts a new line.
            "\n".into()
        };
        file.write_all(start.as_bytes()).map_err(Error::io("write", path))?;
        Ok(ScoreLog { scores, file: Some((path.to_path_buf(), file)) })
    }

    pub(super) fn get(&self, key: &Key) -> Option<Score> {
        self.scores.get(key).copied()
    }

    pub(super) fn add(&mut self, key: Key, score: Score) -> Result<()> {
        if let Some((path, file)) = &mut self.file {
            let (length, depth, case) = key;
            let text = line(path, &Line { length, depth, case, score })?;
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

fn read(path: &Path, text: &str, identity: &str) -> Result<BTreeMap<Key, Score>> {
    let mut lines = text.lines();
    if let Some(first) = lines.next() {
        let found = match serde_json::from_str::<Header>(first) {
            Ok(header) => header.needle,
            Err(_) => "something else".into(),
        };
        if found != identity {
            let (path, expected) = (path.to_path_buf(), identity.to_string());
            return Err(Error::OtherState { path, found, expected });
        }
    }
    // A line that cannot be read was cut by a kill: its case is simply asked again.
    let parsed = lines.filter_map(|l| serde_json::from_str::<Line>(l).ok());
    Ok(parsed.map(|l| ((l.length, l.depth, l.case), l.score)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_lines_and_foreign_scores_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("needle.jsonl");
        let score = Score { found: true, log_prob: -0.1, margin: None };
        let mut log = ScoreLog::open(Some(&path), "a").unwrap();
        log.add((64, 0, 1), score).unwrap();
        log.add((64, 0, 2), score).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 9]).unwrap();

        let mut log = ScoreLog::open(Some(&path), "a").unwrap();
        assert_eq!(log.get(&(64, 0, 1)), Some(score));
        assert_eq!(log.get(&(64, 0, 2)), None);
        log.add((64, 0, 2), score).unwrap();
        let log = ScoreLog::open(Some(&path), "a").unwrap();
        assert_eq!(log.get(&(64, 0, 2)), Some(score));
        assert!(matches!(ScoreLog::open(Some(&path), "b"), Err(Error::OtherState { .. })));
    }
}
