//! The optimizer's moments as a safetensors file, one tensor in memory at a time.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use fox_model::{Model, SafetensorsFile};
use fox_tensor::{ParamId, Shape, Tensor};
use serde_json::{Map, Value, json};

use crate::optimizer::{Moments, Optimizer};
use crate::{Error, Result};

/// Writes `m.NAME` and `v.NAME` of every trained parameter and makes the file durable.
pub(super) fn write(path: &Path, model: &Model, optimizer: &Optimizer) -> Result<()> {
    let tensors: Vec<(String, &Tensor)> = model
        .params()
        .iter()
        .filter_map(|(id, spec, _)| Some((&spec.name, optimizer.moments(id)?)))
        .flat_map(|(name, moments)| {
            [(format!("m.{name}"), &moments.m), (format!("v.{name}"), &moments.v)]
        })
        .collect();
    let failed = |e| Error::io("write", path)(e);
    let file = File::create_new(path).map_err(Error::io("create", path))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let header = header(&tensors);
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(header.as_bytes()).map_err(failed)?;
    for (_, tensor) in &tensors {
        for values in tensor.to_f32()?.chunks(1 << 14) {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            out.write_all(&bytes).map_err(failed)?;
        }
    }
    let file = out.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync_all().map_err(Error::io("sync", path))
}

/// The JSON header, padded so that the data are aligned.
fn header(tensors: &[(String, &Tensor)]) -> String {
    let (mut map, mut start) = (Map::new(), 0);
    for (name, tensor) in tensors {
        let end = start + 4 * tensor.len();
        let entry = json!({
            "dtype": "F32", "shape": tensor.dims(), "data_offsets": [start, end],
        });
        map.insert(name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    text
}

/// Reads the moments of every trained parameter.
pub(super) fn read(path: &Path, model: &Model, optimizer: &mut Optimizer) -> Result<()> {
    let mut file = SafetensorsFile::open(path)?;
    let specs: Vec<(ParamId, String, Vec<usize>)> = model
        .params()
        .iter()
        .filter(|(_, spec, _)| spec.trainable)
        .map(|(id, spec, _)| (id, spec.name.clone(), spec.dims.clone()))
        .collect();
    for (id, name, dims) in specs {
        let mut moment = |kind: &str| -> Result<Tensor> {
            let key = format!("{kind}.{name}");
            if file.dims(&key) != Some(&dims[..]) {
                return Err(Error::Damaged {
                    path: path.to_path_buf(),
                    detail: format!("{key} is missing or has another shape than {dims:?}"),
                });
            }
            let values = file.read_f32(&key)?;
            Ok(model.device().from_f32(&values, Shape::from(&dims[..]))?)
        };
        let moments = Moments { m: moment("m")?, v: moment("v")? };
        optimizer.restore(id, moments);
    }
    Ok(())
}
