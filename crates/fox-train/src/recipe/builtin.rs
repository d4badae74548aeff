//! The recipes that are part of the program, so that one binary is enough.

use std::collections::BTreeMap;
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

/// The recipe files of `recipes/`; those of families and sizes are made of `families.toml` and `sizes.toml`.
#[rustfmt::skip]
const FILES: &[BuiltinRecipe] = builtin!(
    "tiny-fox-pro", "tiny-fox-llama", "tiny-transformer", "tiny-transformer-pro",
    "tiny-stick-breaking", "tiny-hybrid", "tiny-encoder", "tiny-long-context", "books-small",
    "books-small-transformer", "samba-760m", "transformer-llama-760m-window", "long-context",
    "task-mqar", "task-mqar-rebound", "task-n-back", "task-flip-flop", "task-selective-copy",
    "task-parity", "published", "shared-1m", "shared-26m",
);

/// The last of [`FILES`]: what other recipes share, without the sizes of a model.
const SHARED: usize = 3;

/// Names of all recipes that are part of the program, those for users first.
pub fn builtin_names() -> Result<Vec<String>> {
    let (files, shared) = FILES.split_at(FILES.len() - SHARED);
    let names = |files: &[BuiltinRecipe]| files.iter().map(|f| f.name.into()).collect::<Vec<_>>();
    let families = families()?;
    let sized = families.iter().flat_map(|f| f.sizes.iter().map(|size| f.recipe(size)));
    Ok([names(files), sized.collect(), names(shared)].concat())
}

/// Names of the recipes that are listed to users one by one, without those of the families.
pub fn listed_names() -> impl Iterator<Item = &'static str> {
    FILES[..FILES.len() - SHARED].iter().map(|file| file.name)
}

/// A family of models, in several sizes: its recipes are called `NAME-SIZE`.
#[derive(Clone, Debug)]
pub struct Family {
    /// What comes before the size.
    pub name: String,
    /// The name for people.
    pub description: String,
    /// The sizes that it has.
    pub sizes: Vec<String>,
    table: Table,
}

impl Family {
    fn recipe(&self, size: &str) -> String {
        format!("{}-{size}", self.name)
    }
}

/// The families of `recipes/families.toml`.
pub fn families() -> Result<Vec<Family>> {
    let tables = tables("recipes/families.toml", include_str!("../../recipes/families.toml"))?;
    let family = |(name, mut table): (String, Table)| Family {
        name,
        description: take_text(&mut table, "description"),
        sizes: table.remove("sizes").and_then(|list| list.try_into().ok()).unwrap_or_default(),
        table,
    };
    Ok(tables.map(family).collect())
}

/// What a built-in recipe consists of.
pub(super) enum Source {
    /// The text of a file.
    File(&'static str),
    /// The recipe that a family extends, and the layers on top of it.
    Layers(String, Vec<Table>),
}

/// Finds a built-in recipe.
pub(super) fn find(name: &str) -> Result<Option<Source>> {
    if let Some(file) = FILES.iter().find(|file| file.name == name) {
        return Ok(Some(Source::File(file.text)));
    }
    for family in families()? {
        let size = name.strip_prefix(&family.name).and_then(|rest| rest.strip_prefix('-'));
        if let Some(size) = size.filter(|size| family.sizes.iter().any(|known| known == size)) {
            return sized(&family, size).map(Some);
        }
    }
    Ok(None)
}

/// The layers of a family in one of its sizes.
fn sized(family: &Family, name: &str) -> Result<Source> {
    let sizes = tables("recipes/sizes.toml", include_str!("../../recipes/sizes.toml"))?;
    let mut sizes: BTreeMap<String, Table> = sizes.collect();
    // The size and those that it is like, the last of them first.
    let (mut chain, mut next) = (Vec::new(), Some(name.to_string()));
    while let Some(mut size) = next.as_ref().and_then(|name| sizes.remove(name)) {
        let like = size.remove("like").and_then(|like| like.as_str().map(str::to_string));
        chain.insert(0, (std::mem::replace(&mut next, like).unwrap_or_default(), size));
    }
    let (mut base, mut layers, mut description) = (String::new(), Vec::new(), String::new());
    let shared = |section: &str| Some((section.to_string(), family.table.get(section)?.clone()));
    let mut model = Table::from_iter(["model", "training"].into_iter().filter_map(shared));
    for (_, size) in &mut chain {
        base += &take_text(size, "extends");
        description = take_text(size, "description").replace("{family}", &family.description);
    }
    let (names, chain): (Vec<String>, Vec<Table>) = chain.into_iter().unzip();
    let mut exceptions = Vec::new();
    for name in names {
        let mut own: Table =
            family.table.get(&name).and_then(Value::as_table).cloned().unwrap_or_default();
        for key in own.remove("unset").as_ref().and_then(Value::as_array).into_iter().flatten() {
            if let (Some(Value::Table(model)), Some(key)) = (model.get_mut("model"), key.as_str()) {
                model.remove(key);
            }
        }
        exceptions.push(own);
    }
    layers.extend(chain);
    layers.push(model);
    layers.extend(exceptions);
    layers.push(Table::from_iter([("description".to_string(), description.into())]));
    Ok(Source::Layers(base, layers))
}

fn take_text(table: &mut Table, key: &str) -> String {
    table.remove(key).and_then(|value| value.as_str().map(str::to_string)).unwrap_or_default()
}

/// The tables of a built-in TOML file, in their order.
fn tables(file: &str, text: &str) -> Result<impl Iterator<Item = (String, Table)> + use<>> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| Error::Toml {
        file: PathBuf::from(file),
        detail: e.to_string(),
    })?;
    Ok(table.into_iter().filter_map(|(name, value)| match value {
        Value::Table(table) => Some((name, table)),
        _ => None,
    }))
}

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
    let tables = tables("recipes/variants.toml", include_str!("../../recipes/variants.toml"))?;
    let variant = |(name, mut changes): (String, Table)| Variant {
        name,
        about: take_text(&mut changes, "about"),
        keeps: changes.remove("keeps").and_then(|keys| keys.try_into().ok()),
        changes,
    };
    Ok(tables.map(variant).collect())
}
