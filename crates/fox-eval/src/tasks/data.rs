//! Where the rows of a task lie.

use std::path::{Path, PathBuf};

use fox_base::Setting;
use fox_data::{Corpus, CorpusOptions, Record};

use super::spec::TaskSpec;
use crate::{Error, Result};

/// Endings that are looked for, in this order; a folder of such files will do too.
const ENDINGS: [&str; 7] =
    [".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson", ".json", ".parquet", ""];

/// The data of a task: those that its file names, or those in `folder` that have its name.
pub fn find_data(spec: &TaskSpec, folder: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = &spec.data {
        return Ok(path.clone());
    }
    let name = &spec.name;
    let Some(folder) = folder else {
        return Err(Error::of_setting(
            Setting::TaskData,
            format!("task {name} needs data; name the folder of {name}.jsonl"),
        ));
    };
    data_in(folder, name).ok_or_else(|| {
        Error::Argument(format!(
            "there are no data of task {name} in {}; put {name}.jsonl (also .zst, .gz), {name}.parquet or a \
             folder {name} there",
            folder.display()
        ))
    })
}

/// The data called `name` in a folder.
pub fn data_in(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut candidates = ENDINGS.iter().map(|ending| folder.join(format!("{name}{ending}")));
    candidates.find(|path| path.exists())
}

/// A task with `shots` examples, and its rows: the examples are the first rows of `NAME.train.jsonl` (or another ending)
/// in `folder`; without such a file the first rows of the data, which are then not asked.
///
/// # Errors
/// As [`find_data`], [`read_rows`] and `with_examples`; too few rows.
pub fn with_shots(
    spec: TaskSpec,
    shots: usize,
    folder: Option<&Path>,
    limit: Option<usize>,
) -> Result<(TaskSpec, Vec<Record>)> {
    let data = find_data(&spec, folder)?;
    if shots == 0 {
        return Ok((spec, read_rows(&data, limit)?));
    }
    let of_train = folder.and_then(|folder| data_in(folder, &format!("{}.train", spec.name)));
    let (examples, rows) = match &of_train {
        Some(path) => (read_rows(path, Some(shots))?, read_rows(&data, limit)?),
        None => {
            let mut examples = read_rows(&data, limit.map(|limit| limit.saturating_add(shots)))?;
            let rows = examples.split_off(shots.min(examples.len()));
            (examples, rows)
        }
    };
    if examples.len() < shots || rows.is_empty() {
        return Err(Error::of_setting(
            Setting::Shots,
            format!(
                "{} has too few rows for {shots} examples{}; ask for fewer",
                of_train.as_ref().unwrap_or(&data).display(),
                if of_train.is_some() { "" } else { " and a question" }
            ),
        ));
    }
    Ok((spec.with_examples(&examples)?, rows))
}

/// The first rows of a file or folder.
pub fn read_rows(path: &Path, limit: Option<usize>) -> Result<Vec<Record>> {
    let corpus = Corpus::open(path, CorpusOptions::default())?;
    let rows = corpus.records().take(limit.unwrap_or(usize::MAX));
    let rows: Vec<Record> = rows.collect::<fox_data::Result<_>>()?;
    if rows.is_empty() {
        return Err(Error::Empty { what: path.display().to_string() });
    }
    Ok(rows)
}
