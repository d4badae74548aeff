//! Reading one shard.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_128;

use super::format::{
    ENTRY_BYTES, Entry, FOOT_BYTES, Foot, HEAD_BYTES, TokenWidth, head, table_checksum,
};
use super::index::ShardEntry;
use crate::error::{Error, Result};
use crate::positioned::read_exact_at;

/// An open shard whose table has been checked.
#[derive(Debug)]
pub(crate) struct ShardReader {
    path: PathBuf,
    file: File,
    width: TokenWidth,
    foot: Foot,
    entries: Vec<Entry>,
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
        let foot = Foot::parse(&end).ok_or_else(|| bad("it is cut short"))?;
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
        Ok(Self { path: path.to_path_buf(), file, width, foot, entries })
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

    /// What the index says about this shard.
    pub(crate) fn index_entry(&self, name: String) -> ShardEntry {
        let foot = &self.foot;
        ShardEntry::new(name, foot.documents, foot.tokens, foot.tokens_checksum)
    }

    /// Fills `out` with the shard's ids from `start` on.
    pub(crate) fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let width = self.width.bytes();
        let mut bytes = vec![0; out.len() * width];
        let offset = HEAD_BYTES as u64 + start * width as u64;
        read_exact_at(&self.file, &mut bytes, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Error::BadShard {
                path: self.path.clone(),
                detail: "it became shorter while it was open".into(),
            },
            _ => Error::io("read", &self.path)(error),
        })?;
        self.width.decode(&bytes, out);
        Ok(())
    }

    /// Reads all ids and compares their checksum.
    pub(crate) fn verify(&self) -> Result<()> {
        let mut hasher = XxHash3_128::new();
        let mut buffer = vec![0; 1 << 20];
        let mut offset = HEAD_BYTES as u64;
        let end = offset + self.foot.tokens * self.width.bytes() as u64;
        while offset < end {
            let n = buffer.len().min((end - offset) as usize);
            read_exact_at(&self.file, &mut buffer[..n], offset)
                .map_err(Error::io("read", &self.path))?;
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
    fn what_is_written_is_read() {
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

    #[test]
    fn any_changed_byte_and_any_cut_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        write(&path, TokenWidth::Two);
        let whole = std::fs::read(&path).unwrap();
        let check = || ShardReader::open(&path).and_then(|shard| shard.verify());
        for at in 0..whole.len() {
            // Filler between ids and table means nothing.
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
    }
}
