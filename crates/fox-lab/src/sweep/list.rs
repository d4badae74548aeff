//! Lists of recipes: a TOML file, a built-in sweep, or names on the command line.
//!
//! ```toml
//! description = "One sentence"
//! recipes = ["tiny-fox-pro", "tiny-fox-pro+rope"]
//! experiment = "table3"      # optional: the models of an experiment of `fox reproduce`,
//! recipe = "tiny-{model}"     # as these recipes
//! [set.training]             # optional: overrides of every recipe
//! tokens = 1_500_000
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use fox_train::Recipe;
use serde::{Deserialize, Serialize};
use toml::Table;

use super::grid;
use crate::graph::{TrainRun, folder_name};
use crate::reproduce::{Experiment, read_toml};

macro_rules! sweeps {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../recipes/sweeps/", $name, ".toml")))),*]
    };
}

/// The built-in sweeps: name and TOML.
#[rustfmt::skip]
pub const SWEEPS: &[(&str, &str)] = sweeps!(
    "table3", "gates", "tiny-table3", "tiny-gates", "mqar", "mqar-rebound", "n-back", "flip-flop",
    "selective-copy", "parity", "successors-mqar", "successors-flip-flop",
);

/// A search around each recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Search {
    /// Learning rates {1, 2, 5} x 10^i until a local optimum is bracketed.
    LearningRate,
    /// Heads of width 64 and 128.
    HeadDim,
}

/// A list of recipes to compare.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepList {
    /// One sentence about it.
    #[serde(default)]
    pub description: String,
    /// Names or files of recipes, with variants.
    #[serde(default)]
    recipes: Vec<String>,
    /// The experiment of `fox reproduce` whose models come first.
    #[serde(default)]
    experiment: Option<String>,
    /// The recipe of a model of that experiment, with `{model}` for the model's name.
    #[serde(default)]
    recipe: String,
    /// Models whose recipes have another name.
    #[serde(default)]
    rename: BTreeMap<String, String>,
    /// The values of `{memory}` in that experiment, in tokens.
    #[serde(default)]
    memory: Vec<u64>,
    /// Overrides of every recipe, in sections as in a recipe.
    #[serde(default)]
    set: Table,
    /// A search around each recipe.
    #[serde(default)]
    search: Option<Search>,
}

/// A run of a sweep.
#[derive(Clone, Debug)]
pub struct SweepItem {
    /// The label without the seed: runs of one group are repetitions.
    pub group: String,
    /// What is trained, and where.
    pub run: TrainRun,
    /// Its recipe.
    pub recipe: Recipe,
}

impl SweepItem {
    fn new(
        (label, group): (String, String),
        spec: &str,
        settings: Vec<String>,
        data: Option<&Path>,
        out: &Path,
    ) -> Result<SweepItem> {
        let run = TrainRun {
            folder: out.join("runs").join(folder_name(&label)),
            label,
            spec: spec.to_string(),
            settings,
            data: data.map(Path::to_path_buf),
        };
        Ok(SweepItem { group, recipe: run.recipe()?, run })
    }

    /// The same with one more override, which is added to the label.
    pub(super) fn with(&self, name: &str, setting: String, out: &Path) -> Result<SweepItem> {
        let labels = (format!("{} {name}", self.run.label), format!("{} {name}", self.group));
        let mut settings = self.run.settings.clone();
        settings.push(setting);
        SweepItem::new(labels, &self.run.spec, settings, self.run.data.as_deref(), out)
    }
}

impl SweepList {
    /// Loads a built-in sweep or a file.
    pub fn load(name: &str) -> Result<SweepList> {
        match SWEEPS.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => read_toml(name, text),
            None => read_toml(
                name,
                &fs::read_to_string(name).with_context(|| format!("cannot read {name}"))?,
            ),
        }
    }

    /// Loads the given names, each a sweep, a file with a sweep, or a recipe.
    pub fn gather(names: &[String]) -> Result<(Vec<SweepList>, Option<Search>)> {
        let mut lists = Vec::new();
        for name in names {
            lists.push(match is_list(name) {
                true => SweepList::load(name)?,
                false => SweepList { recipes: vec![name.clone()], ..SweepList::default() },
            });
        }
        let search = lists.iter().find_map(|list| list.search);
        Ok((lists, search))
    }

    /// Names of all recipes: the models of the experiment, then the recipes of the list.
    pub fn recipes(&self) -> Result<Vec<String>> {
        let mut recipes = Vec::new();
        if let Some(name) = &self.experiment {
            if !self.recipe.contains("{model}") {
                bail!(
                    "a sweep over the experiment `{name}` needs a `recipe` that contains {{model}}"
                );
            }
            for row in Experiment::load(name)?.filled("", &self.memory).rows {
                let (model, variants) = row.model.split_once('+').unwrap_or((&row.model, ""));
                let model = self.rename.get(model).map_or(model, String::as_str);
                let plus = if variants.is_empty() { "" } else { "+" };
                recipes.push(self.recipe.replace("{model}", model) + plus + variants);
            }
        }
        recipes.extend(self.recipes.iter().cloned());
        Ok(recipes)
    }

    /// The runs: every recipe with the overrides of the list at every point of the grid of `overrides`.
    pub fn items(
        &self,
        overrides: &[String],
        data: Option<&Path>,
        out: &Path,
    ) -> Result<Vec<SweepItem>> {
        let points = grid::points(overrides)?;
        let mut items = Vec::new();
        for name in self.recipes()? {
            for point in &points {
                let mut settings = recipe_settings(&self.set);
                settings.extend(point.settings.iter().cloned());
                items.push(SweepItem::new(
                    point.labels(&label(&name)),
                    &name,
                    settings,
                    data,
                    out,
                )?);
            }
        }
        Ok(items)
    }
}

/// A table of overrides as `section.key=value`.
pub(crate) fn recipe_settings(table: &Table) -> Vec<String> {
    fn flatten(table: &Table, prefix: &str) -> Vec<String> {
        let setting = |(key, value): (&String, &toml::Value)| match value {
            toml::Value::Table(inner) if prefix.is_empty() => flatten(inner, &format!("{key}.")),
            value => vec![format!("{prefix}{key}={value}")],
        };
        table.iter().flat_map(setting).collect()
    }
    flatten(table, "")
}

/// A recipe's name without the folder and ending of a file.
fn label(name: &str) -> String {
    name.rsplit(['/', '\\']).next().unwrap_or(name).replace(".toml", "")
}

/// Whether a name is a sweep rather than a recipe.
fn is_list(name: &str) -> bool {
    let text = fs::read_to_string(name).unwrap_or_default();
    let is_sweep = |table: Table| table.contains_key("recipes") || table.contains_key("experiment");
    SWEEPS.iter().any(|(known, _)| *known == name) || text.parse().is_ok_and(is_sweep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_sweeps_load_and_describe_themselves() {
        for (name, _) in SWEEPS {
            let list = SweepList::load(name).unwrap();
            assert!(!list.description.is_empty(), "{name}");
            for item in list.items(&[], None, Path::new("out")).unwrap() {
                item.recipe.model_config(256).unwrap();
            }
        }
    }

    #[test]
    fn table_3_is_listed_once() {
        let recipes = |name: &str| SweepList::load(name).unwrap().recipes().unwrap();
        let (large, tiny) = (recipes("table3"), recipes("tiny-table3"));
        assert_eq!((large.len(), tiny.len()), (19, 19));
        assert_eq!(large[1], "transformer-llama-360m");
        assert_eq!(tiny[..2], ["tiny-transformer+no-rope", "tiny-transformer"]);
        assert!(tiny.contains(&"tiny-fox-llama+qk-norm+output-gate".to_string()));
        assert!(recipes("gates").contains(&"fox-llama-360m+bias-only-16384".to_string()));
        assert_eq!(recipes("tiny-gates").len(), 14);
    }

    #[test]
    fn every_task_has_a_sweep_over_every_model() {
        let tasks: Vec<&str> = fox_data::task::names().collect();
        for task in tasks {
            let list = SweepList::load(task).unwrap();
            let items = list.items(&[], None, Path::new("out")).unwrap();
            // Recall tasks also have both FoX models with gates initialized to long memories.
            let remember = if task.starts_with("mqar") { 2 } else { 0 };
            let memories = items.iter().filter(|item| {
                item.recipe.training.gate_init != fox_train::recipe::GateInit::Published
            });
            assert_eq!((items.len(), memories.count()), (9 + remember, remember), "{task}");
            let mut layers = Vec::new();
            for item in items {
                let config = item.recipe.data.task.as_ref().unwrap();
                assert_eq!(config.name, task);
                // The recipe of a run folder is the same recipe.
                let text = item.recipe.to_toml().unwrap();
                let again =
                    fox_train::recipe::parse_table(&item.recipe.name, text.parse().unwrap())
                        .unwrap();
                assert_eq!(again, item.recipe);
                let data = fox_train::data::RunData::open(&item.recipe).unwrap();
                let model = item.recipe.model_config(data.train.vocab_size()).unwrap();
                assert_eq!(model.vocab_size as u32, config.vocabulary);
                layers.push(format!("{:?}", model.mixer));
                let warmup = item.recipe.schedule.warmup_tokens;
                assert!(warmup * 10 < item.recipe.training.tokens && warmup > 0, "{task}");
            }
            layers.dedup();
            assert_eq!(layers.len(), 9, "{task}: no model twice");
        }
    }
}
