//! Values in JSON files.

use std::fs;
use std::path::Path;

use fox_base::durable;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Writes a value as JSON.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(|e| Error::Encode {
        path: path.to_path_buf(),
        format: "JSON",
        detail: e.to_string(),
    })?;
    text.push('\n');
    Ok(durable::write(path, text.as_bytes())?)
}

/// Reads a value from JSON.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
    serde_json::from_str(&text)
        .map_err(|e| Error::Damaged { path: path.to_path_buf(), detail: e.to_string() })
}
