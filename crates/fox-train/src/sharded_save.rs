//! Writing of a model whose weights are sharded: rank 0 asks their owners for one parameter after the other.

use fox_model::Model;
use fox_tensor::ParamId;

use crate::optimizer::Updater;
use crate::{Error, Result};

/// Gives the values of one parameter.
pub(crate) type Values<'a> = dyn FnMut(ParamId) -> fox_model::Result<Vec<f32>> + 'a;

/// At rank 0: runs `write` with the values of all parameters. Where weights are sharded, all other ranks call
/// [`send_to_first`] meanwhile.
pub(crate) fn at_first(
    model: &Model,
    updater: &Updater,
    write: impl FnOnce(&mut Values<'_>) -> Result<()>,
) -> Result<()> {
    let group = updater.group();
    let mut failure = None;
    let written = write(&mut |id| {
        let value = model.params().value(id);
        if !value.is_absent() {
            return Ok(value.to_f32()?);
        }
        let ask = || {
            group.broadcast(0, &(id.0 as u64).to_le_bytes())?;
            group.transfer(updater.owner(id), 0, &[])
        };
        match ask() {
            Ok(bytes) => {
                let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                Ok(bytes.unwrap_or_default().chunks_exact(4).map(value).collect())
            }
            Err(error) => {
                let words = error.to_string();
                failure = Some(error);
                Err(fox_model::Error::Argument(words))
            }
        }
    });
    if let Some(error) = failure {
        return Err(error.into());
    }
    if updater.sharded_weights().is_some() {
        // Nothing more is asked for.
        group.broadcast(0, &[])?;
    }
    written
}

/// At all other ranks: sends what rank 0 asks for. Does nothing where weights are replicated.
pub(crate) fn send_to_first(model: &Model, updater: &Updater) -> Result<()> {
    if updater.sharded_weights().is_none() {
        return Ok(());
    }
    let group = updater.group();
    loop {
        let asked = group.broadcast(0, &[])?;
        let Ok(id) = asked.try_into().map(u64::from_le_bytes) else { return Ok(()) };
        let id = ParamId(id as usize);
        let owner = updater.owner(id);
        let values = match owner == group.rank() {
            true => model.params().value(id).to_f32().map_err(Error::from)?,
            false => Vec::new(),
        };
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        group.transfer(owner, 0, &bytes)?;
    }
}
