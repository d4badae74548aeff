//! metrics.jsonl: one JSON object per line, in step with the checkpoints.
//!
//! A line is written with one call, and everything is synced before a checkpoint. When a run goes on from
//! step `s`, lines of later steps (and a torn last line) are cut off, so no step occurs twice. The
//! TensorBoard file is made anew from the lines that stay.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use super::Record;
use super::events::EventWriter;
use crate::{Error, Result, files};

const FILE: &str = "metrics.jsonl";

/// The open log of a run.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    events: EventWriter,
}

impl MetricsLog {
    /// Opens the log of a run folder, cut back to the lines up to `step`.
    pub fn open(run: &Path, step: u64) -> Result<MetricsLog> {
        let path = run.join(FILE);
        let (records, end) = read_up_to(&path, step)?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        file.set_len(end).map_err(Error::io("truncate", &path))?;
        let folder = run.join("tensorboard");
        files::create_folder(&folder)?;
        for old in files::names(&folder)? {
            fs::remove_file(&old).map_err(Error::io("remove", &old))?;
        }
        let mut events = EventWriter::create(&folder)?;
        for record in &records {
            events.record(record)?;
        }
        Ok(MetricsLog { path, file, events })
    }

    /// Appends a line.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_vec(record).map_err(|e| Error::Encode {
            path: self.path.clone(),
            format: "JSON",
            detail: e.to_string(),
        })?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(Error::io("write", &self.path))?;
        self.events.record(record)
    }

    /// Makes everything written so far last.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(Error::io("sync", &self.path))
    }

    /// All lines of a run's log; none without one. A torn last line is passed over.
    pub fn read(run: &Path) -> Result<Vec<Record>> {
        Ok(read_up_to(&run.join(FILE), u64::MAX)?.0)
    }
}

/// The records of steps up to `step`, and the length of the file that holds just them.
fn read_up_to(path: &Path, step: u64) -> Result<(Vec<Record>, u64)> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((Vec::new(), 0)),
        Err(e) => return Err(Error::io("open", path)(e)),
    };
    let (mut reader, mut records, mut end) = (BufReader::new(file), Vec::new(), 0);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(Error::io("read", path))?;
        let record = match line.strip_suffix(b"\n") {
            Some(text) => serde_json::from_slice::<Record>(text).ok(),
            None => None,
        };
        match record.filter(|record| record.step() <= step) {
            Some(record) => records.push(record),
            None => return Ok((records, end)),
        }
        end += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Evaluation, PositionLoss};
    use crate::metrics::{EvalRecord, Memory, StepRecord};

    fn record(step: u64) -> Record {
        Record::Train(StepRecord { step, loss: Some(1.0 / step as f64), ..Default::default() })
    }

    #[test]
    fn a_log_goes_on_without_duplicates() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::open(dir.path(), 0).unwrap();
        for step in 1..=5 {
            log.write(&record(step)).unwrap();
        }
        drop(log);
        // The process died in the middle of a line.
        let path = dir.path().join(FILE);
        let mut text = fs::read(&path).unwrap();
        text.extend_from_slice(b"{\"kind\":\"tra");
        fs::write(&path, text).unwrap();
        let mut log = MetricsLog::open(dir.path(), 3).unwrap();
        log.write(&record(4)).unwrap();
        let steps: Vec<u64> =
            MetricsLog::read(dir.path()).unwrap().iter().map(Record::step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        assert_eq!(MetricsLog::read(dir.path()).unwrap()[2], record(3));
        assert_eq!(files::names(&dir.path().join("tensorboard")).unwrap().len(), 1);
    }

    #[test]
    fn every_kind_of_line_is_read_as_it_was_written() {
        let by_position = vec![PositionLoss { from: 0, to: 16, loss: 2.5 }];
        let records = [
            Record::Train(StepRecord {
                step: 1,
                tokens: 10,
                loss: None,
                skipped: true,
                memory: Memory { in_use: 1, peak: 2, reserved: 3 },
                param_norm: Some(0.1),
                pruned: Some(vec![0.25, 0.5]),
                half_lives: Some(vec![vec![1.5], vec![]]),
                ..Default::default()
            }),
            Record::Eval(EvalRecord {
                step: 1,
                tokens: 10,
                evaluation: Evaluation { loss: 2.5, predictions: 7, by_position },
                eval_seconds: 0.5,
                time: 1e9,
            }),
        ];
        let dir = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::open(dir.path(), 0).unwrap();
        for record in &records {
            log.write(record).unwrap();
        }
        assert_eq!(MetricsLog::read(dir.path()).unwrap(), records);
    }

    #[test]
    fn there_may_be_no_log() {
        let dir = tempfile::tempdir().unwrap();
        assert!(MetricsLog::read(dir.path()).unwrap().is_empty());
    }
}
