//! The recipes that are part of the program, so that one binary is enough.

use std::path::PathBuf;

use toml::{Table, Value};

use crate::{Error, Result};

/// A recipe that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct BuiltinRecipe {
    /// Its name, the file's name without `.toml`.
    pub name: &'static str,
    /// Its TOML.
    pub text: &'static str,
}

macro_rules! builtin {
    ($($name:literal),* $(,)?) => {
        &[$(BuiltinRecipe {
            name: $name,
            text: include_str!(concat!("../../recipes/", $name, ".toml")),
        }),*]
    };
}

/// The recipes of `recipes/`.
pub const BUILTIN: &[BuiltinRecipe] = builtin!(
    "tiny-fox-pro",
    "tiny-fox-llama",
    "tiny-transformer",
    "tiny-transformer-pro",
    "tiny-stick-breaking",
    "tiny-hybrid",
    "tiny-long-context",
    "books-small",
    "books-small-transformer",
    "fox-llama-125m",
    "fox-llama-360m",
    "fox-llama-760m",
    "fox-llama-760m-48b",
    "fox-pro-125m",
    "fox-pro-360m",
    "fox-pro-760m",
    "fox-pro-760m-48b",
    "transformer-llama-125m",
    "transformer-llama-360m",
    "transformer-llama-760m",
    "transformer-llama-760m-48b",
    "transformer-llama-760m-window",
    "transformer-pro-125m",
    "transformer-pro-360m",
    "transformer-pro-760m",
    "transformer-pro-760m-48b",
    "delta-net-125m",
    "delta-net-360m",
    "delta-net-760m",
    "delta-net-760m-48b",
    "hgrn2-125m",
    "hgrn2-360m",
    "hgrn2-760m",
    "hgrn2-760m-48b",
    "mamba2-125m",
    "mamba2-360m",
    "mamba2-760m",
    "mamba2-760m-48b",
    "fox-gated-delta-net-125m",
    "fox-gated-delta-net-360m",
    "fox-gated-delta-net-760m",
    "fox-window-125m",
    "fox-window-360m",
    "fox-window-760m",
    "gated-delta-net-125m",
    "gated-delta-net-360m",
    "gated-delta-net-760m",
    "mamba2-window-125m",
    "mamba2-window-360m",
    "mamba2-window-760m",
    "samba-760m",
    "fox-llama-1m",
    "fox-pro-1m",
    "transformer-llama-1m",
    "transformer-pro-1m",
    "delta-net-1m",
    "hgrn2-1m",
    "mamba2-1m",
    "shared-1m",
    "fox-llama-26m",
    "fox-pro-26m",
    "transformer-llama-26m",
    "transformer-pro-26m",
    "delta-net-26m",
    "hgrn2-26m",
    "mamba2-26m",
    "shared-26m",
    "published",
    "long-context",
    "task-mqar",
    "task-mqar-rebound",
    "task-n-back",
    "task-flip-flop",
    "task-selective-copy",
    "task-parity",
);

/// A named change to any recipe.
#[derive(Clone, Debug)]
pub struct Variant {
    /// What follows the plus sign.
    pub name: String,
    /// One sentence about it.
    pub about: String,
    /// The keys of `[model]` that stay beside those it sets; all without a list. For variants that are another model.
    pub keeps: Option<Vec<String>>,
    /// The keys it sets.
    pub changes: Table,
}

/// The variants of `recipes/variants.toml`.
pub fn variants() -> Result<Vec<Variant>> {
    const TEXT: &str = include_str!("../../recipes/variants.toml");
    let table: Table = TEXT.parse().map_err(|e: toml::de::Error| Error::Toml {
        file: PathBuf::from("recipes/variants.toml"),
        detail: e.to_string(),
    })?;
    let variant = |(name, value): (String, Value)| {
        let Value::Table(mut changes) = value else { return None };
        let about = changes.remove("about").and_then(|v| v.as_str().map(str::to_string));
        let keeps = changes.remove("keeps").and_then(|keys| keys.try_into().ok());
        Some(Variant { name, about: about.unwrap_or_default(), keeps, changes })
    };
    Ok(table.into_iter().filter_map(variant).collect())
}
