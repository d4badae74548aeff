//! Built-in recipes keep their configurations: `recipe_snapshot.txt` has a line for each, with all values that are not
//! defaults. `FOX_UPDATE_SNAPSHOTS=1` writes the file anew.
#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fox_train::{Recipe, recipe};
use toml::{Table, Value};

/// Every value of a table by its dotted key.
fn flatten(prefix: &str, table: &Table, into: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let key = format!("{prefix}{key}");
        match value {
            Value::Table(inner) => flatten(&format!("{key}."), inner, into),
            value => drop(into.insert(key, value.to_string())),
        }
    }
}

fn values(recipe: &Recipe) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    flatten("", &recipe.to_toml().unwrap().parse().unwrap(), &mut all);
    all.remove("description");
    all
}

#[test]
fn built_in_recipes_keep_their_configurations() {
    let names = recipe::builtin_names().unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recipe_snapshot.txt");
    let empty: Table = "model = {}".parse().unwrap();
    let defaults = values(&recipe::parse_table("defaults", empty).unwrap());
    let line = |name: &str| {
        let set = values(&recipe::load(name, &[]).unwrap());
        let set = set.iter().filter(|(key, value)| defaults.get(*key) != Some(value));
        let set: Vec<String> = set.map(|(key, value)| format!("{key}={value}")).collect();
        format!("{name}: {}", set.join("; "))
    };
    if std::env::var_os("FOX_UPDATE_SNAPSHOTS").is_some() {
        let lines: String = names.iter().map(|name| line(name) + "\n").collect();
        std::fs::write(&file, lines).unwrap();
    }
    let text = std::fs::read_to_string(&file).unwrap();
    let mut known = BTreeSet::new();
    for want in text.lines() {
        let (name, _) = want.split_once(':').unwrap();
        assert_eq!(line(name), want);
        known.insert(name);
    }
    let new = names.iter().filter(|name| !known.contains(name.as_str()));
    assert_eq!(new.count(), 0, "recipes without a line in recipe_snapshot.txt");
}
