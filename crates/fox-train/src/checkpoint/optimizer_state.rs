//! Optimizer state as a safetensors file of tensors `STATE.PARAMETER`, one in memory at a time. Every process
//! writes and reads those of the parameters it owns; the bytes do not depend on the number of processes.

use std::path::Path;

use fox_model::{Model, SafetensorsFile, SafetensorsRanges};
use fox_tensor::{ParamId, Tensor};

use crate::optimizer::{EMA, Updater};
use crate::{Error, Result};

/// The tensors of the file: name and extents of each.
fn tensors<'a>(model: &'a Model, updater: &Updater) -> Vec<(String, &'a [usize])> {
    let params = model.params().iter();
    let states = params.flat_map(|(_, spec, value)| {
        let names = updater.state_names(spec).into_iter();
        names.map(move |state| (key(state, &spec.name), value.dims()))
    });
    states.collect()
}

/// Starts the file, which all processes then [write to](write).
pub(super) fn create(path: &Path, model: &Model, updater: &Updater) -> Result<()> {
    let names = tensors(model, updater);
    SafetensorsRanges::create(path, &borrowed(&names))?;
    Ok(())
}

/// Writes the state of the parameters that belong to this process into a file that is [there](create) already, and
/// makes it durable.
pub(super) fn write(path: &Path, model: &Model, updater: &Updater) -> Result<()> {
    let names = tensors(model, updater);
    let mut file = SafetensorsRanges::open(path, &borrowed(&names))?;
    for (id, spec, _) in model.params().iter() {
        for (state, tensor) in updater.state(id, spec) {
            file.write(&key(state, &spec.name), &tensor.to_f32()?)?;
        }
    }
    Ok(file.finish()?)
}

fn borrowed<'a>(names: &'a [(String, &'a [usize])]) -> Vec<(&'a str, &'a [usize])> {
    names.iter().map(|(name, dims)| (name.as_str(), *dims)).collect()
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
