//! TensorBoard event files: protocol buffers in TFRecord frames, written by hand.
//!
//! ```text
//! frame   length u64 | masked CRC32C of the length | bytes | masked CRC32C of the bytes
//! Event   1: wall_time double, 2: step int64, 3: file_version string, 5: summary
//! Summary 1: repeated Value { 1: tag string, 2: simple_value float }
//! ```

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Record;
use crate::{Error, Result};

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// A new event file in a folder.
    pub fn create(folder: &Path) -> Result<EventWriter> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let path = folder.join(format!("events.out.tfevents.{}.fox", now.as_secs()));
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        let mut writer = EventWriter { path, file };
        let mut event = Vec::new();
        put_double(&mut event, 1, now.as_secs_f64());
        put_bytes(&mut event, 3, b"brain.Event:2");
        writer.frame(&event)?;
        Ok(writer)
    }

    /// The numbers of a record.
    pub fn record(&mut self, record: &Record) -> Result<()> {
        match record {
            Record::Train(r) => {
                let mut values = vec![
                    ("train/lr".to_string(), r.lr),
                    ("speed/tokens_per_second".to_string(), r.tokens_per_second),
                    ("speed/floor_fraction".to_string(), r.floor_fraction),
                    ("memory/in_use".to_string(), r.memory.in_use as f64),
                    ("memory/peak".to_string(), r.memory.peak as f64),
                    ("train/skips".to_string(), r.skips as f64),
                ];
                let optional = [
                    ("train/loss", r.loss),
                    ("train/grad_norm", r.grad_norm),
                    ("train/param_norm", r.param_norm),
                ];
                let present = optional.into_iter().filter_map(|(tag, v)| Some((tag.into(), v?)));
                values.extend(present);
                for (layer, pruned) in r.pruned.iter().flatten().enumerate() {
                    values.push((format!("pruned/layer_{layer}"), *pruned));
                }
                for (layer, [sent, full]) in r.exchanged.iter().flatten().enumerate() {
                    let share = *sent as f64 / (*full).max(1) as f64;
                    values.push((format!("exchanged/layer_{layer}"), share));
                }
                for (layer, heads) in r.half_lives.iter().flatten().enumerate() {
                    for (head, life) in heads.iter().enumerate() {
                        values.push((format!("half_life/layer_{layer}/head_{head}"), *life));
                    }
                }
                self.scalars(r.time, r.step, &values)
            }
            Record::Eval(r) => {
                let mut values = vec![("eval/loss".to_string(), r.evaluation.loss)];
                for window in &r.evaluation.by_position {
                    let tag = format!("eval_by_position/{}_{}", window.from, window.to);
                    values.push((tag, window.loss));
                }
                self.scalars(r.time, r.step, &values)
            }
        }
    }

    /// Values of one step.
    pub fn scalars(&mut self, time: f64, step: u64, values: &[(String, f64)]) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            put_bytes(&mut entry, 1, tag.as_bytes());
            put_tag(&mut entry, 2, 5);
            entry.extend((*value as f32).to_le_bytes());
            put_bytes(&mut summary, 1, &entry);
        }
        let mut event = Vec::new();
        put_double(&mut event, 1, time);
        put_tag(&mut event, 2, 0);
        put_varint(&mut event, step);
        put_bytes(&mut event, 5, &summary);
        self.frame(&event)
    }

    fn frame(&mut self, bytes: &[u8]) -> Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        let mut frame = Vec::with_capacity(bytes.len() + 16);
        frame.extend(length);
        frame.extend(masked(crc32c(&length)).to_le_bytes());
        frame.extend(bytes);
        frame.extend(masked(crc32c(bytes)).to_le_bytes());
        self.file.write_all(&frame).map_err(Error::io("write", &self.path))
    }
}

fn put_tag(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    put_varint(out, field << 3 | wire_type);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_double(out: &mut Vec<u8>, field: u64, value: f64) {
    put_tag(out, field, 1);
    out.extend(value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_tag(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// CRC-32C (Castagnoli).
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    !bytes
        .iter()
        .fold(!0u32, |crc, byte| TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8))
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = (i as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

/// A CRC of data that holds CRCs would be weak, so the format rotates and shifts it.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn varints_have_seven_bits_a_byte() {
        let mut out = Vec::new();
        put_varint(&mut out, 300);
        put_varint(&mut out, 128);
        assert_eq!(out, [0xac, 0x02, 0x80, 0x01]);
    }

    /// Bytes as the reference library writes them for the same event.
    #[test]
    fn scalar_event_matches_known_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path()).unwrap();
        writer.scalars(1.5, 7, &[("loss".into(), 2.0)]).unwrap();
        let file = std::fs::read(&writer.path).unwrap();
        let first = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        assert_eq!(&file[12 + 9..12 + first], b"\x1a\x0dbrain.Event:2");
        let second = &file[16 + first..];
        let event = [
            &b"\x09\x00\x00\x00\x00\x00\x00\xf8\x3f"[..],
            b"\x10\x07",
            b"\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x00\x40",
        ]
        .concat();
        assert_eq!(second[..8], (event.len() as u64).to_le_bytes());
        assert_eq!(second[8..12], masked(crc32c(&second[..8])).to_le_bytes());
        assert_eq!(second[12..12 + event.len()], event);
        assert_eq!(second[12 + event.len()..], masked(crc32c(&event)).to_le_bytes());
    }
}
