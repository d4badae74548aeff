//! Lists of recipes: a TOML file, a built-in sweep, or names on the command line.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use toml::Table;

use super::grid;
use crate::recipe::{self, SWEEPS};
use crate::{Error, Recipe, Result};

/// A search around each recipe instead of the recipe alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Search {
    /// Over {1, 2, 5} x 10^i until a local optimum is bracketed.
    LearningRate,
    /// Over heads of width 64 and 128.
    HeadDim,
}

/// A list of recipes to compare.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepList {
    /// One sentence about it.
    #[serde(default)]
    pub description: String,
    /// Names or files, with variants.
    pub recipes: Vec<String>,
    /// Keys that are laid over every recipe, in sections as in a recipe.
    #[serde(default)]
    pub set: Table,
    /// A search around each.
    #[serde(default)]
    pub search: Option<Search>,
}

/// A recipe of a sweep and the name it has there.
#[derive(Clone, Debug)]
pub struct SweepItem {
    /// For tables and folders.
    pub label: String,
    /// The label without the seed: runs of one group are repetitions.
    pub group: String,
    /// The recipe as it is named, for `fox train`.
    pub spec: String,
    /// `key=value` over the named recipe.
    pub settings: Vec<String>,
    /// The recipe.
    pub recipe: Recipe,
}

impl SweepItem {
    /// The same with one more setting, which its label tells.
    pub(super) fn with(&self, told: &str, setting: String) -> Result<SweepItem> {
        let add = |label: &str| format!("{label} {told}");
        let mut settings = self.settings.clone();
        settings.push(setting);
        let mut recipe = recipe::load(&self.spec, &settings)?;
        recipe.data.path.clone_from(&self.recipe.data.path);
        let (label, group) = (add(&self.label), add(&self.group));
        Ok(SweepItem { label, group, spec: self.spec.clone(), settings, recipe })
    }
}

impl SweepList {
    /// A list from a built-in sweep or a file.
    pub fn load(name: &str) -> Result<SweepList> {
        let text = match SWEEPS.iter().find(|sweep| sweep.name == name) {
            Some(sweep) => sweep.text.to_string(),
            None => fs::read_to_string(name).map_err(Error::io("read", Path::new(name)))?,
        };
        toml::from_str(&text).map_err(|e| Error::Toml {
            file: name.into(),
            detail: e.message().split_whitespace().collect::<Vec<_>>().join(" "),
        })
    }

    /// The list that the given names make: each is a sweep, a file with `recipes`, or a recipe.
    pub fn gather(names: &[String]) -> Result<(Vec<SweepList>, Option<Search>)> {
        let mut lists = Vec::new();
        for name in names {
            lists.push(match is_list(name) {
                true => SweepList::load(name)?,
                false => SweepList {
                    description: String::new(),
                    recipes: vec![name.clone()],
                    set: Table::new(),
                    search: None,
                },
            });
        }
        let search = lists.iter().find_map(|list| list.search);
        Ok((lists, search))
    }

    /// The recipes with the list's keys, the data and every place of the grid of overrides laid over them.
    pub fn items(&self, overrides: &[String], data: Option<&Path>) -> Result<Vec<SweepItem>> {
        let points = grid::points(overrides)?;
        let mut items = Vec::new();
        for name in &self.recipes {
            for point in &points {
                let mut settings = flat(&self.set, "");
                settings.extend(point.settings.iter().cloned());
                let mut recipe = recipe::load(name, &settings)?;
                if let Some(path) = data {
                    recipe.data.path = Some(path.to_path_buf());
                }
                let (label, group) = point.labels(&label(name));
                items.push(SweepItem { label, group, spec: name.clone(), settings, recipe });
            }
        }
        Ok(items)
    }
}

/// A table as `section.key=value` settings.
fn flat(table: &Table, above: &str) -> Vec<String> {
    let setting = |(key, value): (&String, &toml::Value)| match value {
        toml::Value::Table(inner) => flat(inner, &format!("{above}{key}.")),
        value => vec![format!("{above}{key}={value}")],
    };
    table.iter().flat_map(setting).collect()
}

/// A recipe's name without the folder and ending of a file.
fn label(name: &str) -> String {
    name.rsplit(['/', '\\']).next().unwrap_or(name).replace(".toml", "")
}

/// Whether a name is a sweep rather than a recipe.
fn is_list(name: &str) -> bool {
    if SWEEPS.iter().any(|sweep| sweep.name == name) {
        return true;
    }
    let text = fs::read_to_string(name).unwrap_or_default();
    text.parse::<Table>().is_ok_and(|table| table.contains_key("recipes"))
}
