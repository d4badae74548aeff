//! One safetensors file, open for reading tensor by tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;

use super::header::{self, Entry, MAX_HEADER_BYTES};
use super::int8;
use crate::{Error, Result};

/// Half-precision values are widened in chunks of this many.
const CHUNK: usize = 1 << 16;

/// A safetensors file whose header has been read and checked.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    entries: BTreeMap<String, Entry>,
}

impl SafetensorsFile {
    /// Opens a file and checks its header against its size.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read", path))?;
        let damaged = |detail: String| Error::Safetensors { file: path.to_path_buf(), detail };
        if !metadata.is_file() {
            return Err(damaged("it is not a regular file".into()));
        }
        let size = metadata.len();
        let mut prefix = [0u8; 8];
        if size < 8 {
            return Err(damaged(format!("{size} bytes are too few for a header")));
        }
        file.read_exact(&mut prefix).map_err(Error::io("read", path))?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > MAX_HEADER_BYTES || header_bytes > size - 8 {
            return Err(damaged(format!(
                "it announces a header of {header_bytes} bytes in a file of {size}"
            )));
        }
        // Bounded by the size of the file and by the format's limit, so this cannot be huge.
        let mut json = vec![0u8; header_bytes as usize];
        file.read_exact(&mut json).map_err(Error::io("read", path))?;
        let data_start = 8 + header_bytes;
        let entries = header::parse(&json, size - data_start).map_err(damaged)?;
        Ok(SafetensorsFile { path: path.to_path_buf(), file, data_start, entries })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the tensors, sorted; the scales of 8-bit matrices belong to their matrix and are left out.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let is_scale = |name: &str| int8::matrix_name(name).is_some_and(|of| self.is_int8(of));
        self.entries.keys().map(String::as_str).filter(move |name| !is_scale(name))
    }

    /// Whether a tensor is a matrix in 8 bits whose scales are in this file, too.
    pub(super) fn is_int8(&self, name: &str) -> bool {
        self.entries.get(name).is_some_and(|entry| {
            let scales = self.entries.get(&int8::scale_name(name));
            entry.dtype == Dtype::I8
                && entry.dims.len() == 2
                && scales.is_some_and(|scales| {
                    scales.dtype == Dtype::F32 && scales.dims == int8::scale_dims(&entry.dims)
                })
        })
    }

    /// Extents of a tensor, if it is there.
    pub fn dims(&self, name: &str) -> Option<&[usize]> {
        Some(&self.entries.get(name)?.dims)
    }

    /// Element type of a tensor, if it is there.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        Some(self.entries.get(name)?.dtype)
    }

    /// The values of an f32, bf16 or f16 tensor.
    pub fn read_f32(&mut self, name: &str) -> Result<Vec<f32>> {
        let len = self.count(name)?;
        let mut values = vec![0.0; len];
        self.read_f32_into(name, &mut values)?;
        Ok(values)
    }

    /// The values of an f32, bf16 or f16 tensor or of an 8-bit matrix, to `out` of the same number of elements.
    pub(crate) fn read_f32_into(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let (dtype, len) = (self.entry(name)?.dtype, self.count(name)?);
        if len != out.len() {
            return Err(Error::Argument(format!("{name} has {len} values, not {}", out.len())));
        }
        if self.is_int8(name) {
            let scales = self.read_f32(&int8::scale_name(name))?;
            let cols = self.entry(name)?.dims[1];
            let mut quantized = vec![0i8; len];
            self.seek(name)?;
            self.read_bytes(bytemuck::cast_slice_mut(&mut quantized))?;
            int8::dequantize(&quantized, &scales, cols, out);
            return Ok(());
        }
        self.seek(name)?;
        match dtype {
            Dtype::F32 => {
                self.read_bytes(bytemuck::cast_slice_mut(out))?;
                for value in out {
                    *value = f32::from_bits(u32::from_le(value.to_bits()));
                }
                Ok(())
            }
            Dtype::BF16 => {
                self.read_halves(out, |bits| bf16::from_bits(u16::from_le(bits)).to_f32())
            }
            Dtype::F16 => self.read_halves(out, |bits| f16::from_bits(u16::from_le(bits)).to_f32()),
            other => Err(self.wrong_type(name, other, "F32, BF16 or F16")),
        }
    }

    /// The values of an i32 tensor.
    pub fn read_i32(&mut self, name: &str) -> Result<Vec<i32>> {
        match self.entry(name)?.dtype {
            Dtype::I32 => {}
            other => return Err(self.wrong_type(name, other, "I32")),
        }
        let mut values = vec![0i32; self.count(name)?];
        self.seek(name)?;
        self.read_bytes(bytemuck::cast_slice_mut(&mut values))?;
        for value in &mut values {
            *value = i32::from_le(*value);
        }
        Ok(values)
    }

    fn read_halves(&mut self, out: &mut [f32], widen: impl Fn(u16) -> f32) -> Result<()> {
        let mut bits = vec![0u16; CHUNK.min(out.len())];
        for part in out.chunks_mut(CHUNK) {
            let bits = &mut bits[..part.len()];
            self.read_bytes(bytemuck::cast_slice_mut(bits))?;
            for (value, &bits) in part.iter_mut().zip(&*bits) {
                *value = widen(bits);
            }
        }
        Ok(())
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| Error::Safetensors {
            file: self.path.clone(),
            detail: format!("it has no tensor `{name}`"),
        })
    }

    fn count(&self, name: &str) -> Result<usize> {
        // The header check proved that the product fits and that the file holds it.
        Ok(self.entry(name)?.dims.iter().product())
    }

    fn seek(&mut self, name: &str) -> Result<()> {
        let position = SeekFrom::Start(self.data_start + self.entry(name)?.start);
        self.file.seek(position).map_err(Error::io("read", &self.path))?;
        Ok(())
    }

    fn read_bytes(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact(bytes).map_err(Error::io("read", &self.path))
    }

    fn wrong_type(&self, name: &str, found: Dtype, wanted: &str) -> Error {
        Error::Safetensors {
            file: self.path.clone(),
            detail: format!("`{name}` has type {found:?}, expected {wanted}"),
        }
    }
}
