//! How large the experiments are.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use toml::Table;

use super::{read, unknown};
use crate::{Error, Result};

/// The scales that are built in: name and TOML.
pub const SCALES: [(&str, &str); 3] = [
    ("laptop", include_str!("../../recipes/reproduce/scales/laptop.toml")),
    ("small", include_str!("../../recipes/reproduce/scales/small.toml")),
    ("125m", include_str!("../../recipes/reproduce/scales/125m.toml")),
];

/// How large the experiments are.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalePlan {
    /// Its name or file.
    #[serde(skip)]
    pub name: String,
    /// One sentence about it.
    pub description: String,
    /// The recipe of the model `fox-pro` is `fox-pro-SUFFIX`.
    pub suffix: String,
    /// Tokens of a run whose experiment has a share of 1.
    pub tokens: u64,
    /// Seeds of rows that are repeated.
    pub seeds: u64,
    /// The part of every run that is warm-up.
    pub warmup: f64,
    /// Tokens of a held-out piece on which the loss at every position is measured.
    pub length: usize,
    /// Held-out pieces, at most.
    pub documents: u64,
    /// The needle test.
    pub needles: Needles,
    /// Tokens of the text that heads are looked at with.
    pub inspect: usize,
    /// What `{window}` stands for.
    pub window: String,
    /// What `{memory}` stands for: longest decay times in tokens.
    pub memory: Vec<u64>,
    /// Keys that are laid over every recipe.
    #[serde(default)]
    pub set: Table,
}

/// The needle test of a scale.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Needles {
    /// Lengths of the prompts in tokens.
    pub lengths: Vec<usize>,
    /// Number of depths.
    pub depths: usize,
    /// Cases per length and depth.
    pub cases: u64,
}

impl ScalePlan {
    /// A scale by name, or from a file ending in `.toml`.
    pub fn load(name: &str) -> Result<ScalePlan> {
        let text = match SCALES.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => text.to_string(),
            None if name.ends_with(".toml") => {
                fs::read_to_string(name).map_err(Error::io("read", Path::new(name)))?
            }
            None => return Err(unknown("scale", name, SCALES.iter().map(|(known, _)| *known))),
        };
        let mut scale: ScalePlan = read(name, &text)?;
        scale.name = name.to_string();
        let rule = |holds: bool, key: &str, detail: &str| match holds {
            true => Ok(()),
            false => Err(Error::value(name, key, detail)),
        };
        rule(scale.tokens > 0, "tokens", "must be at least 1")?;
        rule(scale.seeds > 0, "seeds", "must be at least 1")?;
        rule((0.0..1.0).contains(&scale.warmup), "warmup", "must be a part of 1")?;
        rule(scale.length > 0 && scale.documents > 0, "length", "and `documents` must be above 0")?;
        Ok(scale)
    }
}
