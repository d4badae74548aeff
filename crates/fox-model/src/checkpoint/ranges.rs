//! One safetensors file that several processes write together.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use fox_base::FileError;

use super::file_writer::{FileDtype, encode, header};
use crate::{Error, Result};

/// A safetensors file in f32 whose tensors may be written in any order, each by any process that has it open. Its bytes
/// are those of [`SafetensorsWriter`](super::SafetensorsWriter).
///
/// The file has its name from the beginning: it belongs into a folder that gets its name when all have
/// [finished](SafetensorsRanges::finish).
#[derive(Debug)]
pub struct SafetensorsRanges {
    file: File,
    path: PathBuf,
    /// First byte and number of elements of every tensor.
    places: BTreeMap<String, (u64, usize)>,
}

impl SafetensorsRanges {
    /// Starts a file that holds these tensors, name and extents of each, as zeros.
    pub fn create(path: &Path, tensors: &[(&str, &[usize])]) -> Result<Self> {
        let mut file = File::create(path).map_err(FileError::at("create", path))?;
        let header = header(tensors, FileDtype::F32);
        let values: usize = tensors.iter().map(|(_, dims)| dims.iter().product::<usize>()).sum();
        let length = 8 + header.len() + values * size_of::<f32>();
        let write = |file: &mut File| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            file.set_len(length as u64)
        };
        write(&mut file).map_err(FileError::at("write", path))?;
        Ok(Self::with(file, path, header.len(), tensors))
    }

    /// The same file in another process, which knows the same tensors.
    pub fn open(path: &Path, tensors: &[(&str, &[usize])]) -> Result<Self> {
        let file =
            OpenOptions::new().write(true).open(path).map_err(FileError::at("open", path))?;
        Ok(Self::with(file, path, header(tensors, FileDtype::F32).len(), tensors))
    }

    fn with(file: File, path: &Path, header: usize, tensors: &[(&str, &[usize])]) -> Self {
        let mut start = (8 + header) as u64;
        let place = |(name, dims): &(&str, &[usize])| {
            let (at, count) = (start, dims.iter().product::<usize>());
            start += (count * size_of::<f32>()) as u64;
            (name.to_string(), (at, count))
        };
        let places = tensors.iter().map(place).collect();
        SafetensorsRanges { file, path: path.to_path_buf(), places }
    }

    /// Writes the values of a tensor.
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let refuse = |detail: String| {
            Error::Argument(format!("cannot write {}: {detail}", self.path.display()))
        };
        let Some(&(start, count)) = self.places.get(name) else {
            return Err(refuse(format!("{name} was not declared")));
        };
        if values.len() != count {
            return Err(refuse(format!("{name} needs {count} values, not {}", values.len())));
        }
        let bytes = encode(values, FileDtype::F32).unwrap_or_default();
        let place = self.file.seek(SeekFrom::Start(start));
        let written = place.and_then(|_| self.file.write_all(&bytes));
        Ok(written.map_err(FileError::at("write", &self.path))?)
    }

    /// Makes the written ranges durable.
    pub fn finish(self) -> Result<()> {
        Ok(self.file.sync_all().map_err(FileError::at("sync", &self.path))?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::SafetensorsWriter;
    use super::*;

    #[test]
    fn range_writers_produce_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let tensors: [(&str, &[usize]); 3] = [("b", &[2, 2]), ("a", &[3]), ("none", &[0])];
        let values = [vec![1.0, -2.0, 0.5, 4.0], vec![7.0, -0.0, 9.0], vec![]];
        let (whole, shared) = (dir.path().join("whole"), dir.path().join("shared"));
        let mut writer = SafetensorsWriter::create(&whole, FileDtype::F32, &tensors).unwrap();
        values.iter().for_each(|values| writer.write(values).unwrap());
        writer.finish().unwrap();
        let mut first = SafetensorsRanges::create(&shared, &tensors).unwrap();
        let mut second = SafetensorsRanges::open(&shared, &tensors).unwrap();
        second.write("a", &values[1]).unwrap();
        first.write("b", &values[0]).unwrap();
        let error = first.write("a", &[1.0]).unwrap_err().to_string();
        assert!(error.ends_with("a needs 3 values, not 1"), "{error}");
        let error = first.write("c", &[1.0]).unwrap_err().to_string();
        assert!(error.ends_with("c was not declared"), "{error}");
        first.finish().unwrap();
        second.finish().unwrap();
        assert_eq!(std::fs::read(&shared).unwrap(), std::fs::read(&whole).unwrap());
        let missing = SafetensorsRanges::open(&dir.path().join("none"), &tensors).unwrap_err();
        assert!(missing.to_string().contains("none"), "{missing}");
    }
}
