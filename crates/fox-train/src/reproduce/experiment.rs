//! One experiment of the paper: a list of models and how their figures are shown.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Table;

use super::{read, unknown};
use crate::Result;

macro_rules! experiments {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../recipes/reproduce/", $name, ".toml")))),*]
    };
}

/// The experiment whose rows are searches for learning rates.
pub const RATES: &str = "rates";

/// The experiments, in the order of the report: name and TOML.
pub const EXPERIMENTS: &[(&str, &str)] = experiments!(
    "rates", "main", "table3", "gates", "lengths", "sizes", "short", "heads", "pruning", "longer",
);

/// How the report shows an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Losses at every position, needles, heads.
    Main,
    /// With the parts each row has, and the order of the paper's figures.
    Ablation,
    /// Losses over the longest decay time.
    Gates,
    /// Losses over the learning rate.
    Rates,
    /// A plain table.
    Table,
    /// Speeds and pruned shares; its runs are trained alone.
    Pruning,
    /// Losses at every position and needles of models that were trained at one length and then at another.
    Longer,
}

/// What is measured after training, besides the held-out loss at the training length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// The loss at every position.
    Loss,
    /// Needles, easy and standard; of the first seed, or of all where they are what is asked for.
    Needle,
    /// Gates, attention and half-lives; of the first seed.
    Inspect,
}

/// Which positions a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The second half of the training length.
    Inside,
    /// Everything after twice the training length.
    Beyond,
}

/// The run of another row that a run begins with, and how its model is changed before it goes on.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartPlan {
    /// Name of that row, which comes earlier; the run with the same seed is taken.
    pub row: String,
    /// Forget gates are added, with this memory in multiples of the training length.
    #[serde(default)]
    pub memory: Option<f64>,
    /// Parts of the run after which RoPE begins to fade and after which it is gone.
    #[serde(default)]
    pub fade: Option<[f64; 2]>,
    /// RoPE's slow frequencies are divided by the growth of the length, those that turn 32 times within the old
    /// length stay, those between are divided in part: YaRN's interpolation "by parts" (arXiv 2309.00071).
    #[serde(default)]
    pub stretch: bool,
}

/// A row of an experiment.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowPlan {
    /// In the report.
    pub name: String,
    /// The model with its variants, without the scale's suffix.
    pub model: String,
    /// Whether it is trained with every seed.
    #[serde(default)]
    pub repeated: bool,
    /// The model whose learning rate it takes.
    #[serde(default)]
    rate: Option<String>,
    /// Its peak learning rate in multiples of the recipe's own, instead of a searched one.
    #[serde(default)]
    pub lr: Option<f64>,
    /// The run that it begins with instead of random weights. Both rows have an `lr`.
    #[serde(default)]
    pub start: Option<StartPlan>,
    /// Whole numbers of the recipe that are multiplied.
    #[serde(default)]
    pub times: BTreeMap<String, f64>,
    /// Keys of the recipe that are replaced.
    #[serde(default)]
    pub set: Table,
    /// The paper's figure.
    #[serde(default)]
    pub paper: Option<f64>,
    /// What `{memory}` stood for.
    #[serde(skip)]
    pub memory: Option<u64>,
}

impl RowPlan {
    /// The model whose learning rate it takes.
    pub fn rate(&self) -> &str {
        let base = self.model.split('+').next().unwrap_or(&self.model);
        self.rate.as_deref().unwrap_or(base)
    }
}

/// What the paper says about two rows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The row with the lower loss.
    pub better: String,
    /// The other one.
    pub worse: String,
    /// Where.
    pub at: Place,
}

/// One experiment.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// Its name, as `--only` takes it.
    #[serde(skip)]
    pub name: String,
    /// Heading in the report.
    pub title: String,
    /// What it is, in a sentence or two.
    pub about: String,
    /// How it is shown.
    pub shape: Shape,
    /// Part of the scale's tokens that every run gets.
    pub share: f64,
    /// Whether it is no experiment of the paper, and done only when its name is given.
    #[serde(default)]
    pub extra: bool,
    /// What is measured.
    #[serde(default)]
    pub evaluate: Vec<Measure>,
    /// The models.
    pub rows: Vec<RowPlan>,
    /// What the paper says about them.
    #[serde(default)]
    pub claims: Vec<Claim>,
}

impl Experiment {
    /// A built-in experiment.
    pub fn load(name: &str) -> Result<Experiment> {
        let Some((_, text)) = EXPERIMENTS.iter().find(|(known, _)| *known == name) else {
            return Err(unknown("experiment", name, EXPERIMENTS.iter().map(|(known, _)| *known)));
        };
        let mut experiment: Experiment = read(&format!("recipes/reproduce/{name}.toml"), text)?;
        experiment.name = name.to_string();
        Ok(experiment)
    }

    /// Puts a scale's values in the place of `{window}` and `{memory}`.
    pub(super) fn filled(mut self, window: &str, memory: &[u64]) -> Experiment {
        let mut rows = Vec::new();
        for mut row in self.rows {
            row.model = row.model.replace("{window}", window);
            if !row.model.contains("{memory}") {
                rows.push(row);
                continue;
            }
            for &tokens in memory {
                let fill = |text: &str| text.replace("{memory}", &tokens.to_string());
                let (name, model) = (fill(&row.name), fill(&row.model));
                rows.push(RowPlan { name, model, memory: Some(tokens), ..row.clone() });
            }
        }
        self.rows = rows;
        self
    }
}
