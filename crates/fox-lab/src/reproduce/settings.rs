//! The settings of a reproduction, stored in its folder so that the report can be written again.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fox_base::durable;
use fox_eval::files::write_whole;
use serde::{Deserialize, Serialize};

use super::{EXPERIMENTS, Experiment, Reproduction, ReproductionOptions, ScaleConfig, held_out};

const FILE: &str = "plan.json";

/// Settings of a reproduction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Name of the data in the report.
    pub corpus: String,
    /// Prepared data; the embedded corpus by default.
    pub data: Option<PathBuf>,
    /// Name or file of the scale.
    pub scale: String,
    /// Experiments; empty for all of the paper.
    pub only: Vec<String>,
    /// Tokens per run; the scale's by default.
    pub tokens: Option<u64>,
    /// Seeds; the scale's by default.
    pub seeds: Option<u64>,
    /// The command line.
    pub command: String,
}

impl Settings {
    /// Reads the settings of a folder.
    pub fn read(out: &Path) -> Result<Settings> {
        let path = out.join(FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!(
                "{} is not a folder of `fox reproduce`; give the folder that its --out named",
                out.display()
            )
        })?;
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Adds the experiments that the folder already contains, so that one report covers all of them.
    ///
    /// # Errors
    /// A folder that contains a reproduction at another scale or on other data, or other files.
    pub fn joined(&self, out: &Path) -> Result<Settings> {
        let mut all = self.clone();
        if !out.join(FILE).exists() {
            if !durable::is_vacant(out)? {
                bail!(
                    "{} contains other files than a reproduction; choose another --out",
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
                "{} contains a reproduction at scale {} on {}, not {} on {}; choose another --out",
                out.display(),
                there.scale,
                data(&there),
                self.scale,
                data(self)
            );
        }
        all.only = experiment_names(&self.only)?;
        let stored = experiment_names(&there.only)?;
        let new: Vec<String> = stored.into_iter().filter(|n| !all.only.contains(n)).collect();
        all.only.extend(new);
        Ok(all)
    }

    /// Writes the settings to the folder.
    pub fn write(&self, out: &Path) -> Result<()> {
        Ok(write_whole(&out.join(FILE), &serde_json::to_vec_pretty(self)?)?)
    }

    /// The planned runs.
    pub fn plan(&self, out: &Path) -> Result<Reproduction> {
        let options = ReproductionOptions {
            only: self.only.clone(),
            out: out.to_path_buf(),
            tokens: self.tokens,
            seeds: self.seeds,
            data: self.data.clone(),
            heldout: self.data.is_some().then(|| held_out::prepared(out)),
        };
        Reproduction::new(ScaleConfig::load(&self.scale)?, options)
    }
}

/// The given names; those of all experiments of the paper if there are none.
fn experiment_names(only: &[String]) -> Result<Vec<String>> {
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
