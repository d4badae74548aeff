//! Reading one shard.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use twox_hash::XxHash3_128;

use super::format::{
    ENTRY_BYTES, Entry, FOOT_BYTES, Foot, HEAD_BYTES, TokenWidth, head, table_checksum,
};
use super::index::ShardEntry;
use crate::error::{Error, Result};
use crate::positioned::read_exact_at;

/// An open shard whose table has been checked. Its ids are checked before the first of them is read.
#[derive(Debug)]
pub(crate) struct ShardReader {
    path: PathBuf,
    file: File,
    width: TokenWidth,
    foot: Foot,
    entries: Vec<Entry>,
    /// Whether the checksum of the ids was verified. Locked while it is computed, so that it is computed once.
    verified: Mutex<bool>,
}

impl ShardReader {
    /// Opens a shard and checks everything but its ids: marks, sizes and the table's checksum.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let bad =
            |detail: &str| Error::BadShard { path: path.to_path_buf(), detail: detail.to_owned() };
        let file = File::open(path).map_err(Error::io("open", path))?;
        let size = file.metadata().map_err(Error::io("look at", path))?.len();
        if size < (HEAD_BYTES + FOOT_BYTES) as u64 {
            return Err(bad("it is too short for a shard"));
        }
        let mut start = [0; HEAD_BYTES];
        let mut end = [0; FOOT_BYTES];
        read_exact_at(&file, &mut start, 0).map_err(Error::io("read", path))?;
        read_exact_at(&file, &mut end, size - FOOT_BYTES as u64)
            .map_err(Error::io("read", path))?;
        let width = [TokenWidth::Two, TokenWidth::Four]
            .into_iter()
            .find(|&width| head(width) == start)
            .ok_or_else(|| bad("it does not start like a shard of this version"))?;
        let foot = Foot::parse(&end).ok_or_else(|| {
            bad("it does not end like a shard: it was truncated, or something was appended")
        })?;
        let table_bytes = foot.documents.checked_mul(ENTRY_BYTES as u64);
        let token_bytes = foot.tokens.checked_mul(width.bytes() as u64);
        let expected = token_bytes.zip(table_bytes).and_then(|(tokens, table)| {
            tokens
                .checked_add(width.padding(foot.tokens) as u64)?
                .checked_add(table)?
                .checked_add((HEAD_BYTES + FOOT_BYTES) as u64)
        });
        let (Some(table_bytes), true) = (table_bytes, expected == Some(size)) else {
            return Err(bad("its size does not fit its counts"));
        };
        let mut table = vec![0; table_bytes as usize];
        read_exact_at(&file, &mut table, size - FOOT_BYTES as u64 - table_bytes)
            .map_err(Error::io("read", path))?;
        if table_checksum(width, &table, foot.tokens, foot.tokenizer) != foot.table_checksum {
            return Err(bad("the checksum of its table differs"));
        }
        let entries: Vec<Entry> = table.chunks_exact(ENTRY_BYTES).map(entry).collect();
        if !entries.is_sorted_by_key(|e| e.end)
            || entries.last().map_or(0, |e| e.end) != foot.tokens
        {
            return Err(bad("its documents do not follow each other"));
        }
        let verified = Mutex::new(false);
        Ok(Self { path: path.to_path_buf(), file, width, foot, entries, verified })
    }

    pub(crate) fn tokenizer(&self) -> u128 {
        self.foot.tokenizer
    }

    pub(crate) fn width(&self) -> TokenWidth {
        self.width
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry of this shard in the index.
    pub(crate) fn index_entry(&self, name: String) -> ShardEntry {
        let foot = &self.foot;
        ShardEntry::new(name, foot.documents, foot.tokens, foot.tokens_checksum)
    }

    /// Fills `out` with the shard's ids from `start` on. The first call reads the whole shard and compares its
    /// checksum: a model would otherwise be trained on changed ids.
    pub(crate) fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        self.verify()?;
        let width = self.width.bytes();
        let mut bytes = vec![0; out.len() * width];
        let offset = HEAD_BYTES as u64 + start * width as u64;
        self.read_at(&mut bytes, offset)?;
        self.width.decode(&bytes, out);
        Ok(())
    }

    /// Reads all ids and compares their checksum, unless that was done before.
    pub(crate) fn verify(&self) -> Result<()> {
        // After a panic it is still `false`, so the next reader verifies again.
        let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if !*verified {
            self.compare_checksum()?;
            *verified = true;
        }
        Ok(())
    }

    fn compare_checksum(&self) -> Result<()> {
        let mut hasher = XxHash3_128::new();
        let mut buffer = vec![0; 1 << 20];
        let mut offset = HEAD_BYTES as u64;
        let end = offset + self.foot.tokens * self.width.bytes() as u64;
        while offset < end {
            let n = (buffer.len() as u64).min(end - offset) as usize;
            self.read_at(&mut buffer[..n], offset)?;
            hasher.write(&buffer[..n]);
            offset += n as u64;
        }
        if hasher.finish_128() == self.foot.tokens_checksum {
            Ok(())
        } else {
            Err(Error::BadShard {
                path: self.path.clone(),
                detail: "the checksum of its tokens differs".into(),
            })
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        read_exact_at(&self.file, buffer, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Error::BadShard {
                path: self.path.clone(),
                detail: "it became shorter while it was open".into(),
            },
            _ => Error::io("read", &self.path)(error),
        })
    }
}

fn entry(bytes: &[u8]) -> Entry {
    let number = |at: usize| {
        let mut n = [0; 8];
        n.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(n)
    };
    Entry { end: number(0), text_hash: number(8) }
}

#[cfg(test)]
mod tests {
    use super::super::ShardWriter;
    use super::*;

    fn write(path: &Path, width: TokenWidth) -> ShardEntry {
        let mut writer = ShardWriter::create(path, width, 77).unwrap();
        writer.push(&[1, 2]).unwrap();
        writer.push(&[40_000]).unwrap();
        writer.end_document(5);
        writer.end_document(6);
        writer.push(&[9, 8]).unwrap();
        writer.end_document(7);
        assert_eq!(writer.tokens(), 5);
        writer.finish("x".into()).unwrap()
    }

    #[test]
    fn written_shards_read_back() {
        let folder = tempfile::tempdir().unwrap();
        for width in [TokenWidth::Two, TokenWidth::Four] {
            let path = folder.path().join("s");
            let entry = write(&path, width);
            let shard = ShardReader::open(&path).unwrap();
            assert_eq!(shard.index_entry("x".into()), entry);
            assert_eq!(shard.tokenizer(), 77);
            assert_eq!(shard.width(), width);
            let ends: Vec<_> = shard.entries().iter().map(|e| (e.end, e.text_hash)).collect();
            assert_eq!(ends, [(3, 5), (3, 6), (5, 7)]);
            let mut ids = [0; 3];
            shard.read(2, &mut ids).unwrap();
            assert_eq!(ids, [40_000, 9, 8]);
            shard.verify().unwrap();
        }
    }

    /// Without a call of `verify`, as in a training run.
    #[test]
    fn first_read_detects_a_changed_id() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for width in [TokenWidth::Two, TokenWidth::Four] {
            write(&path, width);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[HEAD_BYTES + 4 * width.bytes()] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            let shard = ShardReader::open(&path).unwrap();
            for _ in 0..2 {
                let error = shard.read(0, &mut [0]).unwrap_err();
                let want = format!(
                    "shard {} is damaged (the checksum of its tokens differs); run the same `fox prepare` again to rebuild it, or restore it from a copy",
                    path.display()
                );
                assert_eq!(error.to_string(), want);
            }
        }
    }

    #[test]
    fn detects_any_changed_byte_and_any_truncation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        write(&path, TokenWidth::Two);
        let whole = std::fs::read(&path).unwrap();
        let check = || ShardReader::open(&path).and_then(|shard| shard.verify());
        for at in 0..whole.len() {
            // Padding between ids and table is not checked.
            if (26..32).contains(&at) {
                continue;
            }
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            std::fs::write(&path, &changed).unwrap();
            assert!(matches!(check(), Err(Error::BadShard { .. })), "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(matches!(check(), Err(Error::BadShard { .. })), "cut {at}");
        }
        // A shard that grew is not called truncated alone.
        for more in [1, 16, 4096] {
            let mut grown = whole.clone();
            grown.resize(whole.len() + more, 7);
            std::fs::write(&path, &grown).unwrap();
            let error = check().unwrap_err().to_string();
            assert!(error.contains("something was appended"), "{more}: {error}");
        }
    }
}
