//! One safetensors file, written tensor by tensor.

use std::path::Path;
use std::vec::IntoIter;

use fox_base::durable::NewFile;
use half::{bf16, f16};
use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// Values that are converted at a time.
const CHUNK: usize = 1 << 14;

/// Element type of the tensors in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileDtype {
    /// 32-bit float: exact.
    #[default]
    F32,
    /// bfloat16, rounded to nearest even.
    Bf16,
    /// 16-bit float, rounded to nearest even; values beyond its range are an error.
    F16,
}

impl FileDtype {
    /// Bytes of an element.
    pub(super) fn bytes(self) -> usize {
        match self {
            FileDtype::F32 => 4,
            FileDtype::Bf16 | FileDtype::F16 => 2,
        }
    }

    /// PyTorch's name.
    pub(super) fn torch_name(self) -> &'static str {
        match self {
            FileDtype::F32 => "float32",
            FileDtype::Bf16 => "bfloat16",
            FileDtype::F16 => "float16",
        }
    }

    /// The name in a safetensors header.
    fn header_name(self) -> &'static str {
        match self {
            FileDtype::F32 => "F32",
            FileDtype::Bf16 => "BF16",
            FileDtype::F16 => "F16",
        }
    }
}

/// A safetensors file that has its name only when it is whole. The tensors are declared first, then their
/// values are written in the same order, so that one of them is in memory at a time.
#[derive(Debug)]
pub struct SafetensorsWriter {
    file: NewFile,
    dtype: FileDtype,
    /// Name and number of elements of the tensors that are still to come.
    missing: IntoIter<(String, usize)>,
}

impl SafetensorsWriter {
    /// Starts a file that holds these tensors: name and extents of each.
    pub fn create(path: &Path, dtype: FileDtype, tensors: &[(&str, &[usize])]) -> Result<Self> {
        let mut file = NewFile::create(path)?;
        let header = header(tensors, dtype);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let count = |(name, dims): &(&str, &[usize])| (name.to_string(), dims.iter().product());
        let missing: Vec<(String, usize)> = tensors.iter().map(count).collect();
        Ok(SafetensorsWriter { file, dtype, missing: missing.into_iter() })
    }

    /// Writes the values of the next tensor, as many as were declared.
    pub fn write(&mut self, values: &[f32]) -> Result<()> {
        let Some((name, count)) = self.missing.next() else {
            return Err(self.refuse("all its tensors are written already".into()));
        };
        if values.len() != count {
            return Err(self.refuse(format!("{name} needs {count} values, not {}", values.len())));
        }
        for part in values.chunks(CHUNK) {
            let bytes = encode(part, self.dtype).ok_or_else(|| {
                let detail = "holds values beyond the range of f16; use bf16 or f32";
                Error::Argument(format!("{name} {detail}"))
            })?;
            self.file.write_all(&bytes)?;
        }
        Ok(())
    }

    /// Makes the file durable under its name. Every tensor must have been written.
    pub fn finish(mut self) -> Result<()> {
        if let Some((name, _)) = self.missing.next() {
            return Err(self.refuse(format!("{name} was not written")));
        }
        Ok(self.file.finish()?)
    }

    fn refuse(&self, detail: String) -> Error {
        Error::Argument(format!("cannot write {}: {detail}", self.file.path().display()))
    }
}

/// The JSON header, padded with spaces so that the data is aligned.
pub(super) fn header(tensors: &[(&str, &[usize])], dtype: FileDtype) -> String {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut start = 0;
    for (name, dims) in tensors {
        let end = start + dims.iter().product::<usize>() * dtype.bytes();
        let entry = json!({
            "dtype": dtype.header_name(), "shape": dims, "data_offsets": [start, end],
        });
        map.insert(name.to_string(), entry);
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    text
}

/// Little-endian bytes; `None` when a finite value does not fit an f16.
pub(super) fn encode(values: &[f32], dtype: FileDtype) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.bytes());
    for &value in values {
        match dtype {
            FileDtype::F32 => bytes.extend(value.to_le_bytes()),
            FileDtype::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            FileDtype::F16 => {
                let half = f16::from_f32(value);
                if half.is_infinite() && value.is_finite() {
                    return None;
                }
                bytes.extend(half.to_le_bytes());
            }
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::SafetensorsFile;
    use super::*;

    const TENSORS: [(&str, &[usize]); 3] = [("b", &[2, 3]), ("a", &[]), ("none", &[0, 4])];
    const B: [f32; 6] = [0.5, -1.0, 2.0, 0.25, -0.0, 4096.0];

    #[test]
    fn written_tensors_read_back() {
        let dir = tempfile::tempdir().unwrap();
        for dtype in [FileDtype::F32, FileDtype::Bf16, FileDtype::F16] {
            let path = dir.path().join("t.safetensors");
            let mut writer = SafetensorsWriter::create(&path, dtype, &TENSORS).unwrap();
            for values in [&B[..], &[7.0], &[]] {
                writer.write(values).unwrap();
            }
            assert!(writer.write(&[]).unwrap_err().to_string().contains("already"));
            assert!(!path.exists() || dtype != FileDtype::F32, "visible before it is whole");
            writer.finish().unwrap();
            let mut file = SafetensorsFile::open(&path).unwrap();
            assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b", "none"]);
            assert_eq!(file.dims("b"), Some(&[2, 3][..]));
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&file.read_f32("b").unwrap()), bits(&B), "{dtype:?}");
            assert_eq!(file.read_f32("a").unwrap(), [7.0]);
            assert!(file.read_f32("none").unwrap().is_empty());
            // The header's length and the header together end on a multiple of 8.
            let bytes = fs::read(&path).unwrap();
            assert_eq!((bytes.len() - 7 * dtype.bytes()) % 8, 0);
        }
    }

    #[test]
    fn rejects_wrong_tensor_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        let start = || SafetensorsWriter::create(&path, FileDtype::F32, &TENSORS).unwrap();
        let error = start().write(&B[..5]).unwrap_err().to_string();
        assert!(error.contains("b needs 6 values, not 5"), "{error}");
        let mut writer = start();
        writer.write(&B).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("a was not written"), "{error}");
        let mut writer = SafetensorsWriter::create(&path, FileDtype::F16, &[("x", &[1])]).unwrap();
        let error = writer.write(&[1e6]).unwrap_err().to_string();
        assert_eq!(error, "x holds values beyond the range of f16; use bf16 or f32");
        drop(writer);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
