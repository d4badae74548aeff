//! `.zarray`: what an array is like.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// How a token id is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// One byte.
    U8,
    /// Two bytes, little endian.
    U16,
    /// Four bytes, little endian (signed arrays too, whose ids must not be negative).
    U32,
}

impl TokenType {
    /// Bytes of one id.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Reads ids from their bytes.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [u32]) {
        match self {
            Self::U8 => {
                for (id, &b) in out.iter_mut().zip(bytes) {
                    *id = u32::from(b);
                }
            }
            Self::U16 => {
                for (id, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *id = u32::from(u16::from_le_bytes([b[0], b[1]]));
                }
            }
            Self::U32 => {
                for (id, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *id = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
        }
    }
}

/// The parts of `.zarray` that matter here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZarrMetadata {
    /// Documents, and tokens in each.
    pub shape: [u64; 2],
    /// Rows and columns of a chunk.
    pub chunks: [u64; 2],
    /// How ids are stored.
    pub token_type: TokenType,
    /// Whether chunks are Blosc frames; otherwise they are plain bytes.
    pub blosc: bool,
    /// What stands between the two numbers of a chunk's name.
    pub separator: char,
}

#[derive(Deserialize)]
struct Raw {
    zarr_format: u32,
    shape: Vec<u64>,
    chunks: Vec<u64>,
    dtype: Value,
    order: String,
    compressor: Value,
    #[serde(default)]
    filters: Value,
    dimension_separator: Option<char>,
}

impl ZarrMetadata {
    /// Reads `.zarray` of an array.
    ///
    /// # Errors
    /// A missing file, or an array of a kind that holds no tokens in the LongCrawl64 layout.
    pub fn read(array: &Path) -> Result<Self> {
        let path = array.join(".zarray");
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        Self::parse(&bytes).map_err(|detail| Error::Zarr { path, detail })
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let raw: Raw = serde_json::from_slice(bytes)
            .map_err(|error| format!("the metadata are not those of Zarr version 2 ({error})"))?;
        if raw.zarr_format != 2 {
            return Err(format!("zarr_format is {}, expected 2", raw.zarr_format));
        }
        if raw.order != "C" {
            return Err(format!("order is \"{}\", expected \"C\"", raw.order));
        }
        if !(raw.filters.is_null() || raw.filters.as_array().is_some_and(Vec::is_empty)) {
            return Err("it has filters, expected none".into());
        }
        let two = |values: &[u64], what: &str| match *values {
            [a, b] if b > 0 => Ok([a, b]),
            _ => Err(format!("{what} is {values:?}, expected two positive numbers")),
        };
        let shape = two(&raw.shape, "shape")?;
        let chunks = two(&raw.chunks, "chunks")?;
        let token_type = match raw.dtype.as_str() {
            Some("|u1") => TokenType::U8,
            Some("<u2") => TokenType::U16,
            Some("<u4" | "<i4") => TokenType::U32,
            _ => {
                return Err(format!(
                    "dtype is {}, expected \"<u2\", \"<u4\", \"<i4\" or \"|u1\"",
                    raw.dtype
                ));
            }
        };
        let bytes =
            chunks[0].checked_mul(chunks[1]).and_then(|n| n.checked_mul(token_type.bytes() as u64));
        if chunks[0] == 0 || bytes.is_none_or(|n| n > i32::MAX as u64) {
            return Err(format!("chunks of {chunks:?} are not between 1 byte and 2 GiB"));
        }
        let blosc = match raw.compressor["id"].as_str() {
            None if raw.compressor.is_null() => false,
            Some("blosc") => true,
            _ => {
                return Err(format!(
                    "the compressor is {}, expected Blosc or none",
                    raw.compressor
                ));
            }
        };
        Ok(Self {
            shape,
            chunks,
            token_type,
            blosc,
            separator: raw.dimension_separator.unwrap_or('.'),
        })
    }

    /// Bytes of a decoded chunk.
    pub(super) fn chunk_bytes(&self) -> usize {
        self.chunks[0] as usize * self.chunks[1] as usize * self.token_type.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn longcrawl64() -> Value {
        json!({
            "chunks": [2048, 2048],
            "compressor": {"blocksize": 0, "clevel": 5, "cname": "lz4", "id": "blosc", "shuffle": 1},
            "dtype": "<u2", "fill_value": 0, "filters": null, "order": "C",
            "shape": [6609334, 65536], "zarr_format": 2
        })
    }

    #[test]
    fn reads_longcrawl64_metadata() {
        let metadata = ZarrMetadata::parse(longcrawl64().to_string().as_bytes()).unwrap();
        assert_eq!(metadata.shape, [6_609_334, 65_536]);
        assert_eq!(metadata.chunks, [2048, 2048]);
        assert_eq!(metadata.token_type, TokenType::U16);
        assert!(metadata.blosc);
        assert_eq!(metadata.separator, '.');
        assert_eq!(metadata.chunk_bytes(), 8 << 20);
    }

    #[test]
    fn reads_every_token_type() {
        let ids = [("|u1", TokenType::U8), ("<u2", TokenType::U16)];
        for (name, kind) in [&ids[..], &[("<u4", TokenType::U32), ("<i4", TokenType::U32)]].concat()
        {
            let mut json = longcrawl64();
            json["dtype"] = json!(name);
            let metadata = ZarrMetadata::parse(json.to_string().as_bytes()).unwrap();
            assert_eq!(metadata.token_type, kind, "{name}");
        }
    }

    #[test]
    fn rejects_other_layouts() {
        for (key, value, word) in [
            ("zarr_format", json!(3), "expected 2"),
            ("order", json!("F"), "expected \"C\""),
            ("dtype", json!(">u2"), "expected \"<u2\""),
            ("shape", json!([5]), "two positive numbers"),
            ("chunks", json!([0, 4]), "chunks of"),
            ("chunks", json!([1_u64 << 40, 1_u64 << 40]), "chunks of"),
            ("compressor", json!({"id": "zstd"}), "expected Blosc"),
            ("filters", json!([{"id": "delta"}]), "filters"),
        ] {
            let mut changed = longcrawl64();
            changed[key] = value;
            let error = ZarrMetadata::parse(changed.to_string().as_bytes()).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        assert!(ZarrMetadata::parse(b"{").unwrap_err().contains("Zarr version 2"));
    }
}
