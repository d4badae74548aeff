//! What was asked for, kept in the folder so that the report can be written anew.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fox_base::durable;
use fox_eval::files::write_whole;
use fox_train::reproduce::{EXPERIMENTS, Experiment, Plan, PlanOptions, ScalePlan};
use serde::{Deserialize, Serialize};

use super::held_out;

const FILE: &str = "plan.json";

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What the report calls the data.
    pub corpus: String,
    /// The data; the embedded corpus without.
    pub data: Option<PathBuf>,
    /// Name or file of the scale.
    pub scale: String,
    /// Experiments; all of the paper's when empty.
    pub only: Vec<String>,
    /// Tokens instead of the scale's.
    pub tokens: Option<u64>,
    /// Seeds instead of the scale's.
    pub seeds: Option<u64>,
    /// The command line.
    pub command: String,
}

impl Settings {
    /// The settings of a folder.
    pub fn read(out: &Path) -> Result<Settings> {
        let path = out.join(FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!("{} holds no reproduction; give the --out folder of one", out.display())
        })?;
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// The same with the experiments that the folder has already, so that one report covers all of them.
    ///
    /// # Errors
    /// A folder that holds a reproduction at another scale or on other data, or something else.
    pub fn joined(&self, out: &Path) -> Result<Settings> {
        let mut all = self.clone();
        if !out.join(FILE).exists() {
            if !durable::is_vacant(out)? {
                bail!(
                    "{} holds something else than a reproduction; choose another --out",
                    out.display()
                );
            }
            return Ok(all);
        }
        let there = Settings::read(out)?;
        if there.scale != self.scale || there.data != self.data {
            let data = |s: &Settings| {
                s.data.as_ref().map_or("the embedded corpus".into(), |d| d.display().to_string())
            };
            bail!(
                "{} holds a reproduction at scale {} on {}, not {} on {}; choose another --out",
                out.display(),
                there.scale,
                data(&there),
                self.scale,
                data(self)
            );
        }
        // No names are all experiments of the paper.
        let (own, there) = (named(&self.only)?, named(&there.only)?);
        all.only.clone_from(&own);
        all.only.extend(there.into_iter().filter(|name| !own.contains(name)));
        Ok(all)
    }

    /// Writes them to the folder.
    pub fn write(&self, out: &Path) -> Result<()> {
        Ok(write_whole(&out.join(FILE), &serde_json::to_vec_pretty(self)?)?)
    }

    /// All runs.
    pub fn plan(&self, out: &Path) -> Result<Plan> {
        let options = PlanOptions {
            only: self.only.clone(),
            out: out.to_path_buf(),
            tokens: self.tokens,
            seeds: self.seeds,
            data: self.data.clone(),
            heldout: self.data.is_some().then(|| held_out::prepared(out)),
        };
        Ok(Plan::new(ScalePlan::load(&self.scale)?, options)?)
    }
}

/// The names of experiments; those of the paper's when none is given.
fn named(only: &[String]) -> Result<Vec<String>> {
    if !only.is_empty() {
        return Ok(only.to_vec());
    }
    let mut names = Vec::new();
    for (name, _) in EXPERIMENTS {
        if !Experiment::load(name)?.extra {
            names.push(name.to_string());
        }
    }
    Ok(names)
}
