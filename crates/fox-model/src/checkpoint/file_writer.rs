//! One safetensors file, written tensor by tensor.

use std::path::Path;
use std::vec::IntoIter;

use fox_base::durable::NewFile;
use half::{bf16, f16};
use serde_json::{Map, Value, json};

use super::int8;
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
    /// Matrices in 8 bits with an f32 scale for every [`fox_tensor::INT8_BLOCK`] columns of a row, everything else in f32.
    Int8,
}

impl FileDtype {
    /// The tensors of a file that store one tensor: name, dtype in the header and shape of each.
    fn entries(self, name: &str, dims: &[usize]) -> Vec<(String, &'static str, Vec<usize>)> {
        let plain = |dtype| vec![(name.to_string(), dtype, dims.to_vec())];
        match (self, dims) {
            (FileDtype::Int8, [_, _]) => vec![
                (name.to_string(), "I8", dims.to_vec()),
                (int8::scale_name(name), "F32", int8::scale_dims(dims)),
            ],
            (FileDtype::F32 | FileDtype::Int8, _) => plain("F32"),
            (FileDtype::Bf16, _) => plain("BF16"),
            (FileDtype::F16, _) => plain("F16"),
        }
    }

    /// Bytes that a tensor of this shape takes in a file.
    pub(super) fn tensor_bytes(self, dims: &[usize]) -> usize {
        let bytes = |(_, dtype, dims): (String, &str, Vec<usize>)| {
            dims.iter().product::<usize>() * element_bytes(dtype)
        };
        self.entries("", dims).into_iter().map(bytes).sum()
    }

    /// PyTorch's name.
    pub(super) fn torch_name(self) -> &'static str {
        match self {
            FileDtype::F32 | FileDtype::Int8 => "float32",
            FileDtype::Bf16 => "bfloat16",
            FileDtype::F16 => "float16",
        }
    }
}

fn element_bytes(header_dtype: &str) -> usize {
    match header_dtype {
        "I8" => 1,
        "F32" => 4,
        _ => 2,
    }
}

/// A safetensors file that has its name only when it is whole. The tensors are declared first, then their
/// values are written in the same order, so that one of them is in memory at a time.
#[derive(Debug)]
pub struct SafetensorsWriter {
    file: NewFile,
    dtype: FileDtype,
    /// Name and shape of the tensors that are not written yet.
    missing: IntoIter<(String, Vec<usize>)>,
}

impl SafetensorsWriter {
    /// Starts a file that holds these tensors: name and extents of each.
    pub fn create(path: &Path, dtype: FileDtype, tensors: &[(&str, &[usize])]) -> Result<Self> {
        let mut file = NewFile::create(path)?;
        let header = header(tensors, dtype);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let missing: Vec<(String, Vec<usize>)> =
            tensors.iter().map(|(name, dims)| (name.to_string(), dims.to_vec())).collect();
        Ok(SafetensorsWriter { file, dtype, missing: missing.into_iter() })
    }

    /// Writes the values of the next tensor, as many as were declared.
    pub fn write(&mut self, values: &[f32]) -> Result<()> {
        let Some((name, dims)) = self.missing.next() else {
            return Err(self.refuse("all its tensors are written already".into()));
        };
        let count: usize = dims.iter().product();
        if values.len() != count {
            return Err(self.refuse(format!("{name} needs {count} values, not {}", values.len())));
        }
        if let (FileDtype::Int8, [_, cols]) = (self.dtype, dims.as_slice()) {
            if !values.iter().all(|x| x.is_finite()) {
                return Err(self.refuse(format!("{name} has values that are not finite")));
            }
            let (quantized, scales) = int8::quantize(values, *cols);
            self.file.write_all(bytemuck::cast_slice(&quantized))?;
            return Ok(self.file.write_all(&scales)?);
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
    for (name, stored, dims) in tensors.iter().flat_map(|(name, dims)| dtype.entries(name, dims)) {
        let end = start + dims.iter().product::<usize>() * element_bytes(stored);
        map.insert(name, json!({ "dtype": stored, "shape": dims, "data_offsets": [start, end] }));
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
    let mut bytes = Vec::with_capacity(values.len() * 4);
    for &value in values {
        match dtype {
            FileDtype::F32 | FileDtype::Int8 => bytes.extend(value.to_le_bytes()),
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
            assert_eq!((bytes.len() - dtype.tensor_bytes(&[7])) % 8, 0);
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
