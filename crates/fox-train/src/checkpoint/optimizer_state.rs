//! What an optimizer keeps, as a safetensors file of tensors `STATE.PARAMETER`, one in memory at a time.

use std::path::Path;

use fox_model::{FileDtype, Model, SafetensorsFile, SafetensorsWriter};
use fox_tensor::{ParamId, Tensor};

use crate::optimizer::{EMA, Updater};
use crate::{Error, Result};

/// Writes the state of every trained parameter and makes the file durable.
pub(super) fn write(path: &Path, model: &Model, updater: &Updater) -> Result<()> {
    let mut tensors: Vec<(String, &Tensor)> = Vec::new();
    for (id, spec, _) in model.params().iter() {
        let states = updater.state(id, spec).into_iter();
        tensors.extend(states.map(|(state, tensor)| (key(state, &spec.name), tensor)));
    }
    let list: Vec<(&str, &[usize])> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.dims())).collect();
    let mut file = SafetensorsWriter::create(path, FileDtype::F32, &list)?;
    for (_, tensor) in &tensors {
        file.write(&tensor.to_f32()?)?;
    }
    Ok(file.finish()?)
}

/// Reads the state of every trained parameter.
pub(super) fn read(path: &Path, model: &Model, updater: &mut Updater) -> Result<()> {
    let mut file = SafetensorsFile::open(path)?;
    for (id, spec, value) in model.params().iter() {
        let names: Vec<&str> = updater.state(id, spec).iter().map(|(name, _)| *name).collect();
        let mut saved = Vec::with_capacity(names.len());
        for state in names {
            saved.push(read_tensor(&mut file, path, &key(state, &spec.name), value)?);
        }
        updater.restore(id, saved);
    }
    Ok(())
}

/// Puts the averages of the weights into a model.
pub(super) fn read_average(path: &Path, model: &mut Model) -> Result<()> {
    let mut file = SafetensorsFile::open(path)?;
    let params = model.params().iter().filter(|(_, spec, _)| spec.trainable);
    let names: Vec<(ParamId, String)> =
        params.map(|(id, spec, _)| (id, key(EMA, &spec.name))).collect();
    for (id, key) in names {
        let average = read_tensor(&mut file, path, &key, model.params().value(id))?;
        model.params_mut().set(id, average)?;
    }
    Ok(())
}

/// The name of a state of a parameter.
fn key(state: &str, parameter: &str) -> String {
    format!("{state}.{parameter}")
}

/// A tensor shaped like `like`, on its device.
fn read_tensor(
    file: &mut SafetensorsFile,
    path: &Path,
    key: &str,
    like: &Tensor,
) -> Result<Tensor> {
    if file.dims(key) != Some(like.dims()) {
        return Err(Error::Damaged {
            path: path.to_path_buf(),
            detail: format!("{key} is missing or has another shape than {:?}", like.dims()),
        });
    }
    let values = file.read_f32(key)?;
    Ok(like.device().from_f32(&values, like.shape())?)
}
