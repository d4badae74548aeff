//! Reads a checkpoint folder: its tensors are compared with those of the configuration,
//! all at once, before any value is read.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use fox_tensor::ParamId;
use safetensors::Dtype;
use serde::Deserialize;

use super::names::FileTensor;
use super::{CONFIG, INDEX, SINGLE, SafetensorsFile};
use crate::config::ModelConfig;
use crate::mixers::ModelType;
use crate::{Error, ParamSpec, Result};

/// An index names every tensor; this is room for a million of them.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// A tensor that does not match the configuration.
// The messages name the fields.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorMismatch {
    /// It is missing.
    Missing { name: String, expected: Vec<usize> },
    /// No parameter uses it.
    Surplus { name: String, found: Vec<usize> },
    /// It has another shape.
    Misshapen { name: String, expected: Vec<usize>, found: Vec<usize> },
    /// Its elements are not f32, bf16 or f16.
    WrongType { name: String, found: String },
    /// Two shards have it.
    Twice { name: String },
    /// The index promises it in a shard that does not have it.
    NotInShard { name: String, shard: String },
}

impl fmt::Display for TensorMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorMismatch::Missing { name, expected } => {
                write!(f, "missing: {name}, expected shape {expected:?}")
            }
            TensorMismatch::Surplus { name, found } => {
                write!(f, "unexpected: {name}, found shape {found:?}")
            }
            TensorMismatch::Misshapen { name, expected, found } => {
                write!(f, "misshapen: {name}, expected shape {expected:?}, found {found:?}")
            }
            TensorMismatch::WrongType { name, found } => {
                write!(f, "wrong type: {name}, expected F32, BF16 or F16, found {found}")
            }
            TensorMismatch::Twice { name } => write!(f, "in two shards: {name}"),
            TensorMismatch::NotInShard { name, shard } => {
                write!(f, "not in {shard}, where the index puts it: {name}")
            }
        }
    }
}

/// A checkpoint folder, checked and ready to be read parameter by parameter.
#[derive(Debug)]
pub struct CheckpointReader {
    dir: PathBuf,
    config: ModelConfig,
    model_type: ModelType,
    specs: Vec<ParamSpec>,
    files: Vec<SafetensorsFile>,
    /// Which file holds a tensor.
    places: BTreeMap<String, usize>,
}

impl CheckpointReader {
    /// Opens a folder with config.json and model.safetensors, or shards and their index.
    pub fn open(dir: &Path) -> Result<Self> {
        let (config, model_type) = ModelConfig::from_file(&dir.join(CONFIG))?;
        let specs = config.param_specs();
        let (files, places, mut problems) = open_files(dir)?;
        let reader =
            CheckpointReader { dir: dir.to_path_buf(), config, model_type, specs, files, places };
        reader.compare(&mut problems);
        if problems.is_empty() {
            return Ok(reader);
        }
        Err(Error::Mismatch { dir: reader.dir, problems })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The format of the folder.
    pub fn model_type(&self) -> ModelType {
        self.model_type
    }

    /// The model's parameters, in order.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// Refuses a model that does not have exactly the parameters of this checkpoint.
    pub fn check_fits(&self, model: &ModelConfig) -> Result<()> {
        let (wanted, dir) = (model.param_specs(), self.dir.display());
        let lacks = |list: &[ParamSpec], spec: &ParamSpec| {
            !list.iter().any(|other| other.name == spec.name && other.dims == spec.dims)
        };
        if let Some(spec) = wanted.iter().find(|spec| lacks(&self.specs, spec)) {
            return Err(Error::Argument(format!(
                "{dir} has no {} of shape {:?}, which the model needs",
                spec.name, spec.dims
            )));
        }
        if let Some(spec) = self.specs.iter().find(|spec| lacks(&wanted, spec)) {
            return Err(Error::Argument(format!(
                "{dir} has {} of shape {:?}, which the model does not have",
                spec.name, spec.dims
            )));
        }
        Ok(())
    }

    /// The values of a parameter, under its official shape.
    pub fn read(&mut self, id: ParamId) -> Result<Vec<f32>> {
        let spec = &self.specs[id.0];
        let mut values = vec![0.0; spec.count()];
        for tensor in self.model_type.file_tensors(id, spec) {
            let out = &mut values[tensor.start..][..tensor.count()];
            let name = self.stored_name(&tensor);
            let file = self.places.get(&name).copied().ok_or_else(|| Error::Mismatch {
                dir: self.dir.clone(),
                problems: vec![missing(&tensor)],
            })?;
            self.files[file].read_f32_into(&name, out)?;
        }
        Ok(values)
    }

    /// The name under which the folder has a tensor: today's, unless only the old one is there.
    fn stored_name(&self, tensor: &FileTensor) -> String {
        let format = self.model_type.format();
        let old = || format.old_name(&tensor.name).filter(|old| self.places.contains_key(old));
        match self.places.contains_key(&tensor.name) {
            true => tensor.name.clone(),
            false => old().unwrap_or_else(|| tensor.name.clone()),
        }
    }

    /// Collects everything that is missing, surplus or misshapen.
    fn compare(&self, problems: &mut Vec<TensorMismatch>) {
        let mut unclaimed: BTreeMap<&str, usize> =
            self.places.iter().map(|(name, &file)| (name.as_str(), file)).collect();
        for (i, spec) in self.specs.iter().enumerate() {
            for tensor in self.model_type.file_tensors(ParamId(i), spec) {
                let name = self.stored_name(&tensor);
                let Some(file) = unclaimed.remove(name.as_str()) else {
                    problems.push(missing(&tensor));
                    continue;
                };
                let found = self.files[file].dims(&name).unwrap_or_default();
                if found != tensor.dims {
                    problems.push(TensorMismatch::Misshapen {
                        name: name.clone(),
                        expected: tensor.dims.clone(),
                        found: found.to_vec(),
                    });
                }
                match self.files[file].dtype(&name) {
                    Some(Dtype::F32 | Dtype::BF16 | Dtype::F16) | None => {}
                    Some(Dtype::I8) if self.files[file].is_int8(&name) => {}
                    Some(other) => problems
                        .push(TensorMismatch::WrongType { name, found: format!("{other:?}") }),
                }
            }
        }
        let format = self.model_type.format();
        unclaimed.retain(|name, _| !format.may_hold(name));
        for (name, file) in unclaimed {
            let found = self.files[file].dims(name).unwrap_or_default().to_vec();
            problems.push(TensorMismatch::Surplus { name: name.to_string(), found });
        }
    }
}

fn missing(tensor: &FileTensor) -> TensorMismatch {
    TensorMismatch::Missing { name: tensor.name.clone(), expected: tensor.dims.clone() }
}

type OpenFiles = (Vec<SafetensorsFile>, BTreeMap<String, usize>, Vec<TensorMismatch>);

/// Opens the one file or all shards; the index, if there is one, must agree with them.
fn open_files(dir: &Path) -> Result<OpenFiles> {
    let index = dir.join(INDEX);
    let single = dir.join(SINGLE);
    let is_pickled = || {
        ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|f| dir.join(f).exists())
    };
    if !single.exists() && !index.exists() && is_pickled() {
        return Err(Error::PickledWeights { dir: dir.to_path_buf() });
    }
    let (paths, promised) = if single.exists() || !index.exists() {
        (vec![single], None)
    } else {
        let map = read_index(&index)?.weight_map;
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort();
        shards.dedup();
        (shards.into_iter().map(|shard| dir.join(shard)).collect(), Some(map))
    };
    let files = paths.iter().map(|p| SafetensorsFile::open(p)).collect::<Result<Vec<_>>>()?;
    let (mut places, mut problems) = (BTreeMap::new(), Vec::new());
    for (i, file) in files.iter().enumerate() {
        for name in file.names() {
            if places.insert(name.to_string(), i).is_some() {
                problems.push(TensorMismatch::Twice { name: name.to_string() });
            }
        }
    }
    for (name, shard) in promised.into_iter().flatten() {
        let path = dir.join(&shard);
        if places.get(&name).is_none_or(|&i| files[i].path() != path) {
            problems.push(TensorMismatch::NotInShard { name, shard });
        }
    }
    Ok((files, places, problems))
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn read_index(path: &Path) -> Result<Index> {
    let broken = |detail: String| Error::Json { file: path.to_path_buf(), detail };
    let mut text = String::new();
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.take(MAX_INDEX_BYTES).read_to_string(&mut text).map_err(Error::io("read", path))?;
    let index: Index = serde_json::from_str(&text).map_err(|e| broken(e.to_string()))?;
    for shard in index.weight_map.values() {
        // An index must not lead out of its folder.
        let mut parts = Path::new(shard).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        if !plain {
            return Err(broken(format!("`{shard}` is not the name of a file in this folder")));
        }
    }
    Ok(index)
}
