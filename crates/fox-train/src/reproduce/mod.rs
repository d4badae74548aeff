//! The paper's experiments as data: which models are trained for which table, at which scale.
//!
//! `recipes/reproduce/*.toml` are the experiments, `recipes/reproduce/scales/*.toml` the scales; `README.md` there
//! explains their keys. A [`Plan`] turns both into runs, each a recipe with settings for `fox train`. Runs that several
//! experiments ask for are the same run.

mod agreement;
mod experiment;
mod plan;
mod scale;
mod start;

pub use agreement::Agreement;
pub use experiment::{
    Claim, EXPERIMENTS, Experiment, Measure, Place, RATES, RowPlan, Shape, StartPlan,
};
pub use plan::{Plan, PlanOptions, PlannedRun};
pub use scale::{Needles, SCALES, ScalePlan};
pub use start::PlannedStart;

use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Reads a TOML text; an error names the file.
fn read<T: DeserializeOwned>(file: &str, text: &str) -> Result<T> {
    toml::from_str(text).map_err(|e| Error::Toml {
        file: file.into(),
        detail: e.message().split_whitespace().collect::<Vec<_>>().join(" "),
    })
}

/// An error for a name that is none of the known ones.
fn unknown<'a>(what: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let known: Vec<&str> = known.collect();
    Error::UnknownPart { what, name: name.to_string(), known: known.join(", ") }
}
