//! Settings that name several values, and their product.
//!
//! ```text
//! training.seed=0..4               the whole numbers 0, 1, 2, 3, 4
//! optimizer.peak_lr=1e-3,3e-3      a list; its parts may be ranges
//! model.rope_base=10000            one value, as everywhere
//! ```

use crate::{Error, Result};

/// The key whose values are repetitions of one and the same run.
const SEED: &str = "training.seed";
/// Runs of a grid, at most: more are a mistake.
const MOST: usize = 10_000;

/// One place of a grid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// `key=value`, one for every setting.
    pub settings: Vec<String>,
    /// What tells it from other places, the seed left out, e.g. `peak_lr 1e-3`; empty if nothing does.
    pub name: String,
    /// Its seed, where seeds vary.
    pub seed: Option<String>,
}

impl Point {
    /// The name of a run at this place, and that of all runs that differ from it only in the seed.
    pub fn labels(&self, recipe: &str) -> (String, String) {
        let group = match self.name.as_str() {
            "" => recipe.to_string(),
            name => format!("{recipe} {name}"),
        };
        match &self.seed {
            Some(seed) => (format!("{group} seed {seed}"), group),
            None => (group.clone(), group),
        }
    }
}

/// All combinations of the values that the settings name, the last setting changing fastest.
pub fn points(settings: &[String]) -> Result<Vec<Point>> {
    let mut points = vec![Point::default()];
    for setting in settings {
        let bad = || Error::BadOverride { text: setting.clone() };
        let (key, text) = setting.split_once('=').ok_or_else(bad)?;
        let (key, values) = (key.trim(), values(key.trim(), text.trim())?);
        if points.len() * values.len() > MOST {
            let detail = format!("makes a grid of more than {MOST} runs; give fewer values");
            return Err(Error::value("--set", key, detail));
        }
        let varies = values.len() > 1;
        let with = |point: &Point, value: &String| {
            let mut point = point.clone();
            point.settings.push(format!("{key}={value}"));
            if varies && key == SEED {
                point.seed = Some(value.clone());
            } else if varies {
                let short = key.rsplit('.').next().unwrap_or(key);
                let space = if point.name.is_empty() { "" } else { " " };
                point.name += &format!("{space}{short} {value}");
            }
            point
        };
        points = points.iter().flat_map(|p| values.iter().map(move |v| with(p, v))).collect();
    }
    Ok(points)
}

/// The values of one setting.
fn values(key: &str, text: &str) -> Result<Vec<String>> {
    // TOML's own lists, tables and strings are single values.
    if text.starts_with(['[', '{', '"', '\'']) {
        return Ok(vec![text.to_string()]);
    }
    let mut values = Vec::new();
    for part in text.split(',').map(str::trim) {
        let ends = part.split_once("..").map(|(from, to)| (from.parse::<u64>(), to.parse::<u64>()));
        match ends {
            Some((Ok(from), Ok(to))) if from <= to && to - from < MOST as u64 => {
                values.extend((from..=to).map(|value| value.to_string()));
            }
            Some((Ok(_), Ok(_))) => {
                let detail = format!(
                    "is {part}; a range is FIRST..LAST, both included, with at most {MOST} values"
                );
                return Err(Error::value("--set", key, detail));
            }
            _ if part.is_empty() => {
                let detail = "has an empty value; write key=value or key=value,value";
                return Err(Error::value("--set", key, detail));
            }
            _ => values.push(part.to_string()),
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(settings: &[&str]) -> Vec<Point> {
        let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
        points(&settings).unwrap()
    }

    #[test]
    fn lists_and_ranges_are_multiplied() {
        let points =
            grid(&["training.seed=0..1", "optimizer.peak_lr=1e-3,3e-3", "training.batch=4"]);
        let labels: Vec<(String, String)> = points.iter().map(|p| p.labels("r")).collect();
        let label = |run: &str, group: &str| (run.to_string(), group.to_string());
        assert_eq!(
            labels,
            [
                label("r peak_lr 1e-3 seed 0", "r peak_lr 1e-3"),
                label("r peak_lr 3e-3 seed 0", "r peak_lr 3e-3"),
                label("r peak_lr 1e-3 seed 1", "r peak_lr 1e-3"),
                label("r peak_lr 3e-3 seed 1", "r peak_lr 3e-3"),
            ]
        );
        assert_eq!(
            points[3].settings,
            ["training.seed=1", "optimizer.peak_lr=3e-3", "training.batch=4"]
        );
    }

    #[test]
    fn single_values_stay_what_they_are() {
        for setting in ["training.gate_init=[8, 512]", "data.path=../a", "data.tokenizer=\"a,b\""] {
            let points = grid(&[setting]);
            assert_eq!(points.len(), 1);
            assert_eq!(points[0].settings, [setting]);
            assert_eq!(points[0].labels("r").0, "r");
        }
        assert_eq!(grid(&[]).len(), 1);
        assert_eq!(grid(&["training.seed=0..2,7"]).len(), 4);
    }

    #[test]
    fn bad_grids_get_one_sentence() {
        let error = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
            points(&settings).unwrap_err().to_string()
        };
        assert!(error(&["training.seed=4..0"]).contains("FIRST..LAST"));
        assert!(error(&["training.seed=0..99999999999"]).contains("at most 10000"));
        assert!(error(&["a.b=0..999", "a.c=0..99"]).contains("more than 10000 runs"));
        assert!(error(&["a.b=1,,2"]).contains("empty value"));
        assert!(error(&["a.b"]).contains("is no override"));
    }
}
