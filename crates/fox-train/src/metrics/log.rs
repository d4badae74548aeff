//! metrics.jsonl: one JSON object per line, in step with the checkpoints.
//!
//! A line is written with one call, and everything is synced before a checkpoint. When a run resumes from
//! step `s`, lines of later steps (and a torn last line) are cut off, so no step occurs twice. The
//! TensorBoard file is made anew from the lines that stay. A line in the middle that is damaged is passed over and
//! stays: what follows it is as good as before.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use fox_base::durable;

use super::Record;
use super::events::EventWriter;
use crate::{Error, Result};

const FILE: &str = "metrics.jsonl";

/// The open log of a run.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    events: EventWriter,
}

/// What a log holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logged {
    /// The records of all lines that can be read, in order.
    pub records: Vec<Record>,
    /// One sentence about lines that cannot be read, when there are any.
    pub notice: Option<String>,
}

impl MetricsLog {
    /// Opens the log of a run folder, cut back to the lines up to `step`, and says which of these are damaged.
    pub fn open(run: &Path, step: u64) -> Result<(MetricsLog, Option<String>)> {
        let path = run.join(FILE);
        let bytes = read_bytes(&path)?;
        let lines = Lines::parse(&bytes);
        let kept = lines.up_to(step);
        if !bytes.starts_with(&kept.bytes) {
            durable::write(&path, &kept.bytes)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        file.set_len(kept.bytes.len() as u64).map_err(Error::io("truncate", &path))?;
        let folder = run.join("tensorboard");
        durable::create_folder(&folder)?;
        for old in durable::entries(&folder)? {
            fs::remove_file(&old).map_err(Error::io("remove", &old))?;
        }
        let mut events = EventWriter::create(&folder)?;
        for record in &kept.records {
            events.record(record)?;
        }
        let notice = damage_notice(&path, &kept.damaged);
        Ok((MetricsLog { path, file, events }, notice))
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

    /// All lines of a run's log; none without one. Damaged lines and a torn last line are passed over.
    pub fn read(run: &Path) -> Result<Logged> {
        let path = run.join(FILE);
        let bytes = read_bytes(&path)?;
        let kept = Lines::parse(&bytes).up_to(u64::MAX);
        Ok(Logged { notice: damage_notice(&path, &kept.damaged), records: kept.records })
    }
}

/// The bytes of a log; none without one.
fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    match fs::read(path) {
        Ok(bytes) => Ok(bytes),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

fn damage_notice(path: &Path, damaged: &[usize]) -> Option<String> {
    let first = damaged.first()?;
    let lines = match damaged.len() {
        1 => format!("line {first} is damaged and passed over"),
        n => format!("{n} lines, the first of them line {first}, are damaged and passed over"),
    };
    Some(format!("{}: {lines}; the others are used", path.display()))
}

/// The lines of a log; the record is missing where a line is damaged.
struct Lines<'a> {
    lines: Vec<(&'a [u8], Option<Record>)>,
}

/// A part of a log.
struct LogPrefix {
    records: Vec<Record>,
    /// Numbers of damaged lines, from 1.
    damaged: Vec<usize>,
    /// The part of the file.
    bytes: Vec<u8>,
}

impl<'a> Lines<'a> {
    /// A last line without an end is torn and not among them.
    fn parse(bytes: &'a [u8]) -> Self {
        let whole = bytes.split_inclusive(|byte| *byte == b'\n').filter(|l| l.ends_with(b"\n"));
        let lines = whole.map(|line| (line, serde_json::from_slice(line).ok())).collect();
        Lines { lines }
    }

    /// The lines of steps up to `step`. A damaged line has no step: it belongs to them if one of them follows it.
    fn up_to(self, step: u64) -> LogPrefix {
        let early = |record: &Record| record.step() <= step;
        let last = self.lines.iter().rposition(|(_, r)| r.as_ref().is_some_and(early));
        let mut kept = LogPrefix { records: Vec::new(), damaged: Vec::new(), bytes: Vec::new() };
        let part = self.lines.into_iter().take(last.map_or(0, |last| last + 1));
        for (number, (line, record)) in part.enumerate() {
            match record {
                Some(record) if record.step() > step => continue,
                Some(record) => kept.records.push(record),
                None => kept.damaged.push(number + 1),
            }
            kept.bytes.extend_from_slice(line);
        }
        kept
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
    fn resumed_log_has_no_duplicates() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::open(dir.path(), 0).unwrap().0;
        for step in 1..=5 {
            log.write(&record(step)).unwrap();
        }
        drop(log);
        // The process died in the middle of a line.
        let path = dir.path().join(FILE);
        let mut text = fs::read(&path).unwrap();
        text.extend_from_slice(b"{\"kind\":\"tra");
        fs::write(&path, text).unwrap();
        let (mut log, notice) = MetricsLog::open(dir.path(), 3).unwrap();
        assert_eq!(notice, None, "a torn last line is not damage");
        log.write(&record(4)).unwrap();
        let read = MetricsLog::read(dir.path()).unwrap();
        assert_eq!(read.records, [1, 2, 3, 4].map(record));
        assert_eq!(read.notice, None);
        assert_eq!(durable::entries(&dir.path().join("tensorboard")).unwrap().len(), 1);
    }

    #[test]
    fn log_records_round_trip() {
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
                evaluation: Evaluation {
                    loss: 2.5,
                    sequences: 1,
                    predictions: 7,
                    masked: false,
                    by_position,
                },
                eval_seconds: 0.5,
                time: 1e9,
            }),
        ];
        let dir = tempfile::tempdir().unwrap();
        let mut log = MetricsLog::open(dir.path(), 0).unwrap().0;
        for record in &records {
            log.write(record).unwrap();
        }
        assert_eq!(MetricsLog::read(dir.path()).unwrap().records, records);
    }

    #[test]
    fn there_may_be_no_log() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(MetricsLog::read(dir.path()).unwrap(), Logged::default());
    }

    /// A log of steps 1 to 9 in which some lines are replaced.
    fn damaged_log(dir: &Path, changes: &[(u64, &[u8])]) -> Vec<u8> {
        let mut text = Vec::new();
        for step in 1..=9 {
            match changes.iter().find(|(at, _)| *at == step) {
                Some((_, bytes)) => text.extend_from_slice(bytes),
                None => serde_json::to_writer(&mut text, &record(step)).unwrap(),
            }
            text.push(b'\n');
        }
        fs::write(dir.join(FILE), &text).unwrap();
        text
    }

    #[test]
    fn damaged_line_does_not_hide_later_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        for bytes in
            [&b"{\"kind\":\"tra"[..], b"", b"\xff\xfe\0", b"{\"kind\":\"train\",\"step\":4}"]
        {
            let text = damaged_log(dir.path(), &[(4, bytes)]);
            let read = MetricsLog::read(dir.path()).unwrap();
            assert_eq!(read.records, [1, 2, 3, 5, 6, 7, 8, 9].map(record));
            let want = format!(
                "{}: line 4 is damaged and passed over; the others are used",
                path.display()
            );
            assert_eq!(read.notice.as_ref(), Some(&want));

            // Going on keeps the later lines up to the checkpoint, and the damaged one as evidence.
            let (mut log, notice) = MetricsLog::open(dir.path(), 7).unwrap();
            assert_eq!(notice, Some(want));
            let now = fs::read(&path).unwrap();
            assert!(text.starts_with(&now), "the beginning of the log changed");
            log.write(&record(8)).unwrap();
            let records = MetricsLog::read(dir.path()).unwrap().records;
            assert_eq!(records, [1, 2, 3, 5, 6, 7, 8].map(record));
        }
        // Beyond the checkpoint a damaged line goes with the others.
        damaged_log(dir.path(), &[(4, b"?"), (6, b"?")]);
        let (_, notice) = MetricsLog::open(dir.path(), 5).unwrap();
        assert!(notice.unwrap().contains("line 4 is damaged"));
        assert_eq!(fs::read(&path).unwrap().iter().filter(|b| **b == b'\n').count(), 5);
        damaged_log(dir.path(), &[(4, b"?"), (6, b"?")]);
        let notice = MetricsLog::read(dir.path()).unwrap().notice.unwrap();
        assert!(notice.contains("2 lines, the first of them line 4, are damaged"), "{notice}");
    }

    /// A changed digit can leave a line readable, but of a step that comes later.
    #[test]
    fn misplaced_later_step_is_dropped_on_resume() {
        let dir = tempfile::tempdir().unwrap();
        let late = serde_json::to_vec(&record(8)).unwrap();
        damaged_log(dir.path(), &[(3, &late)]);
        let (mut log, _) = MetricsLog::open(dir.path(), 5).unwrap();
        log.write(&record(6)).unwrap();
        let records = MetricsLog::read(dir.path()).unwrap().records;
        assert_eq!(records, [1, 2, 4, 5, 6].map(record));
    }
}
