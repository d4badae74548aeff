//! Overrides with several values, and the grid of all their combinations.
//!
//! ```text
//! training.seed=0..4               the integers 0, 1, 2, 3, 4
//! optimizer.peak_lr=1e-3,3e-3      a list; its items may be ranges
//! model.rope_base=10000            one value
//! ```

use anyhow::{Context, Result, bail};

/// The key whose values are repetitions of the same run.
const SEED: &str = "training.seed";
/// Largest number of runs of a grid.
const MAX_RUNS: usize = 10_000;

/// One point of a grid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// `key=value`, one for every setting.
    pub settings: Vec<String>,
    /// The values that vary, without the seed, e.g. `peak_lr 1e-3`.
    pub name: String,
    /// Its seed, if seeds vary.
    pub seed: Option<String>,
}

impl Point {
    /// The label of a run at this point, and the label that it shares with its other seeds.
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

/// All combinations of the values of the settings; the last setting changes fastest.
pub fn points(settings: &[String]) -> Result<Vec<Point>> {
    let mut points = vec![Point::default()];
    for setting in settings {
        let (key, text) = setting
            .split_once('=')
            .with_context(|| fox_train::Error::BadOverride { text: setting.clone() })?;
        let (key, values) = (key.trim(), values(key.trim(), text.trim())?);
        if points.len() * values.len() > MAX_RUNS {
            bail!("`{key}` makes a grid of more than {MAX_RUNS} runs; give fewer values");
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
    // Lists, tables and strings of TOML are single values.
    if text.starts_with(['[', '{', '"', '\'']) {
        return Ok(vec![text.to_string()]);
    }
    let mut values = Vec::new();
    for item in text.split(',').map(str::trim) {
        let ends = item.split_once("..").map(|(from, to)| (from.parse::<u64>(), to.parse::<u64>()));
        match ends {
            Some((Ok(from), Ok(to))) if from <= to && to - from < MAX_RUNS as u64 => {
                values.extend((from..=to).map(|value| value.to_string()));
            }
            Some((Ok(_), Ok(_))) => {
                bail!(
                    "`{key}` is {item}; a range is FIRST..LAST, both included, with at most {MAX_RUNS} values"
                );
            }
            _ if item.is_empty() => {
                bail!("`{key}` has an empty value; write key=value or key=value,value");
            }
            _ => values.push(item.to_string()),
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
    fn combines_lists_and_ranges() {
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
    fn keeps_single_values() {
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
    fn rejects_invalid_grids() {
        let error = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
            points(&settings).unwrap_err().to_string()
        };
        assert!(error(&["training.seed=4..0"]).contains("FIRST..LAST"));
        assert!(error(&["training.seed=0..99999999999"]).contains("at most 10000"));
        assert!(error(&["a.b=0..999", "a.c=0..99"]).contains("more than 10000 runs"));
        assert!(error(&["a.b=1,,2"]).contains("empty value"));
        assert!(error(&["a.b"]).contains("write key=value"));
    }
}
