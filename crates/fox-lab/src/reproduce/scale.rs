//! Scales: model sizes, token budgets and evaluation lengths of all experiments.

use std::fs;

use serde::{Deserialize, Serialize};
use toml::Table;

use super::{read_toml, unknown};
use anyhow::{Context, Result, bail};

/// The built-in scales: name and TOML.
pub(crate) const SCALES: [(&str, &str); 4] = [
    ("laptop", include_str!("../../recipes/reproduce/scales/laptop.toml")),
    ("minutes", include_str!("../../recipes/reproduce/scales/minutes.toml")),
    ("small", include_str!("../../recipes/reproduce/scales/small.toml")),
    ("125m", include_str!("../../recipes/reproduce/scales/125m.toml")),
];

/// A scale: model size, token budget and evaluation lengths of all experiments.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleConfig {
    /// Its name or file.
    #[serde(skip)]
    pub name: String,
    /// One sentence about it.
    pub description: String,
    /// The recipe of the model `fox-pro` is `fox-pro-SUFFIX`.
    pub suffix: String,
    /// Tokens of a run of an experiment with `share = 1`.
    pub tokens: u64,
    /// Seeds of repeated rows.
    pub seeds: u64,
    /// Fraction of the tokens on which learning rates are searched; that of `rates.toml` by default.
    #[serde(default)]
    pub search: Option<f64>,
    /// Fraction of every run that is learning-rate warm-up.
    pub warmup: f64,
    /// Tokens of a held-out segment on which the loss by position is measured.
    pub length: usize,
    /// Maximum number of held-out segments.
    pub documents: u64,
    /// The needle test.
    pub needles: Needles,
    /// Tokens of the text with which heads are inspected.
    pub inspect: usize,
    /// The value of `{window}` in models.
    pub window: String,
    /// The values of `{memory}` in models: longest decay times in tokens.
    pub memory: Vec<u64>,
    /// Overrides of every recipe.
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
    /// Words among which the right one is ranked.
    #[serde(default = "candidates")]
    pub candidates: u8,
}

fn candidates() -> u8 {
    16
}

impl ScaleConfig {
    /// Loads a scale by name, or from a file ending in `.toml`.
    pub fn load(name: &str) -> Result<ScaleConfig> {
        let text = match SCALES.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => text.to_string(),
            None if name.ends_with(".toml") => {
                fs::read_to_string(name).with_context(|| format!("cannot read {name}"))?
            }
            None => return Err(unknown("scale", name, SCALES.iter().map(|(known, _)| *known))),
        };
        let mut scale: ScaleConfig = read_toml(name, &text)?;
        scale.name = name.to_string();
        let rule = |holds: bool, key: &str, detail: &str| match holds {
            true => Ok(()),
            false => bail!("{name}: `{key}` {detail}"),
        };
        rule(scale.tokens > 0, "tokens", "must be at least 1")?;
        rule(scale.seeds > 0, "seeds", "must be at least 1")?;
        let search = scale.search.unwrap_or(1.0);
        rule(search > 0.0 && search <= 1.0, "search", "must be above 0 and at most 1")?;
        let candidates = scale.needles.candidates;
        rule((2..=64).contains(&candidates), "needles.candidates", "must be from 2 to 64")?;
        rule((0.0..1.0).contains(&scale.warmup), "warmup", "must be at least 0 and below 1")?;
        rule(scale.length > 0 && scale.documents > 0, "length", "and `documents` must be above 0")?;
        Ok(scale)
    }
}
