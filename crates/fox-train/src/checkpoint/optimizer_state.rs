//! What an optimizer keeps, as a safetensors file of tensors `STATE.PARAMETER`, one in memory at a time.

use std::path::Path;

use fox_model::{FileDtype, Model, SafetensorsFile, SafetensorsWriter};
use fox_tensor::{ParamId, Tensor};

use crate::optimizer::{EMA, Updater};
use crate::{Error, Result};

/// Writes the state of every trained parameter and makes the file durable. Of several processes, the first one writes
/// and the others call [`send`].
pub(super) fn write(path: &Path, model: &Model, updater: &Updater) -> Result<()> {
    let mut names: Vec<(String, &[usize])> = Vec::new();
    for (_, spec, value) in model.params().iter() {
        let states = updater.state_names(spec).into_iter();
        names.extend(states.map(|state| (key(state, &spec.name), value.dims())));
    }
    let list: Vec<(&str, &[usize])> =
        names.iter().map(|(name, dims)| (name.as_str(), *dims)).collect();
    let mut file = SafetensorsWriter::create(path, FileDtype::F32, &list)?;
    gather(model, updater, |values| Ok(file.write(&values)?))?;
    Ok(file.finish()?)
}

/// Sends what is kept here to the process that writes.
pub(super) fn send(model: &Model, updater: &Updater) -> Result<()> {
    gather(model, updater, |_| Ok(()))
}

/// Gives `take`, in the first process, the values of every state in the order of the file.
fn gather(
    model: &Model,
    updater: &Updater,
    mut take: impl FnMut(Vec<f32>) -> Result<()>,
) -> Result<()> {
    for (id, spec, value) in model.params().iter() {
        let kept = updater.state(id, spec);
        for (i, _) in updater.state_names(spec).iter().enumerate() {
            let own = kept.get(i).map(|(_, tensor)| *tensor);
            let values = updater.group().bring(updater.owner(id), own, value.len())?;
            values.map_or(Ok(()), &mut take)?;
        }
    }
    Ok(())
}

/// Reads the state of every trained parameter.
pub(super) fn read(path: &Path, model: &Model, updater: &mut Updater) -> Result<()> {
    let mut file = SafetensorsFile::open(path)?;
    for (id, spec, value) in model.params().iter() {
        if updater.owner(id) != updater.group().rank() {
            continue;
        }
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
