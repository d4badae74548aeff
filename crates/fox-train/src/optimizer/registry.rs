//! The optimizers that a recipe can name, and the section `[optimizer]` that names them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::{OPTIMIZERS, Optimizer};
use crate::recipe::{nearest, typed};
use crate::{Error, Result};

const SECTION: &str = "optimizer";

/// An optimizer that a recipe can name. Its fields are keys of `[optimizer]`; its default is what holds for
/// keys that are not given.
pub trait Rule: Optimizer + Default + Serialize + DeserializeOwned + 'static {
    /// What a recipe calls it.
    const NAME: &'static str;

    /// What must hold of the settings: whether it does, the key, and what is said if it does not.
    fn conditions(&self) -> Vec<(bool, &'static str, &'static str)>;
}

/// A rule, and its settings with all keys written out.
type RuleAndSettings = (Box<dyn Optimizer>, Table);

/// A rule without its type.
pub(super) struct Entry {
    name: &'static str,
    /// From the settings that a recipe gives; the first argument is the recipe's name.
    read: fn(&str, Table) -> Result<RuleAndSettings>,
}

impl Entry {
    pub(super) const fn of<R: Rule>() -> Entry {
        Entry { name: R::NAME, read: read_rule::<R> }
    }

    /// The names of its keys.
    fn keys(&self) -> Result<Vec<String>> {
        Ok((self.read)("defaults", Table::new())?.1.into_iter().map(|(key, _)| key).collect())
    }
}

/// The names of all optimizers.
pub fn optimizer_names() -> impl Iterator<Item = &'static str> {
    OPTIMIZERS.iter().map(|entry| entry.name)
}

fn find(origin: &str, name: &str) -> Result<&'static Entry> {
    OPTIMIZERS.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let known: Vec<&str> = optimizer_names().collect();
        let detail = format!("is \"{name}\"; there are {}", known.join(" and "));
        Error::value(origin, "optimizer.name", detail)
    })
}

fn read_rule<R: Rule>(origin: &str, keys: Table) -> Result<RuleAndSettings> {
    let rule: R = typed(origin, SECTION, Value::Table(keys))?;
    for (holds, key, detail) in rule.conditions() {
        if !holds {
            return Err(Error::value(origin, &format!("{SECTION}.{key}"), detail));
        }
    }
    let settings = Table::try_from(&rule).map_err(|e| encode(origin, &e))?;
    Ok((Box::new(rule), settings))
}

fn encode(origin: &str, e: &toml::ser::Error) -> Error {
    Error::Encode { path: origin.into(), format: "TOML", detail: e.to_string() }
}

/// The section `[optimizer]`: which one, the keys that all have, and its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerRecipe {
    /// One of [`optimizer_names`].
    pub name: String,
    /// The highest learning rate of the schedule.
    pub peak_lr: f64,
    /// Largest norm of the whole gradient; a longer one is scaled by `clip / (norm + 1e-6)`.
    pub clip: f64,
    /// The optimizer's own keys; those that are missing have their defaults.
    #[serde(flatten)]
    pub keys: Table,
}

/// The keys that all optimizers have.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Common {
    peak_lr: f64,
    clip: f64,
}

impl Default for Common {
    fn default() -> Self {
        Common { peak_lr: 1e-3, clip: 1.0 }
    }
}

const COMMON: [&str; 2] = ["peak_lr", "clip"];

impl Default for OptimizerRecipe {
    /// AdamW with the published settings.
    fn default() -> Self {
        let Common { peak_lr, clip } = Common::default();
        let name = OPTIMIZERS[0].name.to_string();
        OptimizerRecipe { name, peak_lr, clip, keys: Table::new() }
    }
}

impl OptimizerRecipe {
    /// An optimizer by name, with its default settings.
    pub fn named(name: &str) -> Result<Self> {
        Self::read(SECTION, Table::from_iter([("name".to_string(), Value::from(name))]))
    }

    /// An optimizer with custom settings.
    pub fn of<R: Rule>(rule: &R) -> Result<Self> {
        let keys = Table::try_from(rule).map_err(|e| encode(R::NAME, &e))?;
        Ok(OptimizerRecipe { name: R::NAME.to_string(), keys, ..Default::default() })
    }

    /// The settings, where the optimizer is an `R`.
    pub fn settings<R: Rule>(&self) -> Result<R> {
        typed(&self.name, SECTION, Value::Table(self.keys.clone()))
    }

    /// The rule itself.
    pub fn rule(&self) -> Result<Box<dyn Optimizer>> {
        let entry = find(SECTION, &self.name)?;
        Ok((entry.read)(SECTION, self.keys.clone())?.0)
    }

    /// Reads the section of the recipe `origin`.
    pub(crate) fn read(origin: &str, mut keys: Table) -> Result<Self> {
        let name = match keys.remove("name") {
            None => OPTIMIZERS[0].name.to_string(),
            Some(Value::String(name)) => name,
            Some(_) => return Err(Error::value(origin, "optimizer.name", "must be text")),
        };
        let entry = find(origin, &name)?;
        let mut common = Table::new();
        for key in COMMON {
            common.extend(keys.remove(key).map(|value| (key.to_string(), value)));
        }
        check_keys(origin, entry, &keys)?;
        let Common { peak_lr, clip } = typed(origin, SECTION, Value::Table(common))?;
        let keys = (entry.read)(origin, keys)?.1;
        Ok(OptimizerRecipe { name, peak_lr, clip, keys })
    }
}

/// An error about the first key that the optimizer does not have.
fn check_keys(origin: &str, entry: &Entry, keys: &Table) -> Result<()> {
    let known = entry.keys()?;
    let Some(key) = keys.keys().find(|key| !known.contains(key)) else { return Ok(()) };
    for other in OPTIMIZERS {
        if other.keys()?.contains(key) {
            let detail = format!(
                "is a key of {}, not of {}; set optimizer.name=\"{}\" or leave it out",
                other.name, entry.name, other.name
            );
            return Err(Error::value(origin, &format!("{SECTION}.{key}"), detail));
        }
    }
    let candidates = known.iter().map(String::as_str).chain(COMMON).chain(["name"]);
    Err(Error::UnknownKey {
        origin: origin.to_string(),
        key: format!("{SECTION}.{key}"),
        nearest: nearest(key, candidates).map(|near| format!("{SECTION}.{near}")),
    })
}
