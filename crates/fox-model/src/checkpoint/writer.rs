//! Writing a checkpoint folder: config.json, the tensors in one file or in shards with an index.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use fox_tensor::ParamId;
use half::{bf16, f16};
use serde_json::{Map, Value, json};

use super::names::{FileTensor, file_tensors};
use super::staging::StagedFolder;
use super::{CONFIG, INDEX, SINGLE};
use crate::config::{ModelConfig, ModelType};
use crate::{Error, Result};

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
    fn bytes(self) -> usize {
        match self {
            FileDtype::F32 => 4,
            FileDtype::Bf16 | FileDtype::F16 => 2,
        }
    }

    /// The name in a safetensors header, and PyTorch's.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            FileDtype::F32 => ("F32", "float32"),
            FileDtype::Bf16 => ("BF16", "bfloat16"),
            FileDtype::F16 => ("F16", "float16"),
        }
    }
}

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// The format.
    pub model_type: ModelType,
    /// Element type of the tensors.
    pub dtype: FileDtype,
    /// Bytes of tensors per file; a larger tensor has a file of its own. `None` means one file.
    pub max_shard_bytes: Option<u64>,
}

impl WriteOptions {
    /// One f32 file in the format that suits the model; see [`ModelConfig::storage_type`].
    pub fn for_model(config: &ModelConfig) -> Self {
        let model_type = config.storage_type();
        WriteOptions { model_type, dtype: FileDtype::F32, max_shard_bytes: None }
    }
}

/// Writes a checkpoint folder. `source` gives the values of one parameter at a time.
///
/// Everything is written to a folder beside `dir`, synced and renamed: `dir` is complete or not
/// there. A `dir` that holds something already is refused.
pub fn write_checkpoint(
    dir: &Path,
    config: &ModelConfig,
    options: &WriteOptions,
    source: impl FnMut(ParamId) -> Result<Vec<f32>>,
) -> Result<()> {
    config.validate("model configuration")?;
    let mut json = config.to_json(options.model_type)?;
    let torch_name = options.dtype.names().1;
    // Old and new versions of the reference library disagree on the name.
    json["torch_dtype"] = json!(torch_name);
    json["dtype"] = json!(torch_name);
    let specs = config.param_specs();
    let layout = options.model_type.layout();
    let tensors: Vec<FileTensor> = specs
        .iter()
        .enumerate()
        .flat_map(|(i, spec)| file_tensors(ParamId(i), spec, layout))
        .collect();
    let shards = plan_shards(&tensors, options);
    let folder = StagedFolder::new(dir)?;
    write_file(&folder.path(CONFIG), |out| write_json(out, &json))?;
    let mut values = LastParam { source, held: None };
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        for tensor in *shard {
            weight_map.insert(tensor.name.clone(), json!(name));
        }
        let path = folder.path(&name);
        write_file(&path, |out| write_shard(out, &path, shard, options.dtype, &mut values))?;
    }
    if shards.len() > 1 {
        let total: usize = tensors.iter().map(|t| t.count() * options.dtype.bytes()).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_file(&folder.path(INDEX), |out| write_json(out, &index))?;
    }
    folder.publish()
}

/// Cuts the list of tensors where a file would become too large.
fn plan_shards<'a>(tensors: &'a [FileTensor], options: &WriteOptions) -> Vec<&'a [FileTensor]> {
    let limit = options.max_shard_bytes.unwrap_or(u64::MAX);
    let (mut shards, mut start, mut size) = (Vec::new(), 0, 0u64);
    for (i, tensor) in tensors.iter().enumerate() {
        let bytes = (tensor.count() * options.dtype.bytes()) as u64;
        if i > start && size + bytes > limit {
            shards.push(&tensors[start..i]);
            (start, size) = (i, 0);
        }
        size += bytes;
    }
    shards.push(&tensors[start..]);
    shards
}

/// Keeps the last parameter, because two file tensors in a row may be parts of it.
struct LastParam<S> {
    source: S,
    held: Option<(ParamId, Vec<f32>)>,
}

impl<S: FnMut(ParamId) -> Result<Vec<f32>>> LastParam<S> {
    fn part(&mut self, tensor: &FileTensor) -> Result<&[f32]> {
        let values = match self.held.take() {
            Some((id, values)) if id == tensor.param => values,
            _ => (self.source)(tensor.param)?,
        };
        let (_, values) = self.held.insert((tensor.param, values));
        values.get(tensor.start..tensor.start + tensor.count()).ok_or_else(|| {
            Error::Argument(format!("the source of {} gave too few values", tensor.name))
        })
    }
}

fn write_shard<S: FnMut(ParamId) -> Result<Vec<f32>>>(
    out: &mut impl Write,
    path: &Path,
    tensors: &[FileTensor],
    dtype: FileDtype,
    values: &mut LastParam<S>,
) -> Result<()> {
    let failed = |e| Error::io("write", path)(e);
    let header = header(tensors, dtype);
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(header.as_bytes()).map_err(failed)?;
    for tensor in tensors {
        let values = values.part(tensor)?;
        for part in values.chunks(1 << 14) {
            let bytes = encode(part, dtype).ok_or_else(|| {
                Error::Argument(format!(
                    "{} holds values beyond the range of f16; use bf16 or f32",
                    tensor.name
                ))
            })?;
            out.write_all(&bytes).map_err(failed)?;
        }
    }
    Ok(())
}

/// The JSON header, padded with spaces so that the data is aligned.
fn header(tensors: &[FileTensor], dtype: FileDtype) -> String {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.count() * dtype.bytes();
        let entry = json!({
            "dtype": dtype.names().0, "shape": tensor.dims, "data_offsets": [start, end],
        });
        map.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    text
}

/// Little-endian bytes; `None` when a finite value does not fit an f16.
fn encode(values: &[f32], dtype: FileDtype) -> Option<Vec<u8>> {
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

fn write_json(out: &mut impl Write, value: &Value) -> Result<()> {
    // Python's bare literal: the references read a quoted one as text.
    let text = format!("{value:#}\n").replace("\"Infinity\"", "Infinity");
    out.write_all(text.as_bytes()).map_err(Error::io("write", Path::new(CONFIG)))
}

/// Writes a file in full and makes it durable.
fn write_file(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let file = File::create_new(path).map_err(Error::io("create", path))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    fill(&mut out)?;
    let file = out.into_inner().map_err(|e| Error::io("write", path)(e.into_error()))?;
    file.sync_all().map_err(Error::io("sync", path))
}
