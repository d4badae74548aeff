//! One experiment of the paper: a list of models, and how the report shows them.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Table;

use super::{read_toml, unknown};
use anyhow::Result;

macro_rules! experiments {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../recipes/reproduce/", $name, ".toml")))),*]
    };
}

/// The experiment whose rows are learning-rate searches.
pub(crate) const RATES: &str = "rates";

/// The experiments, in the order of the report: name and TOML.
#[rustfmt::skip]
pub(crate) const EXPERIMENTS: &[(&str, &str)] = experiments!(
    "rates", "main", "table3", "gates", "lengths", "sizes", "short", "heads", "pruning", "longer",
    "successors", "start",
);

/// How the report shows an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Loss by position, needles, heads.
    Main,
    /// A table with the components of each row, and the order of the paper's figures.
    Ablation,
    /// Loss over the longest decay time.
    Gates,
    /// Loss over the learning rate.
    Rates,
    /// A plain table.
    Table,
    /// Throughput and pruned fractions; nothing runs beside its runs.
    Pruning,
    /// Loss by position and needles of models trained at one length and then at another.
    Longer,
}

/// A measurement after training, besides the held-out loss at the training length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measurement {
    /// Loss by position.
    Loss,
    /// Needle tests, easy and standard; of the first seed, or of all seeds in [`Layout::Longer`].
    Needle,
    /// Needles whose answer is one word out of several, ranked among them; of all seeds.
    Candidates,
    /// Gates, attention and half-lives; of the first seed.
    Inspect,
    /// Throughput and memory of a few steps with nothing else on the device; of the first seed.
    Speed,
}

/// The figure that a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Figure {
    /// The loss in the second half of the training length.
    Inside,
    /// The loss at everything after twice the training length.
    Beyond,
    /// The fraction of needles whose right word is the most likely candidate, over all lengths.
    Recall,
    /// Tokens per second with nothing else on the device.
    Speed,
}

impl Figure {
    /// Whether the lower value is the better one.
    pub fn is_loss(self) -> bool {
        matches!(self, Figure::Inside | Figure::Beyond)
    }
}

/// The row whose weights initialize a run, and how its model is changed before training.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartConfig {
    /// Name of that earlier row; the run with the same seed is used.
    pub row: String,
    /// Adds forget gates with this memory, in multiples of the training length.
    #[serde(default)]
    pub memory: Option<f64>,
    /// Fractions of the run at which RoPE starts to fade out and is gone.
    #[serde(default)]
    pub fade: Option<[f64; 2]>,
    /// Scales RoPE frequencies by YaRN's "NTK-by-parts" interpolation (arXiv 2309.00071): low frequencies are divided
    /// by the growth of the length, those that rotate 32 times within the old length stay.
    #[serde(default)]
    pub stretch: bool,
}

/// A row of an experiment.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowConfig {
    /// Name in the report.
    pub name: String,
    /// The model with its variants, without the scale's suffix.
    pub model: String,
    /// Whether it is trained with all seeds.
    #[serde(default)]
    pub repeated: bool,
    /// The model whose searched learning rate it uses.
    #[serde(default)]
    rate: Option<String>,
    /// Its peak learning rate as a multiple of the recipe's, instead of a searched one.
    #[serde(default)]
    pub lr: Option<f64>,
    /// The row whose weights it starts from. Both rows have an `lr`.
    #[serde(default)]
    pub start: Option<StartConfig>,
    /// Factors of integer keys of the recipe.
    #[serde(default)]
    pub times: BTreeMap<String, f64>,
    /// Overrides of the recipe.
    #[serde(default)]
    pub set: Table,
    /// The figure in the paper.
    #[serde(default)]
    pub paper: Option<f64>,
    /// The value of `{memory}`.
    #[serde(skip)]
    pub memory: Option<u64>,
}

impl RowConfig {
    /// A row for the search of a model's learning rate.
    pub(crate) fn search(name: String, model: String) -> RowConfig {
        RowConfig {
            name,
            rate: Some(model.clone()),
            model,
            repeated: false,
            lr: None,
            start: None,
            times: BTreeMap::new(),
            set: Table::new(),
            paper: None,
            memory: None,
        }
    }

    /// The model whose searched learning rate it uses.
    pub fn rate(&self) -> &str {
        let base = self.model.split('+').next().unwrap_or(&self.model);
        self.rate.as_deref().unwrap_or(base)
    }
}

/// A published claim about two rows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The row with the lower loss, or with the higher recall or speed.
    pub better: String,
    /// The other row.
    pub worse: String,
    /// In which figure.
    pub at: Figure,
    /// Who claims it, if not the paper.
    #[serde(default)]
    pub source: Option<String>,
}

/// One experiment.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// Its name.
    #[serde(skip)]
    pub name: String,
    /// Heading in the report.
    pub title: String,
    /// A sentence or two about it.
    pub about: String,
    /// How the report shows it.
    pub shape: Layout,
    /// Fraction of the scale's tokens that every run gets.
    pub share: f64,
    /// Whether it is not in the paper, and runs only when it is named.
    #[serde(default)]
    pub extra: bool,
    /// Measurements.
    #[serde(default)]
    pub evaluate: Vec<Measurement>,
    /// The models.
    pub rows: Vec<RowConfig>,
    /// Published claims about them.
    #[serde(default)]
    pub claims: Vec<Claim>,
}

impl Experiment {
    /// Loads a built-in experiment.
    pub fn load(name: &str) -> Result<Experiment> {
        let Some((_, text)) = EXPERIMENTS.iter().find(|(known, _)| *known == name) else {
            return Err(unknown("experiment", name, EXPERIMENTS.iter().map(|(known, _)| *known)));
        };
        let mut experiment: Experiment =
            read_toml(&format!("recipes/reproduce/{name}.toml"), text)?;
        experiment.name = name.to_string();
        Ok(experiment)
    }

    /// Replaces `{window}` and `{memory}`; a row with `{memory}` becomes one row per value.
    pub(crate) fn filled(mut self, window: &str, memory: &[u64]) -> Experiment {
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
                rows.push(RowConfig { name, model, memory: Some(tokens), ..row.clone() });
            }
        }
        self.rows = rows;
        self
    }
}
