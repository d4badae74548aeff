//! Writing a checkpoint folder: config.json, the tensors in one file or in shards with an index.

use std::path::Path;

use fox_base::durable::{self, NewFolder};
use fox_tensor::{INT8_BLOCK, ParamId};
use serde_json::{Map, Value, json};

use super::file_writer::{FileDtype, SafetensorsWriter};
use super::names::FileTensor;
use super::{CONFIG, INDEX, SINGLE};
use crate::config::ModelConfig;
use crate::mixers::ModelType;
use crate::{Error, Result};

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// The format.
    pub model_type: ModelType,
    /// Element type of the tensors.
    pub dtype: FileDtype,
    /// Bytes of tensors per file; a larger tensor is alone in its file. `None` means one file.
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
/// there. A `dir` that is not empty is refused.
pub fn write_checkpoint(
    dir: &Path,
    config: &ModelConfig,
    options: &WriteOptions,
    source: impl FnMut(ParamId) -> Result<Vec<f32>>,
) -> Result<()> {
    config.validate("model configuration")?;
    let mut json = config.to_json(options.model_type)?;
    let torch_name = options.dtype.torch_name();
    // Old and new versions of the reference library disagree on the name.
    json["torch_dtype"] = json!(torch_name);
    json["dtype"] = json!(torch_name);
    if options.dtype == FileDtype::Int8 {
        // Software that does not know the format must refuse the folder instead of reading integers as weights.
        json["quantization_config"] =
            json!({ "quant_method": "fox_int8", "block_size": INT8_BLOCK });
    }
    let specs = config.param_specs();
    let tensors: Vec<FileTensor> = specs
        .iter()
        .enumerate()
        .flat_map(|(i, spec)| options.model_type.file_tensors(ParamId(i), spec))
        .collect();
    let shards = plan_shards(&tensors, options);
    if !durable::is_vacant(dir)? {
        return Err(Error::Occupied { path: dir.to_path_buf() });
    }
    let folder = NewFolder::create(dir)?;
    write_json(&folder.path().join(CONFIG), &json)?;
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
        write_shard(&folder.path().join(name), shard, options.dtype, &mut values)?;
    }
    if shards.len() > 1 {
        let total: usize = tensors.iter().map(|t| options.dtype.tensor_bytes(&t.dims)).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_json(&folder.path().join(INDEX), &index)?;
    }
    Ok(folder.publish()?)
}

/// Cuts the list of tensors where a file would become too large.
fn plan_shards<'a>(tensors: &'a [FileTensor], options: &WriteOptions) -> Vec<&'a [FileTensor]> {
    let limit = options.max_shard_bytes.unwrap_or(u64::MAX);
    let (mut shards, mut start, mut size) = (Vec::new(), 0, 0u64);
    for (i, tensor) in tensors.iter().enumerate() {
        let bytes = options.dtype.tensor_bytes(&tensor.dims) as u64;
        if i > start && size + bytes > limit {
            shards.push(&tensors[start..i]);
            (start, size) = (i, 0);
        }
        size += bytes;
    }
    shards.push(&tensors[start..]);
    shards
}

/// Caches the last parameter, because consecutive file tensors may be slices of it.
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
    path: &Path,
    tensors: &[FileTensor],
    dtype: FileDtype,
    values: &mut LastParam<S>,
) -> Result<()> {
    let list: Vec<(&str, &[usize])> = tensors.iter().map(|t| (&*t.name, &*t.dims)).collect();
    let mut file = SafetensorsWriter::create(path, dtype, &list)?;
    for tensor in tensors {
        file.write(values.part(tensor)?)?;
    }
    file.finish()
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    // Python's bare literal: the references read a quoted one as text.
    let text = format!("{value:#}\n").replace("\"Infinity\"", "Infinity");
    Ok(durable::write(path, text.as_bytes())?)
}
